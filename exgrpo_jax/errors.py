"""`InputError`, for mistakes that users can fix, and helpers for wording messages."""

import re
from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
  """An error in the user's input; the message says how to fix it.

  Commands print it and exit with status 2, so it must never hide a bug in this package. The message
  is joined into one line, even if it quotes a multi-line error.
  """

  def __init__(self, message: str) -> None:
    super().__init__(re.sub(r'\s*\n\s*', ' ', message.strip()))


def check_given(flags: Mapping[str, Any], example: str) -> None:
  """Raise InputError naming the flags without a value; `example` shows how to set them."""
  missing = [name for name, value in flags.items() if not value]
  if missing:
    are = 'is' if len(missing) == 1 else 'are'
    raise InputError(f'{" and ".join(missing)} {are} needed, e.g. {example}.')


def counted(count: int, noun: str) -> str:
  """Format a count with its noun, plural unless the count is 1: '1 row', '1,200 rows'."""
  return f'{count:,} {noun}{"s" * (count != 1)}'
