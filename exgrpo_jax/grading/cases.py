"""Tools for checking a verifier: explain one verdict, or judge a file of labeled cases."""

import json
import pathlib
from typing import Any, NamedTuple

from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import verifier, worker
from exgrpo_jax.grading.answers.answer import MAX_LENGTH, normalize_text, read
from exgrpo_jax.grading.answers.description import describe
from exgrpo_jax.grading.answers.extraction import accepted_answers
from exgrpo_jax.workers import user_code

_MAX_QUOTED = 200  # characters


def explain(
  response: str,
  answer: str,
  config: verifier.VerifierConfig = verifier.ANYTHING,
  kind: str = 'math',
  spec: str = 'built_in',
) -> str:
  """Explain a verdict: the extracted answer, how both answers were read, and the outcome.

  `spec` is a value for config.grading.verifier. Readings are shown only for 'built_in'. For the
  other arguments and the errors, see `verifier.judge`.
  """
  truth = verifier.Truth(answer, kind)
  outcome, text = _judge(verifier.load(spec), spec, response, truth, config)
  lines = [f'extracted  {"nothing" if text is None else _shorten(text)}']
  if spec == 'built_in':
    lines += [] if text is None else [f'response   {_describe(text, kind)}']
    answers = accepted_answers(answer)
    lines.append(f'answer     {", or ".join(_describe(option, kind) for option in answers)}')
  return '\n'.join([*lines, f'verdict    {outcome}'])


def _judge(
  instance: verifier.Verifier,
  spec: str,
  response: str,
  truth: verifier.Truth,
  config: verifier.VerifierConfig,
) -> verifier.Judgement:
  """Judge a response; raises InputError if the verifier fails or returns an invalid result."""
  with user_code.refusing('grading.verifier', spec):
    return worker.checked(verifier.judge_with(instance, response, truth, config))


def _describe(text: str, kind: str) -> str:
  if len(text) > MAX_LENGTH:
    return f'text of {len(text)} characters, compared verbatim'
  return describe(read(text)) if kind == 'math' else f'{kind}: {normalize_text(text)}'


def _shorten(text: str) -> str:
  return text if len(text) <= _MAX_QUOTED else f'{text[:_MAX_QUOTED]}… ({len(text)} characters)'


class _Case(NamedTuple):
  place: str  # path and line number
  response: str
  truth: verifier.Truth
  expected: bool  # True if the response should be judged correct


def score(path: str, config: verifier.VerifierConfig, kind: str, spec: str = 'built_in') -> str:
  """Judge the cases in a JSON Lines file. commands/verify.py documents the format.

  `kind` applies to cases without a kind, and `spec` is a value for config.grading.verifier.
  Returns one line per unexpected verdict, followed by the totals. Raises InputError, naming the
  file and the line, if the file or a case is invalid.
  """
  lines, instance = [], verifier.load(spec)
  counts: dict[str, int] = dict.fromkeys(verifier.OUTCOMES, 0)
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8-sig')
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'--file={path}: the file cannot be read ({error}).') from None
  rows = [(number, line) for number, line in enumerate(text.split('\n'), 1) if line.strip()]
  cases = [_parse(f'{path}:{number}', line, kind) for number, line in rows]
  if not cases:
    raise InputError(f'--file={path}: the file contains no cases. Write one JSON object per line.')
  for case in cases:
    try:
      outcome, answer = _judge(instance, spec, case.response, case.truth, config)
    except InputError as error:
      raise InputError(f'{case.place}: {error}') from error
    counts[outcome] += 1
    if case.expected != (outcome == 'correct'):
      expected = 'correct' if case.expected else 'wrong'
      comparison = f'{_shorten(answer or "nothing")!r} for {_shorten(case.truth.answer)!r}'
      lines.append(f'{case.place}: {outcome}, expected {expected}: {comparison}')
  totals = ', '.join(f'{count} {outcome}' for outcome, count in counts.items())
  num_expected = len(cases) - len(lines)
  return '\n'.join([*lines, f'{counted(len(cases), "case")}: {totals}; {num_expected} as expected'])


def _parse(place: str, line: str, kind: str) -> _Case:
  try:
    row = json.loads(line)
    if not isinstance(row, dict):
      raise ValueError
  except (ValueError, RecursionError):
    raise InputError(f'{place}: {_shorten(line)!r} is not a JSON object.') from None

  def field(*names: str, kind: type = str, default: Any = None) -> Any:
    """Return the value of the first of these fields that is present, or else `default`.

    Raises InputError if there is neither a field nor a default, or if a value has the wrong type.
    """
    name = next((name for name in names if name in row), None)
    if name is None and default is None:
      fields = ', '.join(map(repr, row)) or 'nothing'
      raise InputError(f'{place}: no field {" or ".join(map(repr, names))} (has: {fields}).')
    if name and not isinstance(row[name], kind):
      raise InputError(f'{place}: {name}={row[name]!r} must be of type {kind.__name__}.')
    return row[name] if name else default

  truth = verifier.Truth(field('gold', 'answer'), field('kind', default=kind), row)
  if truth.kind not in verifier.KINDS:
    raise InputError(f'{place}: kind={truth.kind!r} must be one of {", ".join(verifier.KINDS)}.')
  return _Case(place, field('response'), truth, field('expected', kind=bool, default=True))
