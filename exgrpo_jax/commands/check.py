"""Check that a run can start, without using its devices or reading its data and weights.

exgrpo check --config=arithmetic --workdir=/tmp/arithmetic

Accepts the same flags as train and performs the checks that train performs first: flags, config,
reward functions, wandb, model shape, tokenizer, and whether local data and weights exist. If the
model is on the Hub or in a GGUF file, the command caches the files that describe it, but not its
weights. Nothing else is written. Buckets are not read. With config.num_epochs, the training
questions are also read to count the steps. Exit status: 0 if no problem was found, 2 if the run
cannot start, 1 if the network or the storage failed.
"""

from etils import epath

from exgrpo_jax.commands import command_line
from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message
from exgrpo_jax.experiment.experiment import (
  check_model,
  model_config,
  model_name,
  with_counted_length,
  with_dtype,
  with_folders,
)
from exgrpo_jax.huggingface import safetensors_files
from exgrpo_jax.runtime import hub
from exgrpo_jax.runtime.workdir import check_workdir
from exgrpo_jax.training import export
from exgrpo_jax.training.checks import check_command


def define_flags() -> None:
  """Define the same flags as the train command."""
  command_line.define_config()
  command_line.define_workdir()
  command_line.define_hosts()


def main(args: command_line.Args) -> None:
  """Run train's first checks on the flags, and print what was not checked."""
  config = check_command(args.config, args.workdir, has_device=False)
  if changes := check_workdir(args.config, args.workdir):
    print(changes)
  hub.recall(args.workdir)
  with_counted_length(config)
  local = epath.Path(config.model.path).expanduser()
  if config.model.path and '://' not in config.model.path and local.is_dir():
    safetensors_files.list_tensors(local)
  config = with_folders(config, model_name(config))
  is_read = {path: '://' not in path for path in (config.model.path, config.tokenizer.path)}
  if is_read[config.model.path]:
    shape = model_config(with_dtype(config, args.workdir, platform='any'))  # any dtype will do
    check_model(config, shape)
    export.check(config, shape)
  path = config.tokenizer.path or config.model.path
  if path and is_read[path]:
    prompt.render([Message('user', 'x')], config.prompt, tokenizer.load(path).chat)
  remote = [path for path, read in is_read.items() if not read]  # in buckets
  omissions = ', '.join(['data rows', 'weight values', *remote])
  print(f'the flags and the config are valid; not checked: {omissions}, devices')


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags)
