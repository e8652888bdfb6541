"""Short names for data specs, under which evaluations report their scores and keep their files."""

import os
import pathlib
import re
from collections.abc import Iterable, Sequence

from etils import epath

from exgrpo_jax.errors import InputError

_SPEC = re.compile(r'(?P<base>.+?)(?P<slicing>\[[^\[\]]*\])?')
_SLICE = re.compile(r'\[\s*(.*?)\s*:\s*(.*?)\s*\]')
FILE_ENDINGS = ('.jsonl', '.json', '.csv', '.parquet')
LINES_OR_PARQUET = ('.jsonl', '.parquet')  # of files that hold more than questions


def split(spec: str) -> tuple[str, str]:
  """A data spec without its slice, and the slice with its brackets; '' where there is none."""
  match = _SPEC.fullmatch(spec)
  return (match['base'], match['slicing'] or '') if match else ('', '')


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


def spec_name(spec: str) -> str:
  """A name of letters, digits, '_', '.' and '-', which depends on nothing but the spec.

  A file is called after itself and its folder, for many are called test.jsonl: '/data/gsm8k/
  test.jsonl' is gsm8k_test. A slice is spelt out: 'arithmetic:test[64:96]' is
  arithmetic_test_64_to_96.
  """
  base, slicing = split(spec)
  if base.endswith(FILE_ENDINGS):
    path = pathlib.PurePath(base)
    base = f'{path.parent.name}_{path.stem}'
  name = re.sub(r'[^\w.-]+', '_', base).strip('_.')
  return name + _SLICE.sub(_spell, slicing.replace('%', 'pct'))


def _spell(match: re.Match[str]) -> str:
  """'[64:96]' as '_64_to_96', '[:64]' as '_to_64', '[64:]' as '_from_64'."""
  low, high = match.groups()
  return f'_{low}_to_{high}' if low and high else f'_from_{low}' if low else high and f'_to_{high}'


def check_distinct(specs: Iterable[str], where: str) -> None:
  """Refuses specs of the same name, of which one would overwrite the other's results.

  `where` the specs come from begins the message, e.g. 'config.data.evaluation'.
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
  """Refuses what is in both, and what would be reported under one name."""
  for spec in validation:
    if spec in evaluation:
      raise InputError(
        f"config.data.validation and config.data.evaluation both have '{spec}': what a policy is "
        'chosen by must not be what it is reported on; leave it out of one.'
      )
  check_distinct((*validation, *evaluation), 'config.data.validation and config.data.evaluation')
