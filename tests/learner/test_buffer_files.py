"""A buffer is restored exactly from its files, and data that is already stored is linked."""

import dataclasses
import errno
import os
import tracemalloc

import numpy as np
import pytest
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.datatypes import PartialGroup, Response, Span, Trajectory, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import buffer_files, checkpoint, storage
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE
from tests.helpers import buffers
from tests.helpers.buffers import BUFFERS, assert_same, entry, trajectory


@pytest.fixture
def write(tmp_path):
  """Return a function that writes a step's buffer, given the previous checkpoint's folder."""

  def write_after(step, buffer, previous=None):
    folder = epath.Path(tmp_path) / str(step)
    folder.mkdir()
    buffer_files.write(folder, step, buffer, previous)
    assert_same(buffer_files.read(folder), buffer)
    return folder

  return write_after


def segments(folder):
  """Return the size of each segment in bytes, by name."""
  return {path.name: path.stat().length for path in sorted(folder.glob('segment_*'))}


def of_rows(*rows, tokens=10):
  """Make a buffer with one trajectory per row, generated in the step with the same number."""
  return Buffer(
    entries={row: entry(0.5, 3, trajectory(*[row] * tokens, step=row)) for row in rows},
    started=True,
  )


@pytest.mark.parametrize('buffer', BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_is_restored_exactly(buffer, write):
  write(1, buffer)


def test_every_field_of_a_trajectory_is_stored(write):
  """A field of another type than float, int or bool would get its default in a resumed run."""
  with np.load(write(1, of_rows(0)) / 'index.npz') as columns:
    fields = {field.name for field in dataclasses.fields(Trajectory)}
    assert fields - {*columns} == {'tokens', 'logp'}  # in segments


def test_a_segment_is_linked_while_half_of_it_is_in_the_buffer(write):
  first = write(1, of_rows(1, 2, 3, 4))
  second = write(2, of_rows(3, 4, 5), first)
  assert segments(second) == {'segment_000001': 320, 'segment_000002': 80}
  assert (first / 'segment_000001').stat().length == 320
  assert os.path.samefile(first / 'segment_000001', second / 'segment_000001')
  third = write(3, of_rows(4, 5, 6), second)
  assert segments(third) == {'segment_000002': 80, 'segment_000003': 160}


def test_a_checkpoint_is_independent_of_earlier_ones(write):
  first = write(1, of_rows(1, 2))
  second = write(2, of_rows(1, 2, 3), first)
  first.rmtree()
  assert_same(buffer_files.read(second), of_rows(1, 2, 3))


def test_too_many_segments_are_merged(write, monkeypatch):
  monkeypatch.setattr(buffer_files, 'MAX_SEGMENTS', 4)
  previous, counts = None, []
  for step in range(1, 12):
    previous = write(step, of_rows(*range(1, step + 1)), previous)
    counts.append(len(segments(previous)))
  assert counts == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]


def test_without_hard_links_everything_is_written(write, monkeypatch):
  def refuse(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, 'link', refuse)
  first = write(1, of_rows(1, 2))
  assert segments(write(2, of_rows(1, 2, 3), first)) == {'segment_000002': 240}


def test_if_the_previous_checkpoint_is_unreadable_everything_is_written(write):
  first = write(1, of_rows(1, 2))
  (first / 'index.npz').write_bytes(b'')
  assert segments(write(2, of_rows(1, 2, 3), first)) == {'segment_000002': 240}


def test_a_changed_trajectory_is_written_again_unless_only_its_replay_count_changed(write):
  """A trajectory may differ after a resumed run repeats a step on another machine."""
  before = of_rows(1)
  (stored,) = before.entries[1].trajectories
  others = {
    'segment_000001': dataclasses.replace(stored, times_replayed=5),
    'segment_000002': dataclasses.replace(
      stored, logp=np.nextafter(stored.logp, np.float32(1), dtype=np.float32)
    ),
  }
  folder = write(1, before)
  for step, (name, other) in enumerate(others.items(), 2):
    after = dataclasses.replace(before.entries[1], trajectories=(other,))
    written = write(step, dataclasses.replace(before, entries={1: after}), folder)
    assert list(segments(written)) == [name.replace('2', str(step))]


@pytest.mark.parametrize('place', [0, 79, 80, 159, None])
def test_a_flipped_bit_or_a_missing_byte_is_detected(place, write):
  folder = write(1, of_rows(1, 2))
  content = bytearray((folder / 'segment_000001').read_bytes())
  if place is None:
    content.pop()
  else:
    content[place] ^= 16
  (folder / 'segment_000001').write_bytes(content)
  with pytest.raises(ValueError, match='segment_000001: the data differs from what was saved'):
    buffer_files.read(folder)


def test_fields_missing_in_earlier_versions_get_their_defaults(write, monkeypatch):
  describe = buffer_files._build_columns

  def of_earlier(*args):
    later = ('times_replayed', 'correct', 'truncated', 'turns', 'routes')
    return {name: column for name, column in describe(*args).items() if name not in later}

  monkeypatch.setattr(buffer_files, '_build_columns', of_earlier)
  write(1, of_rows(1, 2))  # also reads the buffer back


def test_writing_and_reading_need_little_memory_besides_the_buffer(write):
  buffer = of_rows(*range(1000), tokens=1500)
  size = 1000 * 1500 * 8
  tracemalloc.start()
  folder = epath.Path(write(1, Buffer()))
  tracemalloc.reset_peak()
  before = tracemalloc.get_traced_memory()[0]
  buffer_files.write(folder, 1, buffer, None)
  assert tracemalloc.get_traced_memory()[1] - before < 0.1 * size
  restored = buffer_files.read(folder)
  assert tracemalloc.get_traced_memory()[1] - before < 1.1 * size
  tracemalloc.stop()
  assert_same(restored, buffer)


# ---- Partial groups are restored exactly, or refused ----


def response(length, **values):
  logp, entropy = np.random.default_rng(length).normal(size=(2, length)).astype(np.float32)
  return Response(np.arange(length, dtype=np.int32), logp, entropy, truncated=False, **values)


WEIGHT = np.float32([0.5, 1.5])
ROUTES = np.arange(48, dtype=np.uint16).reshape(6, 2, 4) * 300
GROUPS = (
  PartialGroup(
    question_row=70_000,
    drawn=3,
    is_drawn=True,
    responses=(
      response(3, spans=(Span(3, 1), Span(5, 2))),
      response(4, is_complete=False, spans=(Span(4, 4),), routes=ROUTES),
      EMPTY_RESPONSE,
    ),
    verdicts=(Verdict(0.1, 'correct', answer='½', valid_steps=True, components={'match': 0.1}),),
  ),
  PartialGroup(
    question_row=0,
    drawn=4,
    is_drawn=False,
    responses=(
      response(2, tis_weight=WEIGHT, is_complete=False, routes=ROUTES[:2].astype(np.uint8)),
      response(1),
    ),
    verdicts=(Verdict(0.0, 'timed out', reason='1 s'),),
  ),
)


@pytest.mark.parametrize('groups', [GROUPS, ()], ids=['some', 'none'])
def test_groups_are_read_as_they_were_written(groups, tmp_path):
  checkpoint.write_partial(epath.Path(tmp_path), groups)
  found = checkpoint.read_partial(epath.Path(tmp_path))
  assert isinstance(found, tuple) and buffers.described(found) == buffers.described(groups)
  for group in found:
    for one in group.responses:
      assert (one.tokens.dtype, one.logp.dtype, one.entropy.dtype) == (np.int32, *[np.float32] * 2)
      assert all(isinstance(span, Span) for span in one.spans)


@pytest.mark.parametrize('name', ['index.json', 'values.npz'])
def test_one_flipped_bit_in_partial_groups_is_detected(name, tmp_path):
  checkpoint.write_partial(epath.Path(tmp_path), GROUPS)
  content = bytearray((tmp_path / name).read_bytes())
  content[len(content) // 2] ^= 1
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match='carried: the data differs from what was saved'):
    checkpoint.read_partial(epath.Path(tmp_path))


# ---- Failing storage and damaged data ----


_OPENING = 'Error opening "zarr" driver: Error reading local file "/run/state/manifest.ocdbt": '


def os_error(number):
  return OSError(number, os.strerror(number))


def caused_by(error):
  """Wrap an error as orbax wraps tensorstore's errors."""
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
def test_storage_failures_are_distinguished_from_missing_or_damaged_data(error):
  assert bool(storage.store_failure(error)) == (error in FAILURES)


def test_only_storage_failures_are_retried(monkeypatch, capsys):
  calls = []

  def read(error):
    calls.append(error)
    raise error

  monkeypatch.setattr(storage, 'WAITS', (0.0, 0.0))
  with pytest.raises(
    InputError, match=r'^/run could not be read after 3 attempts .*\(\[Errno 5\] '
  ):
    storage.patiently(lambda: read(os_error(errno.EIO)), '/run')
  assert len(calls) == 3 and capsys.readouterr().err.count('WARNING: /run cannot be read') == 2
  with pytest.raises(KeyError):
    storage.patiently(lambda: read(KeyError('cursor')), '/run')
  assert len(calls) == 4
