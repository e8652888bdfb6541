"""`InputError`, for mistakes that users can fix, and helpers for wording messages."""

import re
from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
  """An error in the user's input; the message says how to fix it.

  Commands print the message and exit with `status`, so never raise this for a bug in this package.
  The status is 2, or 1 if the network or the storage failed and the same command may work later.
  Line breaks in the message, for example from a quoted error, become spaces.
  """

  def __init__(self, message: str, status: int = 2) -> None:
    super().__init__(re.sub(r'\s*\n\s*', ' ', message.strip()))
    self.status = status


def check_given(flags: Mapping[str, Any], example: str) -> None:
  """Raise InputError if any flag has no value; the message lists these flags and `example`."""
  missing = [name for name, value in flags.items() if not value]
  if missing:
    are = 'is' if len(missing) == 1 else 'are'
    raise InputError(f'{" and ".join(missing)} {are} required, e.g. {example}.')


def counted(count: int, noun: str) -> str:
  """Format a count with its noun, plural unless the count is 1: '1 row', '1,200 rows'."""
  return f'{count:,} {noun}{"s" * (count != 1)}'
