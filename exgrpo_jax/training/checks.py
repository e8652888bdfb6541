"""Checks before a run starts: flags, config, data files, rewards, agreement between hosts."""

from ml_collections import ConfigDict

from exgrpo_jax.data import questions, row_files
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.environments import pool as environments
from exgrpo_jax.errors import InputError, check_given, counted
from exgrpo_jax.experiment.settings import RunConfig, parse_config, steps_of
from exgrpo_jax.grading import pool
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations
from exgrpo_jax.runtime.workdir import (
  check_hosts,
  check_workdir,
  check_writable,
  has_begun,
  make_folder,
  read_config,
)
from exgrpo_jax.training import prior_experience


def check_command(values: ConfigDict | None, workdir: str | None) -> RunConfig:
  """Check a run's flags and config; return the config. Raises InputError if they are invalid."""
  check_given({'--config': values, '--workdir': workdir}, '--config=smoke --workdir=/tmp/smoke')
  assert values and workdir
  config = parse_config(values)
  check_workdir(values, workdir)
  prior_experience.check(config.experience, workdir)
  # Data files must exist. They are not read yet.
  learnt = (config.warm_start.data,) * bool(config.warm_start.num_updates)
  for spec in (config.data.train, *config.data.evaluated, *learnt):
    base = questions.split_spec(spec)[0]
    if task := row_files.task_file(base):
      row_files.existing(task[0])
    elif base.endswith(row_files.ENDINGS) and '://' not in base:
      for path in questions.spec_files(base)[0]:
        row_files.existing(path)
  metrics.check_wandb(config.metrics.wandb_project)
  pool.check(config.grading, config.verifier)
  if config.environment.name:
    environments.of(config.environment).tools()
  return config


def check_start(values: ConfigDict, workdir: str) -> RunConfig:
  """Run `check_command`, check this machine and the other hosts, and create missing folders."""
  config = check_command(values, workdir)
  check_writable(workdir)
  make_folder('config.warm_start.path', config.warm_start.path)
  make_folder('config.data.cache_dir', config.data.cache_dir)
  cache = compilations.folder(config.compilation_cache, workdir)
  make_folder('config.compilation_cache', cache)
  check_hosts(values, workdir)
  return config


def check_rewards(config: RunConfig, data: QuestionSet) -> None:
  """Raise InputError if a reward function cannot use the first training row's columns."""
  # score_answer is the only built-in reward that reads a row.
  if any(':' in spec or spec == 'score_answer' for spec in config.grading.rewards):
    pool.check(config.grading, config.verifier, stages.question_facts(data.questions[0]))


def check_data_size(config: RunConfig, num_questions: int, workdir: str) -> None:
  """Raise InputError if a resumed run's `num_epochs` now implies a different number of steps."""
  recorded = read_config(workdir) if has_begun(workdir) else {'num_epochs': 0}
  if not recorded['num_epochs']:
    return
  steps = steps_of(recorded['num_epochs'], num_questions, config.rollout.questions)
  if steps != recorded['num_steps']:
    raise InputError(
      f'config.data.train={config.data.train}: the number of questions has changed since the run '
      f'last started. With {counted(num_questions, "question")}, '
      f'num_epochs={recorded["num_epochs"]:g} means {counted(steps, "step")} instead of '
      f'{recorded["num_steps"]}. Restore the data, or choose another --workdir.'
    )
