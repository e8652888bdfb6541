"""Whether a run can be started, as far as that can be told without its data, weights and devices.

python -m exgrpo_jax.check --config=arithmetic --workdir=/tmp/arithmetic

Takes the flags of train, and checks what train checks first: flags, config and reward functions,
the model's shape and the tokenizer. Of a model that is named on the Hub it fetches what describes
it, no weights; else it writes nothing. What lies in a bucket is not read.
Exit status: 0, or 2 for what cannot be run.
"""

from ml_collections import ConfigDict

from exgrpo_jax import cli, prior_experience
from exgrpo_jax.data import tokenizer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Config, model_config, model_name, parse_config, with_folders
from exgrpo_jax.grading import pool
from exgrpo_jax.reporting import weights_and_biases
from exgrpo_jax.rollout import facts
from exgrpo_jax.runtime import compilations, hub
from exgrpo_jax.runtime.workdir import check_hosts, check_workdir, check_writable, make_folder


def define_flags() -> None:
  """Of this command: those of train."""
  cli.define_config()
  cli.define_workdir()
  cli.define_hosts()


def main(args: cli.Args) -> None:
  """Checks a command line of train."""
  config = check_command(args.config, args.workdir)
  hub.recall(args.workdir)
  remote = _check_model(with_folders(config, model_name(config)))
  untried = ', '.join(['data', 'weights', *remote])
  print(f'nothing is wrong with the flags and the config; {untried} and devices were not tried')


def _check_model(config: Config) -> list[str]:
  """Where model and tokenizer are that cannot be read from any machine: in a bucket.

  Raises InputError where they are not where the config says, or the model has another shape.
  """
  is_read = {path: '://' not in path for path in (config.model.path, config.tokenizer.path)}
  if is_read[config.model.path]:
    model_config(config)
  path = config.tokenizer.path or config.model.path
  if path and is_read[path]:
    tokenizer.load(path)
  return [path for path, read in is_read.items() if not read]


def check_command(values: ConfigDict | None, workdir: str | None) -> Config:
  """The checked configuration of a run; InputError says what is wrong with it."""
  if not values or not workdir:
    raise InputError(
      '--config and --workdir are both needed, e.g. --config=smoke --workdir=/tmp/smoke.'
    )
  config = parse_config(values)
  check_workdir(values, workdir)
  prior_experience.check(config.experience, workdir)
  pool.check(config.grading, config.verifier)
  return config


def check_start(values: ConfigDict, workdir: str) -> Config:
  """`check_command`, and what this machine and the other hosts have; makes missing folders."""
  config = check_command(values, workdir)
  weights_and_biases.check(config.metrics.wandb_project)
  check_writable(workdir)
  make_folder('config.warm_start.path', config.warm_start.path)
  make_folder('config.data.cache_dir', config.data.cache_dir)
  compiled = compilations.folder(config.compilation_cache, workdir)
  make_folder('config.compilation_cache', compiled)
  check_hosts(values, workdir)
  return config


def check_rewards(config: Config, data: QuestionSet) -> None:
  """InputError where a reward that reads a question's row cannot use that of the first one."""
  if any(':' in spec for spec in config.grading.rewards):  # ours read none
    pool.check(config.grading, config.verifier, facts.of_question(data.questions[0]))


if __name__ == '__main__':
  cli.run(main, define_flags)
