"""Lines that hold one JSON object each, as in a jsonl file."""

import json
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from exgrpo_jax.errors import InputError


def objects(
  lines: Iterable[bytes], path: str, keep_spelling: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
  """The object of each line that is not blank, and where it is: 'path:line'.

  Args:
    lines: of the file, from the first.
    path: the file's, for error messages.
    keep_spelling: whether numbers stay as text: an answer of 0.50 must not become 0.5.

  Raises:
    InputError: a line is not a JSON object in UTF-8.
  """
  parse_number = str if keep_spelling else None
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    location = f'{path}:{number}'
    try:
      value = json.loads(line, parse_int=parse_number, parse_float=parse_number)
    except ValueError as error:
      raise InputError(
        f'{location}: not valid JSON ({error}); every line must hold one object, in UTF-8.'
      ) from error
    if not isinstance(value, dict):
      raise InputError(
        f'{location}: {reprlib.repr(value)} is not an object; every line must be one, because '
        'fields are looked up by name.'
      )
    yield location, value
