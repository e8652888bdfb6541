"""Text to answer to verdict: does a response end in the right answer?

Nothing that a model wrote is evaluated, and everything is bounded: the length of
an answer, the depth of its tree, the digits of its numbers.

  python -m exgrpo_jax.verifier --response='So \\boxed{2/4}' --answer=0.5
  python -m exgrpo_jax.verifier --file=cases.jsonl
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.answers import answer as reading
from exgrpo_jax.grading.answers import equality, extraction

KINDS = ('math', 'choice', 'text')
OUTCOMES = ('correct', 'wrong', 'no answer')


@dataclasses.dataclass(frozen=True)
class Config:
  """What a response must look like before its answer is compared."""

  require_think: bool = setting(
    None, "a response without '</think>' is wrong; the training reward asks for it"
  )
  require_box: bool = setting(
    None,
    r"only \boxed{...} is an answer; off, '####', 'the answer is' and the last "
    'number count too',
  )


ANYTHING = Config(require_think=False, require_box=False)


def is_correct(response: str, answer: str, config: Config = ANYTHING, kind: str = 'math') -> bool:
  """Whether the response's answer equals the ground truth. Never hangs.

  Raises InputError where `kind` is not one of KINDS, and nothing for any response.
  """
  return judge(response, answer, config, kind) == 'correct'


def judge(response: str, answer: str, config: Config = ANYTHING, kind: str = 'math') -> str:
  """One of OUTCOMES; raises as `is_correct`."""
  if kind not in KINDS:
    raise InputError(f'kind={kind!r} must be one of {", ".join(KINDS)}: how answers are compared.')
  given = extract(response, config)
  if given is None:
    return 'no answer'
  return 'correct' if equality.equal(given, answer, kind) else 'wrong'


def extract(response: str, config: Config) -> str | None:
  """The answer a response gives, as written, or None; see extraction.py."""
  return extraction.extract(response, config.require_think, config.require_box)


def explain(response: str, answer: str, config: Config = ANYTHING, kind: str = 'math') -> str:
  """Lines that say what was extracted, how each side was read, and the verdict."""
  verdict = judge(response, answer, config, kind)
  given = extract(response, config)
  lines = [f'extracted  {_shortened(given) if given is not None else "nothing"}']
  for name, text in (('response', given), ('answer', answer)):
    if text is not None:
      lines.append(f'{name:<9}  {_read_as(text, kind)}')
  return '\n'.join([*lines, f'verdict    {verdict}'])


def _read_as(text: str, kind: str) -> str:
  if len(text) > reading.MAX_LENGTH:
    return f'text of {len(text)} characters, compared as it stands'
  if kind != 'math':
    return f'{kind}: {reading.words(text)}'
  return reading.described(reading.read(text))


def _shortened(text: str) -> str:
  return text if len(text) <= 200 else f'{text[:200]}… ({len(text)} characters)'


def score(path: str, config: Config, kind: str) -> str:
  """A line for each disagreement in a file of cases, then the totals.

  Cases are lines of JSON with `response`, `gold` or `answer`, and perhaps `kind`
  and `expected` (true where absent). Raises InputError naming file and line.
  """
  lines, counts, agreed = [], dict.fromkeys(OUTCOMES, 0), 0
  cases = list(_cases(path))
  for number, row in cases:
    truth = row['gold'] if 'gold' in row else row['answer']
    try:
      outcome = judge(row['response'], truth, config, row.get('kind', kind))
    except InputError as error:
      raise InputError(f'{path}:{number}: {error}') from None
    counts[outcome] += 1
    expected = row.get('expected', True)
    agreed += expected == (outcome == 'correct')
    if expected != (outcome == 'correct'):
      given = extract(row['response'], config)
      lines.append(
        f'{path}:{number}: {outcome}, expected {"correct" if expected else "wrong"}: '
        f'{_shortened(given or "nothing")!r} for {_shortened(truth)!r}'
      )
  totals = ', '.join(f'{count} {outcome}' for outcome, count in counts.items())
  return '\n'.join([*lines, f'{len(cases)} cases: {totals}; {agreed} as expected'])


def _cases(path: str):
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f'--file={path} cannot be read: {error}.') from None
  for number, line in enumerate(text.split('\n'), 1):
    if not line.strip():
      continue
    where = f'{path}:{number}'
    try:
      row = json.loads(line)
    except (ValueError, RecursionError):
      raise InputError(f'{where}: {_shortened(line)!r} is not JSON; one object a line.') from None
    if not isinstance(row, dict):
      raise InputError(f'{where}: {_shortened(line)!r} must be an object with fields.')
    for names, kind in (
      (('gold', 'answer'), str),
      (('response',), str),
      (('expected',), bool),
      (('kind',), str),
    ):
      name = next((n for n in names if n in row), None)
      if name is None and kind is str and names != ('kind',):
        has = ', '.join(map(repr, row)) or 'nothing'
        raise InputError(f'{where}: no field {" or ".join(map(repr, names))} (has: {has}).')
      if name is not None and not isinstance(row[name], kind):
        raise InputError(f'{where}: {name}={row[name]!r} must be of type {kind.__name__}.')
    yield number, row


def main(argv: list[str]) -> None:
  """Says of one response, or of each in a file, how it is judged and why."""
  parser = argparse.ArgumentParser(prog='python -m exgrpo_jax.verifier', allow_abbrev=False)
  parser.add_argument('--response', help='what a model wrote')
  parser.add_argument('--answer', help='the ground truth')
  parser.add_argument('--file', help='jsonl with response, gold or answer, expected, kind')
  parser.add_argument('--kind', default='math', help=', '.join(KINDS))
  parser.add_argument('--require_box', action='store_true', help=r'only \boxed{…} counts')
  parser.add_argument('--require_think', action='store_true', help="'</think>' must be there")
  given = parser.parse_args(argv)
  config = Config(given.require_think, given.require_box)
  try:
    if given.file is not None and given.response is None and given.answer is None:
      text = score(given.file, config, given.kind)
    elif given.file is None and given.response is not None and given.answer is not None:
      text = explain(given.response, given.answer, config, given.kind)
    else:
      raise InputError('give --response and --answer, or --file.')
  except InputError as error:
    sys.exit(f'error: {error}')
  print(text.encode('utf-8', 'backslashreplace').decode())  # halves of characters, too


if __name__ == '__main__':
  main(sys.argv[1:])
