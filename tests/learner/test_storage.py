"""A store that fails is told from content that is damaged."""

import errno
import os

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import storage

_OPENING = 'Error opening "zarr" driver: Error reading local file "/run/state/manifest.ocdbt": '


def os_error(number):
  return OSError(number, os.strerror(number))


def caused_by(error):
  """An error the way orbax reports those of tensorstore."""
  wrapped = Exception('Encountered error while reading array index')
  wrapped.__cause__ = error
  return wrapped


FAILURES = [
  os_error(errno.EIO),
  os_error(errno.EACCES),
  os_error(errno.ESTALE),
  TimeoutError(),
  ConnectionResetError('reset'),
  ValueError(f"UNKNOWN: {_OPENING}Input/output error [os_error_code='5']"),
  ValueError(f"PERMISSION_DENIED: {_OPENING}Permission denied [os_error_code='13']"),
  ValueError(f'DEADLINE_EXCEEDED: {_OPENING}Connection timed out [tensorstore_spec=...'),
  ValueError(f'UNAVAILABLE: {_OPENING}503'),
  caused_by(ValueError(f"UNKNOWN: {_OPENING}Input/output error [os_error_code='5']")),
]
DAMAGE = [
  os_error(errno.ENOENT),
  os_error(errno.ENOTDIR),
  EOFError(),
  ValueError(f"NOT_FOUND: {_OPENING}No such file [os_error_code='2']"),
  ValueError(f'DATA_LOSS: {_OPENING}CRC-32C checksum verification failed'),
  ValueError(f'FAILED_PRECONDITION: {_OPENING}corrupt'),
  caused_by(ValueError('OUT_OF_RANGE: Requested byte range [0, 99)')),
  KeyError('cursor'),
]


@pytest.mark.parametrize('error', FAILURES + DAMAGE, ids=repr)
def test_what_a_store_reports_is_its_failure_and_missing_or_wrong_content_is_not(error):
  assert bool(storage.store_failure(error)) == (error in FAILURES)


def test_only_failures_of_the_store_are_tried_again(monkeypatch, capsys):
  calls = []

  def read(error):
    calls.append(error)
    raise error

  monkeypatch.setattr(storage, 'WAITS', (0.0, 0.0))
  with pytest.raises(InputError, match=r'^/run cannot be read \(\[Errno 5\] .*\), not in 3 att'):
    storage.patiently(lambda: read(os_error(errno.EIO)), '/run')
  assert len(calls) == 3 and capsys.readouterr().err.count('WARNING: /run cannot be read') == 2
  with pytest.raises(KeyError):
    storage.patiently(lambda: read(KeyError('cursor')), '/run')
  assert len(calls) == 4
