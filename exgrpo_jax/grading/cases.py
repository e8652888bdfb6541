"""Why a response was judged as it was, and how the verifier judges a file of cases."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.answers.answer import MAX_LENGTH, normalize_text, read
from exgrpo_jax.grading.answers.description import describe
from exgrpo_jax.grading.answers.extraction import final_answer

_MAX_QUOTED = 200  # characters


def explain(
  response: str, answer: str, config: verifier.Config = verifier.ANYTHING, kind: str = 'math'
) -> str:
  """What was extracted, how both sides were read, and the outcome, one a line.

  Arguments and errors as for `verifier.judge`.
  """
  outcome = verifier.judge(response, answer, config, kind)
  given = verifier.extract(response, config)
  lines = [f'extracted  {"nothing" if given is None else _shorten(given)}']
  if given is not None:
    lines.append(f'response   {_describe(given, kind)}')
  lines.append(f'answer     {_describe(final_answer(answer), kind)}')
  lines.append(f'verdict    {outcome}')
  return '\n'.join(lines)


def _describe(text: str, kind: str) -> str:
  if len(text) > MAX_LENGTH:
    return f'text of {len(text)} characters, compared as it stands'
  if kind != 'math':
    return f'{kind}: {normalize_text(text)}'
  return describe(read(text))


def _shorten(text: str) -> str:
  return text if len(text) <= _MAX_QUOTED else f'{text[:_MAX_QUOTED]}… ({len(text)} characters)'


@dataclasses.dataclass(frozen=True)
class _Case:
  response: str
  answer: str
  kind: str
  expected: bool  # whether the response should be judged correct


def score(path: str, config: verifier.Config, kind: str) -> str:
  """Judges a file of cases.

  Args:
    path: a file as the top of this module describes it.
    config: what a response must have.
    kind: how answers are compared where a case does not say.

  Returns:
    A line for each case judged otherwise than expected, then the totals.

  Raises:
    InputError: with file and line.
  """
  lines = []
  counts: dict[str, int] = dict.fromkeys(verifier.OUTCOMES, 0)
  cases = list(_read_cases(path, kind))
  if not cases:
    raise InputError(f'--file={path} has no case in it: one JSON object a line is expected.')
  for place, case in cases:
    try:
      outcome = verifier.judge(case.response, case.answer, config, case.kind)
    except InputError as error:
      raise InputError(f'{place}: {error}') from None
    counts[outcome] += 1
    if case.expected != (outcome == 'correct'):
      given = _shorten(verifier.extract(case.response, config) or 'nothing')
      expected = 'correct' if case.expected else 'wrong'
      lines.append(
        f'{place}: {outcome}, expected {expected}: {given!r} for {_shorten(case.answer)!r}'
      )
  totals = ', '.join(f'{count} {outcome}' for outcome, count in counts.items())
  as_expected = len(cases) - len(lines)
  return '\n'.join([*lines, f'{len(cases)} cases: {totals}; {as_expected} as expected'])


def _read_cases(path: str, kind: str) -> Iterator[tuple[str, _Case]]:
  """Each case of a file, after its place: path and line number."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'--file={path} cannot be read: {error}.') from None
  for number, line in enumerate(text.split('\n'), 1):
    if line.strip():
      place = f'{path}:{number}'
      try:
        yield place, _parse_case(line, kind)
      except InputError as error:
        raise InputError(f'{place}: {error}') from None


def _parse_case(line: str, kind: str) -> _Case:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    raise InputError(f'{_shorten(line)!r} is not JSON; one object a line is expected.') from None
  if not isinstance(row, dict):
    raise InputError(f'{_shorten(line)!r} must be an object with fields.')
  return _Case(
    answer=_field(row, ('gold', 'answer'), str),
    response=_field(row, ('response',), str),
    expected=_field(row, ('expected',), bool, default=True),
    kind=_field(row, ('kind',), str, default=kind),
  )


def _field(row: dict[str, Any], names: tuple[str, ...], kind: type, default: Any = None) -> Any:
  """The first of these fields that a row has; required if there is no default."""
  name = next((name for name in names if name in row), None)
  if name is None:
    if default is None:
      fields = ', '.join(map(repr, row)) or 'nothing'
      raise InputError(f'no field {" or ".join(map(repr, names))} (has: {fields}).')
    return default
  if not isinstance(row[name], kind):
    raise InputError(f'{name}={row[name]!r} must be of type {kind.__name__}.')
  return row[name]
