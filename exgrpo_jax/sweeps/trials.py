"""The trials of a sweep: named config overrides, from grids and lists.

A file in configs/sweeps/ defines a `get_sweep()` that returns trial name -> {dotted config key:
value}. A trial runs in the folder of its name. 'seed' is a key like any other.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from exgrpo_jax.config import evaluate_file
from exgrpo_jax.errors import InputError

Sweep = dict[str, dict[str, Any]]  # trial name -> {dotted config key: value}

_FOLDER_NAME = re.compile(r'\w[\w.,=+-]{0,199}', re.ASCII)


def grid(axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Combine all values of `axes`; the last axis varies fastest.

  A trial is named after its values, as in 'ratio=0.25,seed=1'.

  Args:
    axes: dotted config key -> its values.

  Raises:
    InputError: two trials have the same name.
  """
  return _collect(
    (','.join(map(_label, axes, values)), dict(zip(axes, values)))
    for values in itertools.product(*axes.values())
  )


def listed(settings: Mapping[str, Mapping[str, Any]], axes: Mapping[str, Iterable[Any]]) -> Sweep:
  """Combine each of the named `settings` with every combination of `axes`.

  A trial is named after its setting and its values, as in 'no_shaping,seed=1'.

  Args:
    settings: name -> {dotted config key: value}.
    axes: as in `grid`; may be empty. Their values override a setting's values.

  Raises:
    InputError: two trials have the same name.
  """
  return _collect(
    (','.join(filter(None, (name, values_name))), {**overrides, **values})
    for name, overrides in settings.items()
    for values_name, values in grid(axes).items()
  )


def load(path: str) -> Sweep:
  """Load the trials of a sweep file.

  Raises:
    InputError: the file fails, defines no trials, or has names that cannot all be separate folders.
  """
  sweep, _ = evaluate_file(
    path, 'sweep', 'trial name -> {config key: value}, as configs/sweeps/ratio.py does'
  )
  if not isinstance(sweep, Mapping) or not sweep:
    raise InputError(
      f'--sweep={path}: get_sweep() must return trial name -> {{config key: value}}, at least one, '
      f'not {sweep!r}.'
    )
  check_names(f'--sweep={path}', sweep)
  return {name: dict(overrides) for name, overrides in sweep.items()}


def check_names(place: str, sweep: Mapping[Any, Any]) -> None:
  """Raise InputError, beginning with `place`, unless each trial can have a folder of its name."""
  for name, overrides in sweep.items():
    _check_trial(place, name, overrides)
  names: dict[str, str] = {}
  for name in sweep:
    if (same := names.setdefault(name.casefold(), name)) != name:
      raise InputError(
        f"{place}: trials '{same}' and '{name}' differ only in case, which some file systems "
        'ignore. Rename one, because each trial needs its own folder.'
      )


def without_seed(name: str) -> str:
  """Return a trial's name without its seed; the trials of one setting share it."""
  return ','.join(label for label in name.split(',') if not re.fullmatch(r'seed=\d+', label))


def _check_trial(place: str, name: Any, overrides: Any) -> None:
  if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name):
    raise InputError(
      f'{place}: a trial cannot be named {name!r}, because its folder gets the same name. '
      'A name must start with a letter, a digit or _, may also contain . , = + - and has at most '
      '200 characters. With trials.listed you choose the names.'
    )
  if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
    raise InputError(
      f"{place}: trial '{name}' must be {{dotted config key: value}}, not {overrides!r}."
    )


def _collect(trials: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
  """Collect trials in a dict; raise InputError if two trials have the same name."""
  sweep: Sweep = {}
  for name, overrides in trials:
    if name in sweep:
      raise InputError(
        f"two trials are named '{name}'. List each value of an axis and each name of a setting "
        'only once.'
      )
    sweep[name] = overrides
  return sweep


def _label(key: str, value: Any) -> str:
  text = f'{value:g}' if isinstance(value, float) else f'{value}'
  return f'{key.rpartition(".")[2]}={text}'
