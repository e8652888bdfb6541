"""InputError, the exception for mistakes that users can fix, and wording that messages share."""

import re
from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
  """An error in the user's input, whose message says how to fix it.

  Commands print it and exit with status 2; it never hides a bug of ours. It is one line, even if it
  quotes an error with several.
  """

  def __init__(self, message: str) -> None:
    super().__init__(re.sub(r'\s*\n\s*', ' ', message.strip()))


def check_given(flags: Mapping[str, Any], example: str) -> None:
  """Raise an InputError that names the flags without a value; `example` shows them all."""
  missing = [name for name, value in flags.items() if not value]
  if missing:
    are = 'is' if len(missing) == 1 else 'are'
    raise InputError(f'{" and ".join(missing)} {are} needed, e.g. {example}.')


def counted(count: int, noun: str) -> str:
  """Return a number with its noun, in the plural unless it is 1: '1 row', '1,200 rows'."""
  return f'{count:,} {noun}{"s" * (count != 1)}'
