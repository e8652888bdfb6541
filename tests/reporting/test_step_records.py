"""The files of records/: written in the background, resumed, and read from older versions too."""

import collections
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records
from tests.helpers import tiny

VALUES = {  # column type -> values
  pa.int32(): 7,
  pa.bool_(): True,
  pa.string(): 'x = \ufffd',
  pa.float32(): 0.25,
  pa.float64(): 0.5,
  pa.list_(pa.int32()): np.array([5, 6, 1], np.int32),
  pa.list_(pa.float32()): np.array([0.25, -np.inf, 0.5], np.float32),
  pa.map_(pa.string(), pa.float64()): [('correctness', 1.0)],
  step_records.TOKENS.field('turns').type: [{'written': 2, 'observed': 1, 'reward': 0.5}],
}


def rows_of(step, value=0.0):
  """Two rows of each table; in the second, all nullable columns are null."""
  rows = {
    name: {
      field.name: [VALUES[field.type], None if field.nullable else VALUES[field.type]]
      for field in schema
    }
    for name, schema in step_records.SCHEMAS.items()
  }
  for columns in rows.values():
    columns['step'] = [step] * 2
  rows['responses']['reward'] = [value, 1.0]
  return rows


def write(workdir, first, last, every=4, value=0.0):
  with step_records.Writer(workdir, first, every) as writer:
    for step in range(max(1, first), last + 1):
      writer.add(step, rows_of(step, value))


def steps(workdir):
  """The steps recorded, and the reward of the first response of each."""
  responses, questions = step_records.read(workdir)
  assert responses['step'].to_pylist() == questions['step'].to_pylist()
  # In step order even if files overlap, as files with different numbers of steps may.
  assert responses['step'].to_pylist() == sorted(row['step'] for row in tiny.token_rows(workdir))
  assert set(collections.Counter(responses['step'].to_pylist()).values()) == {2}
  return dict(zip(questions['step'].to_pylist()[::2], responses['reward'].to_pylist()[::2]))


def content(workdir):
  return {path.name: path.read_bytes() for path in (workdir / 'records').iterdir()}


def test_without_recorded_tokens_there_is_no_tokens_file(tmp_path):
  rows = rows_of(1)
  rows['tokens'] = {name: [] for name in rows['tokens']}
  with step_records.Writer(tmp_path, 0, 4) as writer:
    writer.add(1, rows)
  assert sorted(content(tmp_path)) == ['questions_000001.parquet', 'responses_000001.parquet']
  assert step_records.files(tmp_path, 'tokens') == []


def test_a_file_holds_the_steps_of_a_window(tmp_path):
  write(tmp_path, 0, 9)
  assert sorted(content(tmp_path)) == [
    f'{name}_{first:06d}.parquet'
    for name in ('questions', 'responses', 'tokens')
    for first in (1, 5, 9)
  ]


@pytest.mark.parametrize('stopped', [2, 4, 5, 8])
def test_a_resumed_run_leaves_the_same_files_as_an_uninterrupted_run(tmp_path, stopped):
  write(tmp_path / 'once', 0, 9)
  write(tmp_path / 'twice', 0, stopped)
  write(tmp_path / 'twice', stopped + 1, 9)
  assert content(tmp_path / 'twice') == content(tmp_path / 'once')


@pytest.mark.parametrize(
  ('first', 'before', 'after'),
  [(0, 4, 4), (1, 4, 4), (3, 4, 4), (5, 4, 4), (6, 4, 4), (6, 2, 8), (6, 8, 2), (6, 3, 5)],
)
def test_a_resumed_run_drops_the_rows_of_steps_that_it_repeats(tmp_path, first, before, after):
  """Its files may have other sizes."""
  write(tmp_path, 0, 7, every=before)
  write(tmp_path, first, 12, every=after, value=0.5)
  assert steps(tmp_path) == {step: 0.5 * (step >= first) for step in range(1, 13)}


def test_a_resumed_run_reads_only_the_steps_of_finished_files(tmp_path, monkeypatch):
  """The token tables of a long run have gigabytes."""
  write(tmp_path, 0, 8)
  read, columns = step_records.read_file, []

  def recorded(path, name, chosen=None):
    columns.append(chosen)
    return read(path, name, chosen)

  monkeypatch.setattr(step_records, 'read_file', recorded)
  write(tmp_path, 9, 8)
  assert columns == [['step']] * 6
  monkeypatch.undo()
  assert list(steps(tmp_path)) == list(range(1, 9))


@pytest.mark.full
def test_flushed_rows_survive_a_kill(tmp_path):
  code = """
import sys, os, signal
from exgrpo_jax.reporting import step_records
from tests.reporting.test_step_records import rows_of
writer = step_records.Writer(sys.argv[1], 0, 4)
for step in range(1, 7):
  writer.add(step, rows_of(step))
writer.flush()
writer.add(7, rows_of(7))
os.kill(os.getpid(), signal.SIGKILL)
"""
  process = subprocess.run([sys.executable, '-c', code, str(tmp_path)])
  assert process.returncode == -signal.SIGKILL
  assert set(steps(tmp_path)) == set(range(1, 7))
  (tmp_path / 'records' / 'responses_000005.parquet.new').write_text('cut')  # by another kill
  write(tmp_path, 6, 9)
  write(tmp_path / 'once', 0, 9)
  assert content(tmp_path) == content(tmp_path / 'once')


def test_an_error_in_the_thread_is_raised_by_the_next_call(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space left'):
    write(tmp_path, 0, 1)


def test_an_error_in_the_thread_does_not_hide_the_error_that_ends_the_run(tmp_path):
  def fail():
    with step_records.Writer(tmp_path, 0, 4) as writer:
      writer.add(1, {'responses': {}})  # no such table can be made
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    fail()


# ---- Read back ----


LATER = {  # columns that earlier versions did not write
  'responses': ('components', 'reason', 'ratio_variance'),
  'questions': ('text', 'answer'),
}


def test_rows_are_read_back_as_written(tmp_path):
  write(tmp_path, 0, 2)
  responses, questions = step_records.read(tmp_path)
  of_step = rows_of(2)
  for name, table in (('responses', responses), ('questions', questions)):
    expected = pa.table(of_step[name], schema=step_records.SCHEMAS[name])
    assert table.slice(2).to_pylist() == expected.to_pylist()
  for row, expected in zip(tiny.token_rows(tmp_path)[2:], zip(*of_step['tokens'].values())):
    for found, value in zip(row.values(), expected, strict=True):
      np.testing.assert_array_equal(found, value)


def test_without_a_file_there_are_no_rows(tmp_path):
  responses, questions = step_records.read(tmp_path)
  assert responses.num_rows == questions.num_rows == 0
  assert responses.schema == step_records.RESPONSES
  assert responses['entropy'].to_numpy().tolist() == []


def rewrite(workdir, name, change):
  """Write the files of a table again, changed."""
  for path in step_records.files(workdir, name):
    step_records.write_file(path, change(step_records.read_file(path, name)))


def test_a_run_of_an_earlier_version_is_read_and_resumed(tmp_path):
  write(tmp_path / 'new', 0, 6)
  write(tmp_path / 'old', 0, 6)
  for name, columns in LATER.items():
    rewrite(tmp_path / 'old', name, lambda table, gone=list(columns): table.drop_columns(gone))
  for path in step_records.files(tmp_path / 'old', 'tokens'):
    path.unlink()
  for name, columns in LATER.items():
    old, new = (getattr(step_records.read(tmp_path / run), name) for run in ('old', 'new'))
    assert old.schema == new.schema
    assert old.drop_columns(list(columns)).equals(new.drop_columns(list(columns)))
    assert [old[column].null_count for column in columns] == [old.num_rows] * len(columns)
  write(tmp_path / 'old', 6, 7)
  _, questions = step_records.read(tmp_path / 'old')
  assert questions['text'].is_valid().to_pylist() == [False] * 10 + [True, False] * 2
  assert {row['step'] for row in tiny.token_rows(tmp_path / 'old')} == {6, 7}


@pytest.mark.parametrize(
  ('name', 'change'),
  [
    ('responses', lambda table: table.drop_columns(['reward'])),
    ('tokens', lambda table: table.drop_columns(['logp'])),
    ('questions', lambda table: table.append_column('mood', pa.array(['good'] * 2))),
  ],
  ids=['lacks_a_column', 'lacks_values', 'unknown_column'],
)
def test_a_file_that_no_version_wrote_is_refused(tmp_path, name, change):
  write(tmp_path, 0, 1)
  rewrite(tmp_path, name, change)
  with pytest.raises(InputError, match=f'cannot be read as a run.s {name}'):
    step_records.read_file(step_records.files(tmp_path, name)[0], name)


def test_a_damaged_file_is_named(tmp_path):
  write(tmp_path, 0, 1)
  path = tmp_path / 'records' / 'questions_000001.parquet'
  path.write_bytes(path.read_bytes()[:50])
  for use in (step_records.read, lambda workdir: write(workdir, 2, 2)):
    with pytest.raises(InputError, match=r'000001\.parquet: this file cannot be read as a run.s q'):
      use(tmp_path)
