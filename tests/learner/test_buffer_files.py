"""A buffer comes back from its files exactly, and what is stored already is not written again."""

import dataclasses
import errno
import os
import tracemalloc

import numpy as np
import pytest
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.learner import buffer_files
from tests.helpers.buffers import BUFFERS, assert_same, entry, trajectory


@pytest.fixture
def write(tmp_path):
  """A function that writes a buffer after a step, as the checkpoint after that of `previous`."""

  def write_after(step, buffer, previous=None):
    folder = epath.Path(tmp_path) / str(step)
    folder.mkdir()
    buffer_files.write(folder, step, buffer, previous)
    assert_same(buffer_files.read(folder), buffer)
    return folder

  return write_after


def segments(folder):
  """Name -> bytes of each segment."""
  return {path.name: path.stat().length for path in sorted(folder.glob('segment_*'))}


def of_rows(*rows, tokens=10):
  """A buffer that has a trajectory of some tokens for each row, written in the row's step."""
  return Buffer(
    entries={row: entry(0.5, 3, trajectory(*[row] * tokens, step=row)) for row in rows},
    started=True,
  )


@pytest.mark.parametrize('buffer', BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_comes_back_exactly(buffer, write):
  write(1, buffer)


def test_recorded_buffers_come_back_exactly_and_little_is_written_twice(recorded, write):
  previous, known, written = None, set(), 0
  for step, values in recorded.steps.items():
    previous = write(step, values.after, previous)
    written += segments(previous).get(f'segment_{step:06d}', 0)
    known |= {
      (row, stored.step, stored.tokens.tobytes())
      for row, entry in values.after.entries.items()
      for stored in entry.trajectories
    }
  fresh = sum(2 * len(tokens) for _, _, tokens in known)
  assert 0 < fresh <= written < 2 * fresh


def test_a_segment_is_linked_while_half_of_it_is_in_the_buffer(write):
  first = write(1, of_rows(1, 2, 3, 4))
  second = write(2, of_rows(3, 4, 5), first)
  assert segments(second) == {'segment_000001': 320, 'segment_000002': 80}
  assert (first / 'segment_000001').stat().length == 320
  assert os.path.samefile(first / 'segment_000001', second / 'segment_000001')
  third = write(3, of_rows(4, 5, 6), second)
  assert segments(third) == {'segment_000002': 80, 'segment_000003': 160}


def test_a_checkpoint_needs_no_other(write):
  first = write(1, of_rows(1, 2))
  second = write(2, of_rows(1, 2, 3), first)
  first.rmtree()
  assert_same(buffer_files.read(second), of_rows(1, 2, 3))


def test_many_segments_become_one(write, monkeypatch):
  monkeypatch.setattr(buffer_files, 'MAX_SEGMENTS', 4)
  previous, counts = None, []
  for step in range(1, 12):
    previous = write(step, of_rows(*range(1, step + 1)), previous)
    counts.append(len(segments(previous)))
  assert counts == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]


def test_without_hard_links_all_is_written(write, monkeypatch):
  def refuse(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, 'link', refuse)
  first = write(1, of_rows(1, 2))
  assert segments(write(2, of_rows(1, 2, 3), first)) == {'segment_000002': 240}


def test_where_the_checkpoint_before_is_unreadable_all_is_written(write):
  first = write(1, of_rows(1, 2))
  (first / 'index.npz').write_bytes(b'')
  assert segments(write(2, of_rows(1, 2, 3), first)) == {'segment_000002': 240}


def test_a_trajectory_that_differs_is_written_again_unless_by_its_replays_alone(write):
  """It may differ after a resume that repeats a step on another machine."""
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
def test_a_flipped_bit_or_a_missing_one_is_noticed(place, write):
  folder = write(1, of_rows(1, 2))
  content = bytearray((folder / 'segment_000001').read_bytes())
  if place is None:
    content.pop()
  else:
    content[place] ^= 16
  (folder / 'segment_000001').write_bytes(content)
  with pytest.raises(ValueError, match='segment_000001: not the bits that were saved'):
    buffer_files.read(folder)


def test_in_a_checkpoint_that_did_not_count_nothing_was_replayed(write, monkeypatch):
  buffer = of_rows(1, 2)
  describe = buffer_files._describe

  def without_count(*args):
    columns = dict(describe(*args))
    del columns['times_replayed']
    return columns

  monkeypatch.setattr(buffer_files, '_describe', without_count)
  write(1, buffer)  # which reads it back, with counts of 0


def test_writing_and_reading_hold_less_than_a_tenth_of_the_buffer_besides_it(write):
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
