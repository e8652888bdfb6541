"""`InputError`, for mistakes that users can fix, and helpers for wording messages."""

import errno
import re
import reprlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

# Error numbers of full or failing disks and of network failures.
_FAILURES = (
  errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT,
  errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH,
)  # fmt: skip


class InputError(ValueError):
  """An error in the user's input; the message says how to fix it.

  Commands print the message and exit with `status`, so never raise this for a bug in this package.
  The status is 2, or 1 if the network or the storage failed and the same command may work later. By
  default, the status is derived from the chain of causes. Line breaks in the message, for example
  from a quoted error, become spaces.
  """

  def __init__(self, message: str, status: int = 0) -> None:
    super().__init__(re.sub(r'\s*\n\s*', ' ', message.strip()))
    self._status = status

  @property
  def status(self) -> int:
    """Return the exit status."""
    cause = self.__cause__
    if isinstance(cause, InputError):
      return self._status or cause.status
    return self._status or (1 if any(map(_may_pass, with_causes(cause))) else 2)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
  """Yield the error, then its chain of causes."""
  while error:
    yield error
    error = error.__cause__ or error.__context__


def _may_pass(error: BaseException) -> bool:
  # A TimeoutError may mean that a worker was too slow, so a retry would not help.
  is_of_network = isinstance(error, ConnectionError | socket.gaierror)
  return is_of_network or getattr(error, 'errno', 0) in _FAILURES


def check_given(flags: Mapping[str, Any], example: str) -> None:
  """Raise InputError if some flags have no value; the message lists them and gives `example`."""
  missing = [name for name, value in flags.items() if not value]
  if missing:
    are = 'is' if len(missing) == 1 else 'are'
    raise InputError(f'{" and ".join(missing)} {are} required, e.g. {example}.')


def check_argument(
  name: str, value: object, kinds: type | tuple[type, ...], requirement: str
) -> None:
  """Raise InputError if an argument has the wrong type; `requirement` says what it must be."""
  if not isinstance(value, kinds):
    raise InputError(f'{name}={reprlib.repr(value)}: this must be {requirement}.')


def counted(count: int, noun: str) -> str:
  """Format a count with its noun, plural unless the count is 1: '1 row', '1,200 rows'."""
  return f'{count:,} {noun}{"s" * (count != 1)}'
