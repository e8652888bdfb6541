"""JSON objects, one a line as in a jsonl file, or in an array."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from exgrpo_jax.data import columns
from exgrpo_jax.errors import InputError


class Numeral(str):
  """A number as it is spelt: an answer of 0.50 must not become 0.5."""


def objects(
  lines: Iterable[bytes], path: str, keep_spelling: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
  """The object of each line that is not blank, and where it is: 'path:line'.

  Args:
    lines: of the file, from the first.
    path: the file's, for error messages.
    keep_spelling: whether numbers are Numerals.

  Raises:
    InputError: a line is not a JSON object in UTF-8, or has a field twice.
  """
  for number, line in enumerate(lines, start=1):
    if line.strip():
      place = f'{path}:{number}'
      value = _parsed(line, place, 'every line must hold one object, in UTF-8', keep_spelling)
      yield place, _object(value, place, 'every line')


def array(content: bytes, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """The objects of a file that is a JSON array, with Numerals; each after 'path: row n'.

  Raises:
    InputError: the file is anything else.
  """
  values = _parsed(content, path, 'a .json file must hold an array of objects, in UTF-8', True)
  if not isinstance(values, list):
    raise InputError(
      f'{path}: it holds no array but {reprlib.repr(values)}; a .json file must hold an array of '
      'objects. One object a line is a .jsonl file.'
    )
  for number, value in enumerate(values):
    place = f'{path}: row {number}'
    yield place, _object(value, place, 'every element')


def _parsed(text: bytes, place: str, rule: str, keep_spelling: bool) -> Any:
  parse_number = Numeral if keep_spelling else None

  def make_object(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(fields)
    if len(made) < len(fields):
      columns.check_distinct([name for name, _ in fields], place)
    return made

  try:
    return json.loads(
      text, parse_int=parse_number, parse_float=parse_number, object_pairs_hook=make_object
    )
  except InputError:
    raise
  except (ValueError, RecursionError) as error:
    raise InputError(f'{place}: not valid JSON ({error}); {rule}.') from error


def _object(value: Any, place: str, what: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise InputError(
      f'{place}: {reprlib.repr(value)} is not an object; {what} must be one, because fields are '
      'looked up by name.'
    )
  return value
