r"""Why a response was judged as it was, and how the verifier judges a file of cases.

python -m exgrpo_jax.verify --response='So \boxed{2/4}' --answer=0.5
python -m exgrpo_jax.verify --file=cases.jsonl

A file has one JSON object a line: 'response', 'gold' or 'answer' (the ground truth), and if wanted
'expected' (whether it should be judged correct; true by default) and 'kind'. Printed are the lines
judged otherwise than expected, and the totals.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

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


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    """Instead of the usage in several lines."""
    raise InputError(f'{message}; --help lists all flags.')


def main(argv: list[str]) -> None:
  """Explains how one response is judged, or scores a file."""
  try:
    text = _answer(_parser().parse_args(argv))
  except InputError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  print(text.encode('utf-8', 'backslashreplace').decode())  # lone surrogates cannot be printed


def _answer(args: argparse.Namespace) -> str:
  config = verifier.Config(require_think=args.require_think, require_box=args.require_box)
  beside = [f'--{name}' for name in ('response', 'answer') if getattr(args, name) is not None]
  if args.file is not None and beside:
    raise InputError(f'--file and {beside[0]} are both given; judge a file, or one response.')
  if args.file is not None:
    return score(args.file, config, args.kind)
  if len(beside) == 2:
    return explain(args.response, args.answer, config, args.kind)
  raise InputError(
    r"give --response and --answer, or --file, e.g. --response='\boxed{5}' --answer=5."
  )


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='python -m exgrpo_jax.verify',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument('--response', help='what the model wrote')
  parser.add_argument('--answer', help='the ground truth')
  parser.add_argument(
    '--file',
    type=os.path.expanduser,
    help='cases as JSON lines, instead of one response and answer',
  )
  parser.add_argument(
    '--kind',
    default='math',
    help=f'how answers are compared: {", ".join(verifier.KINDS)} (default: math)',
  )
  parser.add_argument(
    '--require_box', action='store_true', help=r'only \boxed{…} counts as an answer'
  )
  parser.add_argument(
    '--require_think', action='store_true', help="a response without '</think>' has no answer"
  )
  return parser


if __name__ == '__main__':
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback before `| head`
  main(sys.argv[1:])
