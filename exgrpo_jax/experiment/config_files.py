"""Config files, found by name or path, and their command-line overrides.

Mistakes raise InputError here, before absl and ml_collections parse the same command line. These
libraries raise errors of many types, some of them only when a value is used.
"""

import copy
import difflib
import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import config
from exgrpo_jax.errors import InputError, check_argument
from exgrpo_jax.experiment.settings import check_length, parse_config

CONFIGS = 'exgrpo_jax.configs'
_FLAG = re.compile(r'--?[A-Za-z]')


# ---- By name ----


def shipped_names(package: str) -> list[str]:
  """Return the names of the config files in a package, such as 'exgrpo_jax.configs'."""
  folder = _folder(package)
  return sorted(path.stem for path in folder.glob('*.py') if path.stem != '__init__')


def shipped_path(value: str, package: str, flag: str) -> str:
  """Return the path of a config file, given its path or its name in `package`.

  `flag` is 'config', 'sweep' or 'suite'. Messages use it both to name the flag and to say what
  kind of file is meant. Raises InputError if the file does not exist.
  """
  if not value.endswith('.py') and os.sep not in value:
    path = _folder(package) / f'{value}.py'
    if path.is_file() and value != '__init__':
      return os.fspath(path)
    names = shipped_names(package)
    matches = difflib.get_close_matches(value, names, n=1)
    hint = f'Did you mean {matches[0]!r}? ' if matches else ''
    raise InputError(
      f'--{flag}={value}: there is no {flag} with this name. {hint}The value must be a path '
      f'ending in .py, or one of these names: {", ".join(names)}.'
    )
  path = os.path.expanduser(value)
  if not os.path.isfile(path):
    raise InputError(
      f'--{flag}={value}: there is no such file. Choose another path, or one of these names: '
      f'{", ".join(shipped_names(package))}.'
    )
  return path


def config_path(value: str) -> str:
  """Resolve a config name to its path. Keeps the text after a colon (get_config's argument)."""
  file, colon, argument = value.partition(':')
  return shipped_path(file, CONFIGS, 'config') + colon + argument


def portable_config(path: str) -> str:
  """Replace a shipped config's path with its name, which works on any machine; keep other paths."""
  file, colon, argument = path.partition(':')
  folder, name = os.path.split(file)
  is_shipped = folder == os.fspath(_folder(CONFIGS))
  return pathlib.Path(name).stem + colon + argument if is_shipped else path


def _folder(package: str) -> pathlib.Path:
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.submodule_search_locations:
    raise InputError(
      f'{package} is not installed. Run pip install -e . in the clone, or install the wheel.'
    )
  return pathlib.Path(spec.submodule_search_locations[0])


# ---- On the command line ----


def resolved(argv: Sequence[str]) -> list[str]:
  """Check the config file and its overrides; return `argv` with the config's path filled in.

  Raises InputError if the file doesn't exist or returns no config, or if an override is invalid.
  """
  arguments, path, follows = [], '', False
  for arg in argv:
    name, equals, value = arg.partition('=')
    if follows:
      arg = path = config_path(arg)
    elif equals and name in ('-config', '--config'):
      path = config_path(value)
      arg = f'{name}={path}'
    elif not path and _overridden_key(arg) and 'config' in flags.FLAGS:
      is_later = any(re.match('--?config(=|$)', word) for word in argv)
      note = '; for an existing run, repeat the --config that it was started with' * (not is_later)
      raise InputError(
        f'{arg}: this flag overrides a setting of --config. Put --config before it{note}.'
      )
    follows = arg in ('-config', '--config')
    arguments.append(arg)
  if path:
    values = load(path)
    for key, words in _overrides(arguments).items():
      _check_override(path, values, key, words)
      if key == 'objective.beta':  # a valid key, so no error explains the mix-up
        print(f'warning: {" ".join(words)}: {config.counterpart_hint("beta")}', file=sys.stderr)
  return arguments


def load(path: str) -> ConfigDict:
  """Run a config file and return its ConfigDict. InputErrors point to the failing line.

  If `path` contains a colon, the text after it is passed to get_config.
  """
  description = 'a ConfigDict, as configs/smoke.py does'
  file, *argument = path.split(':', 1)
  return config.evaluate_file(file, 'config', description, _check_type, argument)[0]


def load_config(name: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
  """Load a config by name or path, and apply the overrides (dotted key -> value).

  Raises InputError if the config or a setting doesn't exist, or if a value is not allowed.
  """
  check_argument('name', name, (str, os.PathLike), "a config's name or path, such as 'smoke'")
  values = config.overridden(load(config_path(os.fspath(name))), overrides or {})
  parse_config(values)
  check_length(values, overrides or {})
  return values


def _check_type(values: Any) -> None:
  if not isinstance(values, ConfigDict):
    raise InputError(f'get_config() returns {type(values).__name__}')


def _overridden_key(arg: str) -> str:
  """Return 'replay.ratio' for --config.replay.ratio=0, '' for other flags. Accepts --noconfig.x."""
  name = arg.partition('=')[0].lstrip('-').removeprefix('no')
  return name.removeprefix('config.') if arg.startswith('-') and name.startswith('config.') else ''


def _overrides(argv: Sequence[str]) -> dict[str, list[str]]:
  """Map each overridden key to the arguments that set it. A value may be a separate argument."""
  overrides: dict[str, list[str]] = {}
  for number, arg in enumerate(argv):
    if key := _overridden_key(arg):
      value = [word for word in argv[number + 1 : number + 2] if not _FLAG.match(word)]
      overrides.setdefault(key, []).extend([arg] if '=' in arg else [arg, *value])
  return overrides


def _check_override(path: str, values: ConfigDict, key: str, words: list[str]) -> None:
  """Raise InputError unless the config has the key and accepts the value that `words` sets."""
  text = words[-1].partition('=')[2] if _FLAG.match(words[-1]) else words[-1]
  text_values = config.overridden(values, {key: text})  # rejects unknown keys
  flag_values = flags.FlagValues()
  command = ['', *words]
  try:
    config_flags.DEFINE_config_dict(
      'config', copy.deepcopy(values), flag_values=flag_values, sys_argv=command
    )
    flag_values(command)
  except (flags.Error, ValueError) as error:
    note = f'In {path}, the value is {functools.reduce(getattr, key.split("."), values)!r}.'
    try:
      parse_config(text_values)  # its error states the allowed values and the meaning
    except InputError as refusal:
      raise InputError(f'{refusal} {note}') from error
    raise InputError(f'{" ".join(words)}: {error}. {note}') from error
