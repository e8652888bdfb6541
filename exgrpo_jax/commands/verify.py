r"""Explain how the verifier judges a response, or score the verifier on a file of cases.

exgrpo verify --response='So \boxed{2/4}' --answer=0.5
exgrpo verify --file=cases.jsonl

The file contains one JSON object per line: 'response', 'gold' or 'answer' (the ground truth), and
optionally 'expected' (whether the response is correct; true by default) and 'kind'. The command
prints the lines with an unexpected verdict, and the totals.
"""

import argparse
import os
import signal
import sys
from typing import Any, NoReturn

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.cases import explain, score


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    """Raise a one-line error instead of printing the usage."""
    raise InputError(f'{message}. --help lists all flags.')


class _Once(argparse.Action):
  def __call__(self, parser: argparse.ArgumentParser, namespace: Any, *args: Any) -> None:
    """Store the flag's value. For a flag given twice, argparse would use the last value."""
    values, option = args
    if getattr(namespace, self.dest) is not self.default:
      parser.error(f'{option}: this flag is given twice. Remove one of them')
    setattr(namespace, self.dest, values)


def main(argv: list[str]) -> None:
  """Explain how one response is judged, or score a file of cases."""
  try:
    text = _answer(_parser().parse_args(argv))
  except InputError as error:
    print('error:', str(error).replace('config.grading.verifier', '--verifier'), file=sys.stderr)
    sys.exit(2)
  print(text.encode('utf-8', 'backslashreplace').decode())  # lone surrogates cannot be printed


def _answer(args: argparse.Namespace) -> str:
  config = verifier.VerifierConfig(args.require)
  flags = [f'--{name}' for name in ('response', 'answer') if getattr(args, name) is not None]
  if args.file is not None and flags:
    raise InputError(f'--file and {flags[0]} are both given. Pass a file or a single response.')
  if args.file is not None:
    return score(args.file, config, args.kind, args.verifier)
  if len(flags) == 2:
    return explain(args.response, args.answer, config, args.kind, args.verifier)
  raise InputError(
    r"--response and --answer are required, e.g. --response='\boxed{5}' --answer=5. Add both "
    'flags, or use --file instead.'
  )


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='exgrpo verify',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.register('action', None, _Once)  # the default
  parser.add_argument('--response', help="the model's response")
  parser.add_argument('--answer', help='the ground truth')
  parser.add_argument(
    '--file',
    type=os.path.expanduser,
    help='a file of cases as JSON lines, instead of a single response and answer',
  )
  parser.add_argument(
    '--kind',
    default='math',
    choices=verifier.KINDS,
    help='how to compare answers (default: math)',
  )
  parser.add_argument(
    '--verifier',
    default='built_in',
    help='built_in (default), math_verify or package.module:Class, like config.grading.verifier',
  )
  parser.add_argument(
    '--require',
    default=(),
    nargs='+',
    choices=verifier.REQUIREMENTS[-1],
    help=r"treat a response without '</think>' (think) or without \boxed{…} (box) as unanswered",
  )
  return parser


def run() -> None:
  """Run the CLI without importing JAX."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback when piped into `| head`
  main(sys.argv[1:])
