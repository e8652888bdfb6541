"""The command line: flags that several commands share, `--help`, overrides, exit statuses.

A command is a module with `define_flags()` and `main(args)`, run by `cli.run`. No flag is defined
at import, so any two commands can be imported together.

Exit statuses of every command: 0 at the end, 2 for what cannot be run (one line on standard error
says why). `train` and `sweep` add some of their own.
"""

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import config
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts

_CONFIGS = 'exgrpo_jax.configs'

Args = flags.FlagValues  # a command's flags by name, e.g. args.workdir


# ---- Shared flags ----


def define_config() -> None:
  """--config: an experiment's file, or the name of one that ships with the package."""
  config_flags.DEFINE_config_file(
    'config',
    None,
    'The experiment: a file such as path/to/file.py, or by name one of '
    + ', '.join(shipped_names(_CONFIGS))
    + '. Any setting can be overridden, as in --config.replay.ratio=0.25; docs/configuration.md '
    'lists all of them.',
  )


def define_workdir() -> None:
  """--workdir, of commands that make a run."""
  flags.DEFINE_string(
    'workdir', None, 'The folder for everything the run writes; a run found there is resumed.'
  )


def define_checkpoint() -> None:
  """--checkpoint and --step, of commands that read a run."""
  flags.DEFINE_string('checkpoint', None, "A run's workdir.")
  flags.DEFINE_integer('step', None, 'Which of its checkpoints; the newest by default.')


def define_out(meaning: str) -> None:
  """--out, of commands that write somewhere else than into a run."""
  flags.DEFINE_string('out', None, meaning)


def define_hosts() -> None:
  """Where several hosts meet, of commands that can run on all of them together."""
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'host:port of the first host, where the hosts meet. Not needed on Cloud TPU, GKE and Slurm.',
  )
  flags.DEFINE_integer(
    'num_processes', None, 'How many there are; 1 alone: do not look for others.', lower_bound=1
  )
  flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.', lower_bound=0)


# ---- Running a command ----


def run(
  main: Callable[..., None],
  define_flags: Callable[[], None],
  choices: Sequence[str] = (),
  on_all_hosts: bool = False,
) -> None:
  """Runs a command; what the user got wrong becomes one line and exit status 2.

  Args:
    main: called with the flags, and with the chosen one of `choices` where there are any.
    define_flags: defines the command's flags.
    choices: words of which exactly one must follow the command.
    on_all_hosts: the command can run as one of several hosts that work together.
  """
  define_flags()
  if on_all_hosts:
    define_hosts()
  args = flags.FLAGS
  # --help lists the flags of the main module alone, and these are its own.
  for flag in args.flags_by_module_dict().get(__name__, []):
    args.register_key_flag_for_module(sys.argv[0], flag)

  def guarded(argv: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # orbax and TFDS log every detail below it
    words = argv[1:]
    try:
      if choices and (len(words) != 1 or words[0] not in choices):
        raise InputError(f'the command must be followed by one of: {", ".join(choices)}.')
      if words and not choices:
        raise InputError(f"'{words[0]}' is not a flag; flags begin with --.")
      with hosts.joined(_meeting(args)) if on_all_hosts else contextlib.nullcontext():
        main(args, *words)
    except InputError as error:
      _refuse(error)

  app.run(guarded, flags_parser=_parse_flags)


def _meeting(args: Args) -> hosts.Meeting:
  return hosts.Meeting(
    coordinator_address=args.coordinator_address,
    num_processes=args.num_processes,
    process_id=args.process_id,
  )


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    argv = resolve_config(argv)
    return app.parse_flags_with_usage(argv)
  except InputError as error:
    _refuse(error)
    raise
  except (AttributeError, KeyError):  # an override of a name that the config does not have
    try:
      _check_overrides([arg.lstrip('-') for arg in argv])
    except InputError as error:
      _refuse(error)
    raise


def _refuse(error: InputError) -> None:
  print(f'error: {error}', file=sys.stderr, flush=True)
  sys.exit(2)


# ---- Configs by name, and overrides ----


def shipped_names(package: str) -> list[str]:
  """The config files of a package, such as 'exgrpo_jax.configs', by name."""
  folder = _folder(package)
  return sorted(path.stem for path in folder.glob('*.py') if path.stem != '__init__')


def shipped_path(value: str, package: str, flag: str) -> str:
  """The file that `value` means: itself where it is a path, else the package's of that name.

  Raises InputError, which begins with the flag, where there is no such file.
  """
  if not value.endswith('.py') and os.sep not in value:
    path = _folder(package) / f'{value}.py'
    if path.is_file() and value != '__init__':
      return os.fspath(path)
    raise InputError(
      f'--{flag}={value}: there is no config of that name; it must be a path that ends in .py, or '
      f'one of: {", ".join(shipped_names(package))}.'
    )
  if not os.path.isfile(value):
    raise InputError(
      f'--{flag}={value}: there is no such file; by name there are: '
      f'{", ".join(shipped_names(package))}.'
    )
  return value


def portable_config(path: str) -> str:
  """`path`, or of a config that ships with the package its name, which is valid on any machine."""
  folder, file = os.path.split(path)
  return pathlib.Path(file).stem if folder == os.fspath(_folder(_CONFIGS)) else path


def resolve_config(argv: Sequence[str]) -> list[str]:
  """`argv` with the --config that is given by name replaced by its file."""
  resolved, follows = [], False
  for arg in argv:
    name, equals, value = arg.partition('=')
    if follows:
      arg = shipped_path(arg, _CONFIGS, 'config')
    elif equals and name.lstrip('-') == 'config' and name.startswith('-'):
      arg = f'{name}={shipped_path(value, "exgrpo_jax.configs", "config")}'
    follows = arg in ('-config', '--config')
    resolved.append(arg)
  return resolved


def config_arguments(argv: Sequence[str]) -> list[str]:
  """The words of a command line that give its config, as they were typed."""
  chosen, is_open = [], False  # a flag waits for its value
  for word in argv:
    flag = word.lstrip('-') if re.match('--?[a-z]', word) else ''
    if flag.partition('=')[0] == 'config' or flag.startswith('config.'):
      chosen.append(word)
      is_open = '=' not in word
    elif is_open and not flag:
      chosen.append(word)
      is_open = False
    else:
      is_open = False
  return chosen


def _folder(package: str) -> pathlib.Path:
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.submodule_search_locations:
    raise InputError(
      f'{package} is not installed: run pip install -e . in the clone, or install the wheel.'
    )
  return pathlib.Path(spec.submodule_search_locations[0])


def _check_overrides(words: list[str]) -> None:
  """Names the override that the config file does not have; dashes are stripped."""
  paths = [word.partition('=')[2] for word in words if word.startswith('config=')]
  paths += [after for word, after in itertools.pairwise(words) if word == 'config']
  for path in paths:
    values = runpy.run_path(path)['get_config']()
    for word in words:
      if word.startswith('config.'):
        _check_override(values, word.partition('=')[0].split('.'))


def _check_override(values: Any, names: list[str]) -> None:
  for depth, name in enumerate(names[1:], start=1):
    if not isinstance(values, ConfigDict):
      raise InputError(f"{'.'.join(names[:depth])} is one value and has no '{name}'.")
    config.check_known(name, list(values), '.'.join(names[:depth]))
    values = values[name]
