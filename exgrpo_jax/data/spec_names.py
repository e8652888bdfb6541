"""The forms of data specs, and the short names under which evaluations report them."""

import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

from etils import epath

from exgrpo_jax.errors import InputError, counted

FILE_ENDINGS = ('.jsonl', '.json', '.csv', '.parquet')
LINES_OR_PARQUET = ('.jsonl', '.parquet')  # of files that hold more than questions

COLUMNS = ('question', 'answer', 'solution')  # that a spec may name itself

_SPEC = re.compile(
  r'(?P<base>.+?)(?P<columns>\{[^{}]*\})?(?P<slicing>\[[^\[\]]*\])?(?P<columns_last>\{[^{}]*\})?'
)
_TASK_FILE = re.compile(r'(?P<file>.+\.py):(?P<split>[\w.-]+)')
_SLICE = re.compile(r'\[\s*(.*?)\s*:\s*(.*?)\s*\]')
_BOUND = re.compile(r'(-?[\d_.]+)(%?)')


def split(spec: str) -> tuple[str, str]:
  """A data spec without its columns and its slice, and the slice with its brackets, or ''."""
  match = _SPEC.fullmatch(spec)
  return (match['base'], match['slicing'] or '') if match else ('', '')


def named_columns(spec: str) -> dict[str, str]:
  """The columns that a spec names itself, by what they hold; {} if it names none.

  'x.jsonl{question=problem,answer=key}[:500]' is {'question': 'problem', 'answer': 'key'}. The
  braces may follow the slice. Raises InputError if they hold anything else.
  """
  match = _SPEC.fullmatch(spec)
  braces = [part for part in (match['columns'], match['columns_last']) if part] if match else []
  pairs = [pair.partition('=') for text in braces for pair in text[1:-1].split(',')]
  named = {key.strip(): column.strip() for key, _, column in pairs}
  if len(named) < len(pairs) or not set(named) <= set(COLUMNS) or not all(named.values()):
    raise InputError(
      f'{spec}: {" and ".join(braces)} must name columns, as in {{question=problem,answer=key}}: '
      f'{", ".join(COLUMNS)}, each once at most. A column whose name has a comma or a brace can '
      'only be named in config.data.question_field and its like.'
    )
  return named


def task_file(base: str) -> tuple[str, str] | None:
  """File and split of a task in Python, such as 'squares.py:train'; None for any other spec."""
  match = _TASK_FILE.fullmatch(base)
  return (match['file'], match['split']) if match else None


def files(base: str) -> tuple[list[str], str]:
  """The files that a spec without its slice names, and what they are called together; '' is none.

  In the last part of the path `*` stands for any characters; files come in the order of names.

  Raises:
    InputError: there is none of that pattern.
  """
  folder, _, pattern = base.rpartition('/')
  if '*' not in pattern:
    return [base], ''
  found = sorted(map(os.fspath, epath.Path(folder).expanduser().glob(pattern)))
  if not found:
    raise InputError(f'{base}: there is no file of that pattern.')
  return found, pattern.partition('*')[0].rstrip('-_.') or pathlib.PurePath(folder).name


def rows(spec: str, size: int) -> range:
  """The rows that the slice of a spec selects, as TFDS reads it: [:640], [100:-5], [:10%].

  Raises:
    InputError: it is no such slice, goes beyond the `size` rows, or selects none.
  """
  slicing = split(spec)[1]
  if not slicing:
    return range(size)
  match = _SLICE.fullmatch(slicing)
  bounds = [_BOUND.fullmatch(text) for text in match.groups() if text] if match else []
  try:
    if not match or not all(bounds) or not bounds:
      raise ValueError
    is_percent = any(bound and bound[2] for bound in bounds)
    begin, end = (
      default if not text else _row(text.rstrip('%'), is_percent, size)
      for text, default in zip(match.groups(), (0, size))
    )
  except ValueError as error:
    raise InputError(
      f'{spec}: the slice {slicing} must follow TFDS syntax, such as [:640], [100:200] or [:10%], '
      f'and stay within the {counted(size, "row")} of the split.'
    ) from error
  if begin >= end:
    raise InputError(
      f'{spec}: the slice {slicing} selects none of the {counted(size, "row")} of the split.'
    )
  return range(begin, end)


def _row(bound: str, is_percent: bool, size: int) -> int:
  row = round(float(bound) * size / 100) if is_percent else int(bound)
  if abs(row) > size:
    raise ValueError
  return row + size if row < 0 else row


def spec_name(spec: str) -> str:
  """A name of letters, digits, '_', '.' and '-', which depends on nothing but the spec.

  A file is called after itself and its folder, for many are called test.jsonl: '/data/gsm8k/
  test.jsonl' is gsm8k_test. A slice is spelt out: 'arithmetic:test[64:96]' is
  arithmetic_test_64_to_96. Arguments of reasoning_gym's tasks are a hash: names are part of paths.
  """
  base, slicing = split(spec)
  if base.endswith(FILE_ENDINGS):
    path = pathlib.PurePath(base)
    base = f'{path.parent.name}_{path.stem}'
  elif arguments := re.search(r'\(.*\)', base):
    digest = hashlib.sha256(arguments[0].encode()).hexdigest()[:6]
    base = base.replace(arguments[0], f'_{digest}')
  name = re.sub(r'[^\w.-]+', '_', base).strip('_.')
  return name + _SLICE.sub(_spell, slicing.replace('%', 'pct'))


def _spell(match: re.Match[str]) -> str:
  """'[64:96]' as '_64_to_96', '[:64]' as '_to_64', '[64:]' as '_from_64'."""
  low, high = match.groups()
  return f'_{low}_to_{high}' if low and high else f'_from_{low}' if low else high and f'_to_{high}'


def check_distinct(specs: Iterable[str], where: str) -> None:
  """InputError where two specs have the same name, and so would overwrite each other's results.

  Args:
    specs: data specs.
    where: they come from, e.g. 'config.data.evaluation'; begins the message.
  """
  named: dict[str, str] = {}
  for spec in specs:
    name = spec_name(spec)
    if name in named:
      raise InputError(
        f"{where}: '{named[name]}' and '{spec}' would both be reported as '{name}', the name of "
        'file and folder (or task and split) and slice; rename one of them, or leave it out.'
      )
    named[name] = spec


def check_apart(validation: Sequence[str], evaluation: Sequence[str]) -> None:
  """InputError where a spec is in both, or two would be reported under one name."""
  for spec in validation:
    if spec in evaluation:
      raise InputError(
        f"config.data.validation and config.data.evaluation both have '{spec}': what a policy is "
        'chosen by must not be what it is reported on; leave it out of one.'
      )
  check_distinct((*validation, *evaluation), 'config.data.validation and config.data.evaluation')
