"""What a run says about the disk that it writes to: its space, and that it is full or fails."""

import errno
import os
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from absl import logging

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import checkpoint, disk
from exgrpo_jax.learner.optimizer import TrainState


@pytest.fixture
def workdir(tmp_path, monkeypatch):
  """One with complete checkpoints of steps 2 and 5; what a failure leaves installed is removed."""
  log = logging.get_absl_handler()
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  monkeypatch.setattr(log, 'filters', list(log.filters))
  for step in (2, 5):
    (tmp_path / 'checkpoints' / str(step)).mkdir(parents=True)
  return str(tmp_path)


def os_error(number):
  return OSError(number, os.strerror(number))


def behind(error):
  """An error that was raised while the system error was handled."""
  wrapped = RuntimeError('the writer is closed')
  wrapped.__context__ = error
  return wrapped


@pytest.mark.parametrize(
  ('error', 'what'),
  [
    (os_error(errno.ENOSPC), 'is full'),
    (os_error(errno.EDQUOT), 'is full'),
    (os_error(errno.EFBIG), 'is full'),
    (ValueError('RESOURCE_EXHAUSTED: Error writing file\nNo space left on device [28]'), 'is full'),
    (os_error(errno.EIO), 'fails'),
    (os_error(errno.EROFS), 'fails'),
    (ValueError(f'INTERNAL: {"x" * 1000}: Input/output error [5]'), 'fails'),
    (behind(os_error(errno.EIO)), 'fails'),
  ],
)
def test_a_full_or_failing_disk_is_reported_with_the_complete_checkpoints(workdir, error, what):
  message = rf'the disk {what} \(.{{1,300}}\)\. Complete checkpoints: 2, 5\.'
  with pytest.raises(InputError, match=message), disk.explain_failure(workdir):
    raise error


@pytest.mark.parametrize(
  'error', [ValueError('another error'), InputError('data.jsonl: No space left in the cache')]
)
def test_other_errors_are_not_taken_for_a_failing_disk(workdir, error):
  before = sys.unraisablehook
  with pytest.raises(type(error)) as raised, disk.explain_failure(workdir):
    raise error
  assert raised.value is error and sys.unraisablehook is before


def test_what_threads_log_of_a_failing_disk_is_left_out(workdir, capsys):
  """The error itself says it, in one line."""

  def is_logged(error):
    record = logging.get_absl_logger().makeRecord(
      'absl', logging.ERROR, __file__, 1, 'a thread', (), (type(error), error, None)
    )
    return bool(logging.get_absl_handler().filter(record))

  closed = types.SimpleNamespace(exc_value=RuntimeError('Event loop is closed'))
  with disk.explain_failure(workdir):
    assert not is_logged(os_error(errno.ENOSPC)) and is_logged(ValueError('another error'))
    sys.unraisablehook(closed)
  assert capsys.readouterr().err == '' and is_logged(os_error(errno.ENOSPC))


def test_space_for_a_checkpoint_is_printed_and_too_little_is_refused(tmp_path, monkeypatch, capsys):
  state = TrainState({'a': jnp.ones((2, 3))}, {})
  disk.check_space(str(tmp_path), state)
  printed = capsys.readouterr().out
  assert re.match(r'a checkpoint takes 24 bytes; .* has [\d.]+ [kMGT]B left\n', printed)
  usage = types.SimpleNamespace(free=24)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
  disk.check_space(str(tmp_path), checkpoint.abstract(jax.device_put(state)))
  usage.free = 23
  with pytest.raises(InputError, match='has 23 bytes left, and a checkpoint takes 24 bytes'):
    disk.check_space(str(tmp_path), state)
