"""Files of one JSON object per line: the metrics of a run, and rows for people to read.

No JAX here, so that a process that only draws starts quickly.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import InputError

FILE = 'metrics.jsonl'

Run = Sequence[Mapping[str, float]]  # the records of its metrics.jsonl, oldest first


def read(workdir: str | os.PathLike) -> list[dict[str, float]]:
  """The records of metrics.jsonl, oldest first; none if the file does not exist.

  A last line without a newline, as a killed process leaves it, is skipped. Raises InputError for
  any other line that is not a record.
  """
  path = pathlib.Path(workdir) / FILE
  if not path.exists():
    return []
  # Bytes that are no UTF-8 make a line that is no record.
  lines = path.read_text(encoding='utf-8', errors='backslashreplace').split('\n')[:-1]
  return [_parse(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Writes one record per line; a killed process leaves the old file or the new one, complete."""
  temporary = path.with_name(path.name + '.tmp')
  # UTF-8 cannot encode a lone surrogate; backslashreplace writes its JSON escape.
  with temporary.open('w', encoding='utf-8', errors='backslashreplace') as file:
    file.writelines(map(json_line, records))
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def json_line(record: Mapping[str, Any]) -> str:
  """The record as strict JSON, with its newline."""
  # JSON has no NaN or infinity, and strict parsers reject the bare ones that Python writes.
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _parse(line: str, location: str) -> dict[str, float]:
  try:
    record = json.loads(line)
    return {'step': record.pop('step'), **{name: float(v) for name, v in record.items()}}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(
      f'{location}: {line[:80]!r} is not a record of metrics ({error}); delete the line to read '
      'the others.'
    ) from error
