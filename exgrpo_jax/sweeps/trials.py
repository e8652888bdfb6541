"""The trials of a sweep: named overrides, made by grids and lists.

A file in configs/sweeps/ has a `get_sweep()` that returns trial name -> {dotted config
key: value}. A trial's name is its folder's; 'seed' is a key like any other.
"""

import itertools
import os
import re
import runpy
from collections.abc import Iterable, Mapping
from typing import Any

from exgrpo_jax.errors import InputError

Sweep = dict[str, dict[str, Any]]

_FOLDER = re.compile(r'\w[\w.,=+-]{0,199}', re.ASCII)


def grid(axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Every combination of the values of `axes`, by dotted key; the last axis turns fastest.

  A trial is named by its values, as in 'ratio=0.25,seed=1'.
  """
  return _joined(
    (','.join(map(_label, axes, values)), dict(zip(axes, values)))
    for values in itertools.product(*axes.values())
  )


def listed(settings: Mapping[str, Mapping[str, Any]], axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Each of the named `settings` with every combination of `axes`: 'no_shaping,seed=1'."""
  return _joined(
    (','.join(filter(None, (name, more))), {**overrides, **values})
    for name, overrides in settings.items()
    for more, values in grid(axes).items()
  )


def load(path: str) -> Sweep:
  """The trials of a sweep file; InputError where it gives none, or a name twice or unfit."""
  if not os.path.isfile(path):
    raise InputError(f'--sweep={path}: there is no such file; configs/sweeps/ has some.')
  try:
    content = runpy.run_path(path)
    if 'get_sweep' not in content:
      raise InputError('it has no get_sweep(), which returns trial name -> {config key: value}.')
    sweep = content['get_sweep']()
  except Exception as error:  # the file is the user's, and so is whatever it raises
    kind = '' if isinstance(error, InputError) else f'{type(error).__name__}: '
    raise InputError(f'--sweep={path}: {kind}{error}') from error
  if not isinstance(sweep, Mapping) or not sweep:
    raise InputError(
      f'--sweep={path}: get_sweep() must return trial name -> {{config key: '
      f'value}}, at least one, not {sweep!r}.'
    )
  for name, overrides in sweep.items():
    _check(path, name, overrides)
  folders = {}
  for name in sweep:  # some file systems take 'A' for 'a'
    if (other := folders.setdefault(name.casefold(), name)) != name:
      raise InputError(
        f"--sweep={path}: '{other}' and '{name}' are one name, and each trial has "
        'a folder of its name.'
      )
  return {name: dict(overrides) for name, overrides in sweep.items()}


def without_seed(name: str) -> str:
  """The name of what trials that differ only in seed have in common."""
  return ','.join(part for part in name.split(',') if not re.fullmatch(r'seed=\d+', part))


def _check(path, name, overrides):
  if not isinstance(name, str) or not _FOLDER.fullmatch(name):
    raise InputError(
      f'--sweep={path}: a trial cannot be named {name!r}, for its folder is named '
      'so: letters, digits and _ . , = + - may be in it; trials.listed takes '
      'names of your own.'
    )
  if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
    raise InputError(
      f"--sweep={path}: trial '{name}' must be {{dotted config key: value}}, not {overrides!r}."
    )


def _joined(pairs: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
  """A mapping of pairs, which would lose those of one name without a word."""
  sweep = {}
  for name, overrides in pairs:
    if name in sweep:
      raise InputError(
        f"two trials are named '{name}'; each value may stand once in an axis, and "
        'each name once in a list.'
      )
    sweep[name] = overrides
  return sweep


def _label(key, value):
  return (
    f'{key.rpartition(".")[2]}={value:g}'
    if isinstance(value, float)
    else (f'{key.rpartition(".")[2]}={value}')
  )
