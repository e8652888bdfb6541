"""Rows of verl's columns, made of the files of a public data set.

Read are parquet and jsonl files with verl's own columns, such as those of
Elliott/Openr1-Math-46k-8192, or with `problem` and `answer`, such as open-r1/OpenR1-Math-220k's.
"""

import pathlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_jax.data import hub_split, json_lines, row_files, spec_names
from exgrpo_jax.data.columns import NO_ANSWERS, check_distinct
from exgrpo_jax.errors import InputError

VERL = ('data_source', 'prompt', 'ability', 'reward_model', 'extra_info')
TARGET = 'target'  # the column of worked solutions by another model
SCHEMA = pa.schema(
  [
    ('data_source', pa.string()),
    ('prompt', pa.list_(pa.struct([('role', pa.string()), ('content', pa.string())]))),
    ('ability', pa.string()),
    ('reward_model', pa.struct([('ground_truth', pa.string()), ('style', pa.string())])),
    ('extra_info', pa.struct([('index', pa.int64()), ('split', pa.string())])),
  ]
)
_ROLES = ('system', 'user', 'assistant')
_BATCH = 1024  # rows that are in memory together
_INT64_DIGITS = 18  # of SCHEMA's index; with so many any number fits


class Shard(NamedTuple):
  """A file, and the columns that it has."""

  path: pathlib.Path
  columns: tuple[str, ...]

  @property
  def is_verl(self) -> bool:
    """Whether it has verl's columns; else it has problems and answers."""
    return {'prompt', 'reward_model'} <= set(self.columns)


def shards(places: list[str]) -> list[Shard]:
  """The files in these places, in order: those named, and those of folders and splits named.

  Raises:
    InputError: a place does not exist or has no such file, or a file cannot be read or has other
      columns.
  """
  found = [path for place in places for path in _files(place)]
  return [_shard(path) for path in found]


def rows(shard: Shard, keep_target: bool) -> Iterator[dict[str, Any] | str]:
  """Each row in verl's columns, or why it is left out.

  A row of problem and answer becomes a prompt of one user message, without a system message, for
  which the config's template has its own.

  Args:
    shard: the file.
    keep_target: whether the column of worked solutions is kept, as text.

  Raises:
    InputError: a row is not of the type that its columns must have.
  """
  wanted = [*VERL, TARGET] if keep_target else VERL
  columns = wanted if shard.is_verl else ('problem', 'answer', 'solution')
  columns = [column for column in columns if column in shard.columns]
  for number, record in enumerate(_records(shard.path, columns)):
    location = f'{shard.path}: row {number}'
    row = _verl_row(record, location) if shard.is_verl else _problem_row(record, location)
    if isinstance(row, dict) and keep_target:
      solution = record.get(TARGET if shard.is_verl else 'solution')
      row[TARGET] = _solution(solution, location)
    yield row


# ---- Files ----


def _files(place: str) -> list[pathlib.Path]:
  path = pathlib.Path(place).expanduser()
  if path.is_file():
    if path.name.endswith(spec_names.LINES_OR_PARQUET):
      return [path]
    raise InputError(
      f'--data={place} must be a folder, or a file that ends in '
      f'{" or ".join(spec_names.LINES_OR_PARQUET)}: others cannot be read.'
    )
  if not path.is_dir():
    if split := hub_split.parse(place):
      return [pathlib.Path(file) for file in hub_split.files(split)]
    raise InputError(
      f'--data={place}: there is no such file or folder, nor is it a split of the Hub, such as '
      'owner/name:train.'
    )
  inside = [
    file
    for file in sorted(path.rglob('*'))
    if file.name.endswith(spec_names.LINES_OR_PARQUET)
    and not any(part.startswith('.') for part in file.relative_to(path).parts)
  ]
  if not inside:
    raise InputError(
      f'--data={place}: no file in it ends in {" or ".join(spec_names.LINES_OR_PARQUET)}; it must '
      "hold the data set's files."
    )
  return inside


def _shard(path: pathlib.Path) -> Shard:
  try:
    if path.suffix == '.parquet':
      columns = tuple(pq.read_schema(path).names)
    else:
      columns = tuple(next(_records(path, ()), {}))
  except (pa.ArrowInvalid, OSError) as error:
    raise InputError(f'{path}: not a complete file ({error}); download it again.') from error
  check_distinct(columns, str(path))
  shard = Shard(path, columns)
  if not shard.is_verl and not {'problem', 'answer'} <= set(columns):
    raise InputError(
      f"{path}: neither verl's columns 'prompt' and 'reward_model' nor 'problem' and 'answer'; it "
      f'has {", ".join(columns) or "no row"}, so it is not known what is asked.'
    )
  return shard


def _records(path: pathlib.Path, columns: tuple[str, ...] | list[str]) -> Iterator[dict[str, Any]]:
  try:
    if path.suffix == '.parquet':
      number = 0
      with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
          yield from row_files.values(batch, str(path), number)
          number += batch.num_rows
    else:
      with path.open('rb') as lines:
        for _, record in json_lines.objects(lines, str(path)):
          yield record
  except (pa.ArrowInvalid, OSError) as error:
    raise InputError(f'{path}: not a complete file ({error}); download it again.') from error


# ---- Rows ----


def _verl_row(record: Mapping[str, Any], location: str) -> dict[str, Any] | str:
  prompt, model = record.get('prompt'), record.get('reward_model') or {}
  if not isinstance(model, Mapping):
    raise InputError(
      f'{location}: reward_model is {reprlib.repr(model)}; it must be a struct with ground_truth.'
    )
  if isinstance(model.get('ground_truth'), bytes):
    raise InputError(
      f'{location}: ground_truth is {reprlib.repr(model["ground_truth"])}; it must be text.'
    )
  if not prompt:
    return 'no prompt'
  if not isinstance(prompt, list) or not all(
    isinstance(turn, Mapping)
    and turn.get('role') in _ROLES
    and isinstance(turn.get('content'), str | None)
    for turn in prompt
  ):
    raise InputError(
      f'{location}: prompt is {reprlib.repr(prompt)}; it must be a list of chat messages, each '
      f'with a role ({", ".join(_ROLES)}) and a content, as text.'
    )
  messages = [{'role': turn['role'], 'content': _text(turn.get('content'))} for turn in prompt]
  extra = record.get('extra_info')
  extra = extra if isinstance(extra, Mapping) else {}
  index = _text(extra.get('index'))
  return _row(
    messages,
    _text(model.get('ground_truth')),
    source=_text(record.get('data_source')) or 'math',
    ability=_text(record.get('ability')) or 'math',
    style=_text(model.get('style')) or 'rule',
    index=int(index) if index.isdecimal() and len(index) <= _INT64_DIGITS else None,
    split=_text(extra.get('split')) or 'train',
  )


def _problem_row(record: Mapping[str, Any], location: str) -> dict[str, Any] | str:
  for name in ('problem', 'answer'):
    if record.get(name) is not None and not isinstance(record[name], str):
      raise InputError(f'{location}: {name} is {reprlib.repr(record[name])}; it must be text.')
  messages = [{'role': 'user', 'content': _text(record.get('problem'))}]
  return _row(messages, _text(record.get('answer')))


def _row(
  messages: list[dict[str, str]],
  answer: str,
  source: str = 'math',
  ability: str = 'math',
  style: str = 'rule',
  index: int | None = None,
  split: str = 'train',
) -> dict[str, Any] | str:
  """The row, or why it is left out."""
  if not any(turn['role'] == 'user' for turn in messages) or not all(
    turn['content'] for turn in messages
  ):
    return 'no prompt'
  if not answer:
    return 'no ground truth'
  if answer.strip().lower() in NO_ANSWERS:
    return f'{answer.strip()} in place of a ground truth'
  return {
    'data_source': source,
    'prompt': messages,
    'ability': ability,
    'reward_model': {'ground_truth': answer, 'style': style},
    'extra_info': {'index': index, 'split': split},
  }


def _solution(value: Any, location: str) -> str | None:
  """A worked solution as text: it may be the first of a list of messages."""
  if isinstance(value, list):
    value = value[0] if value else None
  if isinstance(value, Mapping):
    value = value.get('content')
  if value is not None and not isinstance(value, str):
    raise InputError(f'{location}: {TARGET} is {reprlib.repr(value)}; it must be text or messages.')
  return value or None


def _text(value: Any) -> str:
  """As text; '' where there is none."""
  return '' if value is None or not str(value).strip() else str(value)
