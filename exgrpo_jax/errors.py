"""InputError, the exception that users can fix, and wording that messages share."""

import re
from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
  """Something the user gave cannot be used; the message says all they need.

  Commands print it and exit with status 2; it never hides a bug of ours. It is one line, also where
  it quotes an error of several.
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
