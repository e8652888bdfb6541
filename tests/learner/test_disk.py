"""What a run says of the disk that it writes to: its space, and that it is full or fails."""

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
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  for step in (2, 5):
    (tmp_path / 'checkpoints' / str(step)).mkdir(parents=True)
  yield str(tmp_path)
  logging.get_absl_handler().removeFilter(disk._is_other_news)


FULL = 'is full', 'Free some space'
FAILING = 'fails', 'Mend it'


@pytest.mark.parametrize(
  ('error', 'message'),
  [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'samples/step_000003.jsonl'), FULL),
    (ValueError('RESOURCE_EXHAUSTED: Error writing file\nNo space left on device [28]'), FULL),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), FULL),
    (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), FULL),
    (OSError(errno.EIO, os.strerror(errno.EIO)), FAILING),
    (ValueError(f'INTERNAL: {"x" * 1000}: Input/output error [5]'), FAILING),
    (OSError(errno.EROFS, os.strerror(errno.EROFS)), FAILING),
  ],
  ids=['full', 'tensorstore', 'quota', 'limit', 'failing', 'tensorstore_failing', 'read_only'],
)
def test_a_full_or_failing_disk_is_reported_with_the_complete_checkpoints(workdir, error, message):
  what, remedy = message
  with (
    pytest.raises(
      InputError, match=rf'the disk {what} \(.{{1,300}}\)\. Complete checkpoints: 2, 5\. {remedy} '
    ),
    disk.explain_failure(workdir),
  ):
    raise error


def test_what_went_wrong_with_the_disk_is_found_behind_another_error(workdir):
  error = RuntimeError('the writer is closed')
  error.__context__ = OSError(errno.EIO, os.strerror(errno.EIO))
  with pytest.raises(InputError, match='Input/output error'), disk.explain_failure(workdir):
    raise error


@pytest.mark.parametrize(
  'error', [ValueError('another error'), InputError('data.jsonl: No space left in the cache')]
)
def test_other_errors_are_not_taken_for_a_failing_disk(workdir, error):
  before = sys.unraisablehook
  with pytest.raises(type(error)) as raised, disk.explain_failure(workdir):
    raise error
  assert raised.value is error
  assert sys.unraisablehook is before


def test_what_threads_log_of_a_failing_disk_is_left_out(workdir, capsys):
  """The error itself says it, in one line."""
  handler = logging.get_absl_handler()

  def log(error):
    record = logging.get_absl_logger().makeRecord(
      'absl', logging.ERROR, __file__, 1, 'a thread', (), (type(error), error, None)
    )
    return bool(handler.filter(record))

  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  closed = types.SimpleNamespace(exc_value=RuntimeError('Event loop is closed'))
  with disk.explain_failure(workdir):
    assert not log(full) and log(ValueError('another error'))
    sys.unraisablehook(closed)
  assert capsys.readouterr().err == ''
  assert log(full)


def make_state(value):
  return TrainState({'a': jnp.full((2, 3), value)}, {})


def test_space_for_a_checkpoint_is_printed_and_too_little_is_refused(tmp_path, monkeypatch, capsys):
  state = make_state(1.0)
  disk.check_space(str(tmp_path), state)
  assert re.match(
    r'a checkpoint takes \d+ bytes; .* has [\d.]+ [kMGT]B left\n', capsys.readouterr().out
  )
  needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  for free in (needed, needed - 1):
    monkeypatch.setattr(shutil, 'disk_usage', lambda _, free=free: types.SimpleNamespace(free=free))
    if free == needed:
      disk.check_space(str(tmp_path), checkpoint.abstract(state))
  with pytest.raises(
    InputError, match=r'has \d+ bytes left, and a checkpoint takes \d+ bytes: free'
  ):
    disk.check_space(str(tmp_path), checkpoint.abstract(state))
