"""A sweep's trials: named config overrides, built from grids and lists.

A file in configs/sweeps/ defines `get_sweep()`, which returns trial name -> {dotted config key:
value}. Each trial runs in a folder with the trial's name. 'seed' is an ordinary key.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from exgrpo_jax.config import evaluate_file
from exgrpo_jax.errors import InputError

Sweep = dict[str, dict[str, Any]]  # trial name -> {dotted config key: value}

_FOLDER_NAME = re.compile(r'\w[\w.,=+-]{0,199}', re.ASCII)


def grid(axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Return a trial for each combination of the axes' values; the last axis varies fastest.

  `axes` maps dotted config keys to values. Trials are named after their values, for example
  'ratio=0.25,seed=1'. Raises InputError if two trials have the same name.
  """

  def label(key: str, value: Any) -> str:
    text = f'{value:g}' if isinstance(value, float) else f'{value}'
    return f'{key.rpartition(".")[2]}={text}'

  return _collect(
    (','.join(map(label, axes, values)), dict(zip(axes, values)))
    for values in itertools.product(*(map(_plain, values) for values in axes.values()))
  )


def listed(settings: Mapping[str, Mapping[str, Any]], axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Combine each of the named `settings` with every combination of the axes' values.

  Trials are named after their setting and values, for example 'no_shaping,seed=1'. The values of
  `axes` (dotted config key -> values, or empty) override those in `settings` (name -> {dotted
  config key: value}). Raises InputError if two trials have the same name.
  """
  return _collect(
    (','.join(filter(None, (name, values_name))), {**overrides, **values})
    for name, overrides in settings.items()
    for values_name, values in grid(axes).items()
  )


def load(path: str) -> Sweep:
  """Load the trials of a sweep file.

  Raises InputError if the file raises an error, defines no trials, or contains names that are not
  valid, unique folder names.
  """
  sweep, _ = evaluate_file(
    path, 'sweep', 'trial name -> {config key: value}, as configs/sweeps/ratio.py does'
  )
  if not isinstance(sweep, Mapping) or not sweep:
    raise InputError(
      f'--sweep={path}: get_sweep() must return a non-empty dict, trial name -> {{config key: '
      f'value}}, but it returned {sweep!r}.'
    )
  check_names(f'--sweep={path}', sweep)
  return {
    name: {key: _plain(value) for key, value in overrides.items()}
    for name, overrides in sweep.items()
  }


def check_names(place: str, sweep: Mapping[Any, Any]) -> None:
  """Raise InputError if a name is not a valid, unique folder name; messages start with `place`."""
  names: dict[str, str] = {}
  for name, overrides in sweep.items():
    if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name):
      raise InputError(
        f'{place}: a trial cannot be named {name!r}, because its folder must have the same name. '
        "A name may contain letters, digits and the characters '_.,=+-', must start with a letter, "
        "a digit or '_', and must not exceed 200 characters. Use trials.listed to choose names "
        'yourself.'
      )
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
      raise InputError(
        f"{place}: trial '{name}' must be a dict, {{dotted config key: value}}, not {overrides!r}."
      )
    if (other_name := names.setdefault(name.casefold(), name)) != name:
      raise InputError(
        f"{place}: trials '{other_name}' and '{name}' differ only in case, which some file systems "
        'ignore. Rename one, because each trial needs its own folder.'
      )


def without_seed(name: str) -> str:
  """Return a trial's name without its seed. All trials of a setting share this name."""
  return ','.join(label for label in name.split(',') if not re.fullmatch(r'seed=\d+', label))


def _plain(value: Any) -> Any:
  """Convert a NumPy number to a Python number, because settings require Python types."""
  return value.item() if isinstance(value, np.generic) else value


def _collect(trials: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
  """Collect trials into a dict; raise InputError if two of them have the same name."""
  sweep: Sweep = {}
  for name, overrides in trials:
    if name in sweep:
      raise InputError(
        f"two trials are named '{name}'. List each axis value and each setting name only once."
      )
    sweep[name] = overrides
  return sweep
