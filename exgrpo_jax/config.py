"""Convert a ConfigDict to frozen dataclasses, checking every value.

Every component declares a frozen `Config` whose fields are created with `setting`. Each declaration
states a setting's type, default, allowed values, meaning and origin in one place.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import pathlib
import re
import reprlib
import runpy
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from ml_collections import ConfigDict

from exgrpo_jax import renamed
from exgrpo_jax.errors import InputError, check_argument

T = TypeVar('T')

_INTERVAL = re.compile(r'([\[(])\s*([^,]+),\s*([^,]+?)\s*([\])])')

# Where a default comes from.
PAPER = 'paper'  # arXiv:2510.02245
AUTHORS = "authors' code"  # their script that runs ExGRPO, or verl's defaults
OURS = 'ours'


class RecordedChoice(str):
  """A choice recorded in a run's config; valid even if it is not in the table of choices.

  The run's own config file may have added the choice. A ConfigDict refuses to replace a
  RecordedChoice with a plain str; use `overridden` instead.
  """


def setting(
  default: Any, allowed: str | Collection[Any] | None, meaning: str, origin: str = OURS
) -> Any:
  """Declare a field of a config class.

  Args:
    default: the value in configs/base.py.
    allowed: an interval such as '[0, 1)', '(0, inf)' or '[0, 2^63)'; a collection of choices; or
      None if any value of the type is allowed.
    meaning: the value's meaning and unit; quoted in error messages.
    origin: the source of the default: PAPER, AUTHORS or OURS, optionally followed by a comma and
      a note.
  """
  metadata = {'allowed': allowed, 'meaning': meaning, 'origin': origin}
  return dataclasses.field(default=default, metadata=metadata)


def defaults(cls: type) -> ConfigDict:
  """Return the defaults of all settings of a config class, including nested ones."""
  types = typing.get_type_hints(cls)
  return ConfigDict(
    {
      field.name: defaults(types[field.name])
      if dataclasses.is_dataclass(types[field.name])
      else field.default
      for field in dataclasses.fields(cls)
    }
  )


def build(cls: type[T], values: Mapping[str, Any] | ConfigDict, path: str) -> T:
  """Build `cls` from `values`, or raise an InputError that names `path` and the key.

  Args:
    cls: a frozen dataclass; each field is created with `setting` or is itself such a dataclass.
    values: one value for each field of `cls`; ints are converted to float for float fields.
    path: where the values come from, e.g. 'config.replay'.
  """
  fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
  check_names(list(values), fields, path)
  types = typing.get_type_hints(cls)
  return cls(
    **{
      name: _build_field(values[name], types[name], field.metadata, f'{path}.{name}')
      for name, field in fields.items()
    }
  )


def check_names(names: Collection[str], known_names: Collection[str], path: str) -> None:
  """Raise InputError unless `names` are exactly the `known_names`."""
  for name in names:
    check_known(name, known_names, path)
  for name in known_names:
    if name not in names:
      raise InputError(f"{path} lacks '{name}'. Start from configs/base.py, which sets every key.")


def check_known(name: str, known_names: Collection[str], path: str, key: str = '') -> None:
  """Raise InputError if `name` is not in `known_names`; suggest its new name or the closest name.

  If `name` is part of a dotted key, `key` is the full key.
  """
  if name not in known_names:
    place = f'{path}.{name}'.removeprefix('config.')
    hint = renamed.setting_hint(key) or renamed.setting_hint(place)
    matches = difflib.get_close_matches(name, list(known_names), n=1)
    is_section = key.split('.')[-1] not in ('', name)
    if not hint and not (matches and is_section):
      hint = counterpart_hint(key or name)
    closest = f"did you mean '{matches[0]}'?" if matches else f'it has: {", ".join(known_names)}.'
    raise InputError(f"{path} has no '{name}'; {hint or closest}")


def check_numbers(
  key: str,
  name: str,
  values: Any,
  *shapes: tuple[int, ...],
  lowest: float = -sys.float_info.max,
  highest: float = sys.float_info.max,
) -> None:
  """Raise InputError unless `values` are numbers in range and have one of the `shapes`.

  `values` were returned by the function that the setting `key` selects by `name`.
  """
  import numpy as np  # not needed by `exgrpo verify`, which starts without it

  numbers = None
  with contextlib.suppress(TypeError, ValueError):  # e.g. texts, or lists of unequal lengths
    numbers = np.asarray(values, float) if np.shape(values) in shapes else None
  if numbers is not None:
    is_wrong = ~((numbers >= lowest) & (numbers <= highest))
    if not is_wrong.any():
      return
    what = (
      f'{numbers[is_wrong][0]:g} at index {np.argwhere(is_wrong)[0].tolist()}, not a number from '
      f'{lowest:.3g} to {highest:.3g}'
    )
  else:
    alternatives = ' or '.join(str(list(shape)) for shape in shapes)
    what = f'{reprlib.repr(values)}, not numbers of shape {alternatives}'
  raise InputError(
    f'config.{key}: {name!r} cannot be used (it returned {what}). Correct the function as shown in '
    'docs/extending.md.'
  )


def overridden(values: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
  """Copy `values` and apply `overrides`, which maps dotted keys to values.

  Raises InputError for an unknown key. Values of the wrong type are accepted here; `parse_config`
  rejects them later.
  """
  requirement = "a dict of dotted keys, such as {'replay.ratio': 0.25}"
  check_argument('overrides', overrides, (Mapping, ConfigDict), requirement)
  new_values = copy.deepcopy(values)
  for key, value in overrides.items():
    check_argument('a key of overrides', key, str, "a setting's name, such as 'replay.ratio'")
    *sections, name = key.split('.')
    place, path = cast(Any, new_values), 'config'
    for section in sections:
      check_known(section, list(place), path, key)
      place, path = place[section], f'{path}.{section}'
      if not isinstance(place, ConfigDict):
        raise InputError(f"{path} is a single value, so it has no '{name}'.")
    check_known(name, list(place), path, key)
    old_value: Any = place[name]
    if isinstance(old_value, ConfigDict):
      raise InputError(
        f'{path}.{name} is a section, but an override sets a single value. Override a key in the '
        f"section, such as '{key}.{next(iter(old_value))}'."
      )
    with place.ignore_type():
      place[name] = value
  return new_values


def _build_field(value: Any, kind: Any, metadata: Mapping[str, Any], path: str) -> Any:
  if dataclasses.is_dataclass(kind):
    if not isinstance(value, (Mapping, ConfigDict)):
      raise InputError(
        f'{path}={value!r}: this is a section, not a single value. Set a value in the section, '
        f'such as {path}.{dataclasses.fields(kind)[0].name}.'
      )
    return build(cast(Any, kind), value, path)
  allowed, meaning = metadata['allowed'], metadata['meaning']
  value = _convert(value, kind, path, meaning)
  if allowed is None:
    return value
  if isinstance(allowed, str):
    match = _INTERVAL.fullmatch(allowed)
    assert match is not None, allowed
    left, low, high, right = match.groups()
    above = value >= _bound(low) if left == '[' else value > _bound(low)
    below = value <= _bound(high) if right == ']' else value < _bound(high)
    if not (above and below):
      raise InputError(f'{path}={value}: the value must be in {allowed}. Description: {meaning}.')
  elif value not in allowed and not (
    isinstance(value, RecordedChoice) and isinstance(allowed, Mapping)
  ):
    key, choices = path.removeprefix('config.'), ', '.join(map(str, allowed))
    hint = renamed.setting_hint(key, value) or value_hint(key, str(value))
    text = f'{path}={value!r}: the value must be one of {choices}. Description: {meaning}. {hint}'
    raise InputError(text.rstrip())
  return value


def _convert(value: Any, kind: Any, path: str, meaning: str) -> Any:
  origin = typing.get_origin(kind) or kind
  if origin is tuple and isinstance(value, (list, tuple)):
    item = typing.get_args(kind)[0]
    return tuple(_convert(v, item, path, meaning) for v in value)
  if origin is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
    raise InputError(
      f'{path}={value!r}: the value must be of type {origin.__name__}, not '
      f'{type(value).__name__}. Description: {meaning}.'
    )
  return value


def _bound(text: str) -> float:
  """Parse a number such as 0.5, inf or 2^63."""
  base, _, exponent = text.partition('^')
  return float(base) ** float(exponent or 1)


# ---- Options of TRL and verl ----


class Counterpart(NamedTuple):
  """A row of counterparts.md: options in TRL and verl, and the settings that replace them here.

  Names from verl may be shortened to their last parts. 'a.*' stands for all other options in
  section a.
  """

  trl: list[str]
  verl: list[str]
  ours: list[str]  # empty if there is no such setting
  note: str


@functools.cache
def counterparts() -> list[Counterpart]:
  """Return all rows of counterparts.md, which docs/coming_from.md also shows."""
  rows = []
  text = pathlib.Path(__file__).with_name('counterparts.md').read_text(encoding='utf-8')
  for line in re.findall(r'^\| ([`—].*) \|$', text, re.MULTILINE):
    *their_cells, our_cell = line.split(' | ')
    settings, colon, note = our_cell.partition(': ')
    if not re.fullmatch(r'(`[\w.]+`(, )?)+', settings):
      settings, note = '', note if colon and settings == 'no setting' else our_cell
    trl, verl, ours = (re.findall(r'`([^`]+)`', cell) for cell in (*their_cells, settings))
    rows.append(Counterpart(trl, verl, ours, note.replace('`', '')))
  return rows


def counterpart_hint(key: str) -> str:
  """Return a sentence that names our counterpart of a TRL or verl key; '' for any other key.

  For 'num_generations': "TRL's num_generations is config.rollout.group_size here." If several
  rows match, the longest match is used; ties go to TRL, then to settings in the key's section.
  """
  parts = key.split('.')
  section_rows = [
    row for row in counterparts() if any(name.startswith(f'{parts[0]}.') for name in row.ours)
  ]
  ends = [parts[start:] for start in range(len(parts))]
  ends += [[section, '*'] for section in reversed(parts[:-1])]
  for end, system in itertools.product(ends, ('TRL', 'verl')):
    if end in (['path'], ['name'], ['mode'], ['enable'], ['steps']):  # the end of many options
      continue
    for row in (*section_rows, *counterparts()):
      if any(name.split('.')[-len(end) :] == end for name in getattr(row, system.lower())):
        settings = ' and '.join(f'config.{name}' for name in row.ours)
        phrase = f'is {settings} here' if settings else 'has no setting here'
        return f"{system}'s {parts[-1]} {phrase}{f'; {row.note}' if row.note else ''}."
  return ''


def value_hint(key: str, value: str) -> str:
  """Return a sentence that translates a TRL or verl value of our `key`; '' for any other value."""
  hints = [
    f"{system}'s {name} is {row.note} here."
    for row, system in itertools.product(counterparts(), ('TRL', 'verl'))
    for name in getattr(row, system.lower())
    if name.endswith(f'={value}') and row.note.startswith(f'{key.partition(".")[0]}.')
  ]
  return max(hints, key=lambda hint: f' {key}=' in hint, default='')


# ---- Python files with a get_config() or get_sweep() ----


def evaluate_file(
  path: str,
  kind: str,
  description: str,
  check: Callable[[Any], None] | None = None,
  arguments: Sequence[str] = (),
  is_flag: bool = True,
) -> tuple[Any, str]:
  """Run a Python file's get_config(), get_sweep(), …; return the result and the file's docstring.

  `kind` is the function's name without 'get_', and also the flag's name. With `is_flag`, error
  messages start with this flag. `description` tells readers of an error message what the function
  must return, ideally with an example file. `check` raises an exception if the result is unusable.
  Raises InputError with the line number if the file fails, lacks the function, or returns a result
  that fails `check`.
  """
  function = f'get_{kind}'
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())  # the file may import modules there
  try:
    definitions = runpy.run_path(path)
    if function not in definitions:
      raise InputError(f'the file has no {function}()')
    if arguments and not inspect.signature(definitions[function]).parameters:
      raise InputError(f"{function}() takes no arguments, so remove ':{arguments[0]}'")
    value = definitions[function](*arguments)
    if check:
      check(value)
  except (Exception, SystemExit) as error:  # user code may raise anything
    source = f'--{kind}={path}' if is_flag else path
    problem = str(error) if isinstance(error, InputError) else f'{type(error).__name__}: {error}'
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
      lines.append(error.lineno)
    line = f':{lines[-1]}' if lines else ''
    # An InputError of the file itself says what is wrong; the file has the right form.
    is_own = isinstance(error, InputError) and bool(lines)
    form = f' A {kind} is a Python file whose {function}() returns {description}.' * (not is_own)
    raise InputError(f'{source}{line}: {problem.rstrip(".")}.{form}') from error
  return value, (definitions['__doc__'] or '').strip()
