"""Rows of steps in files: written in the background, dropped where a resumed run repeats them."""

import math
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import record_writer, step_records


def rows_of(step, value=0.0):
  """Two responses, with their tokens, and a question of a step."""
  responses = {
    'step': [step] * 2,
    'question': [7, 7],
    'group': [0, 0],
    'sample': [0, 1],
    'is_replay': [False, True],
    'reward': [value, 1.0],
    'components': [[('correctness', value)], None],
    'outcome': ['crashed', 'correct'],
    'reason': ['ValueError: no number', None],
    'answer': ['x = \ufffd', None],
    'length': [3, 4],
    'truncated': [False, False],
    'entropy': [0.5, 0.25],
    'probability': [0.5, 0.25],
    'advantage': [-0.5, 0.5],
    'policy_step': [step, 1],
    'has_code_block': [True, False],
    'valid_steps': [None, True],
    'candidate_entropies': [None, [0.25, 0.5]],
    'ratio_mean': [None, 1.0],
    'ratio_max': [None, 2.0],
    'ratio_variance': [None, 0.25],
    'shaped_mean': [None, 0.5],
    'shaped_variance': [None, 0.125],
    'times_replayed': [None, 3],
  }
  questions = {
    'step': [step],
    'question': [7],
    'group': [0],
    'text': ['1+1'],
    'answer': ['2'],
    'is_replay': [True],
    'correctness': [0.5],
    'bucket_before': [None],
    'bucket_after': [1],
    'retired_step': [None],
  }
  tokens = {
    'step': [step] * 2,
    'question': [7, 7],
    'group': [0, 0],
    'sample': [0, 1],
    'tokens': [np.array([5, 6, 1], np.int32), np.array([5, 6, 7, 1], np.int32)],
    'logp': [np.full(3, -0.5, np.float32), np.full(4, value, np.float32)],
    'entropy': [np.full(3, 0.5, np.float32), np.full(4, 0.25, np.float32)],
    'past_logp': [None, np.full(4, -0.75, np.float32)],
  }
  return {'responses': responses, 'questions': questions, 'tokens': tokens}


def write(workdir, first, last, every=4, value=0.0):
  with record_writer.Writer(workdir, first, every) as writer:
    for step in range(max(1, first), last + 1):
      writer.add(step, rows_of(step, value))


def recorded_tokens(workdir):
  """All rows of tokens."""
  paths = step_records.files(workdir, 'tokens')
  return [row for path in paths for row in step_records.read_file(path, 'tokens').to_pylist()]


def steps(workdir):
  """The steps recorded, and the reward of the first response of each."""
  responses, questions = step_records.read(workdir)
  assert responses['step'].to_pylist()[::2] == questions['step'].to_pylist()
  # By steps where files overlap, as those of another size may.
  assert responses['step'].to_pylist() == sorted(row['step'] for row in recorded_tokens(workdir))
  return dict(zip(questions['step'].to_pylist(), responses['reward'].to_pylist()[::2]))


def content(workdir):
  return {path.name: path.read_bytes() for path in (workdir / 'records').iterdir()}


def test_what_is_written_is_read_back(tmp_path):
  write(tmp_path, 0, 2)
  responses, questions = step_records.read(tmp_path)
  of_step = rows_of(2)
  assert responses.slice(2).to_pydict() == of_step['responses']
  assert questions.slice(1).to_pydict() == of_step['questions']
  assert recorded_tokens(tmp_path)[2:] == [
    {
      name: value if name in ('step', 'question', 'group', 'sample') else listed(value)
      for name, value in zip(of_step['tokens'], row)
    }
    for row in zip(*of_step['tokens'].values())
  ]


def listed(values):
  return None if values is None else values.tolist()


def test_values_that_are_not_finite_are_kept(tmp_path):
  rows = rows_of(1)
  rows['tokens']['entropy'] = [np.array([math.nan, math.inf, -math.inf], np.float32)] * 2
  with record_writer.Writer(tmp_path, 0, 4) as writer:
    writer.add(1, rows)
  (first, _) = recorded_tokens(tmp_path)
  np.testing.assert_array_equal(first['entropy'], [math.nan, math.inf, -math.inf])


def test_where_no_tokens_are_recorded_there_is_no_file_of_them(tmp_path):
  rows = rows_of(1)
  rows['tokens'] = {name: [] for name in rows['tokens']}
  with record_writer.Writer(tmp_path, 0, 4) as writer:
    writer.add(1, rows)
  assert sorted(content(tmp_path)) == ['questions_000001.parquet', 'responses_000001.parquet']
  assert step_records.files(tmp_path, 'tokens') == []


LATER = {
  'responses': ('components', 'reason', 'ratio_variance'),
  'questions': ('text', 'answer'),
}  # columns that earlier versions did not write


def without(path, columns):
  """Writes the file anew, without some columns."""
  name = path.name.partition('_')[0]
  table = step_records.read_file(path, name)
  step_records.write_file(path, table.drop_columns(list(columns)))


def test_a_run_of_an_earlier_version_is_read_and_resumed(tmp_path):
  write(tmp_path / 'new', 0, 6)
  write(tmp_path / 'old', 0, 6)
  for name, columns in LATER.items():
    for path in step_records.files(tmp_path / 'old', name):
      without(path, columns)
  for path in step_records.files(tmp_path / 'old', 'tokens'):
    path.unlink()
  for name, columns in LATER.items():
    old, new = (getattr(step_records.read(tmp_path / run), name) for run in ('old', 'new'))
    assert old.schema == new.schema
    assert old.drop_columns(list(columns)).equals(new.drop_columns(list(columns)))
    assert [old[column].null_count for column in columns] == [old.num_rows] * len(columns)
  assert recorded_tokens(tmp_path / 'old') == []
  write(tmp_path / 'old', 6, 7)
  responses, questions = step_records.read(tmp_path / 'old')
  assert questions['text'].to_pylist() == [None] * 5 + ['1+1'] * 2
  assert responses['ratio_variance'].to_pylist()[-4:] == [None, 0.25] * 2
  assert {row['step'] for row in recorded_tokens(tmp_path / 'old')} == {6, 7}


@pytest.mark.parametrize(
  ('name', 'column'), [('responses', 'reward'), ('questions', 'correctness'), ('tokens', 'logp')]
)
def test_a_file_that_lacks_what_every_version_writes_is_refused(tmp_path, name, column):
  write(tmp_path, 0, 1)
  (path,) = step_records.files(tmp_path, name)
  without(path, [column])
  with pytest.raises(InputError, match=f'cannot be read as {name} of a run'):
    step_records.read_file(path, name)


def test_a_column_that_no_version_knows_is_refused(tmp_path):
  write(tmp_path, 0, 1)
  (path,) = step_records.files(tmp_path, 'questions')
  table = step_records.read_file(path, 'questions')
  step_records.write_file(path, table.append_column('mood', pa.array(['good'])))
  with pytest.raises(InputError, match='cannot be read as questions of a run'):
    step_records.read_file(path, 'questions')


def test_without_a_file_there_are_no_rows(tmp_path):
  responses, questions = step_records.read(tmp_path)
  assert responses.num_rows == questions.num_rows == 0
  assert responses.schema == step_records.RESPONSES
  assert responses['entropy'].to_numpy().tolist() == []


def test_a_file_holds_the_steps_of_a_window(tmp_path):
  write(tmp_path, 0, 9)
  assert sorted(content(tmp_path)) == [
    f'{name}_{first:06d}.parquet'
    for name in ('questions', 'responses', 'tokens')
    for first in (1, 5, 9)
  ]


@pytest.mark.parametrize('stopped', [2, 4, 5, 8])
def test_a_run_that_is_resumed_leaves_the_files_of_one_that_was_not(tmp_path, stopped):
  write(tmp_path / 'once', 0, 9)
  write(tmp_path / 'twice', 0, stopped)
  write(tmp_path / 'twice', stopped + 1, 9)
  assert content(tmp_path / 'twice') == content(tmp_path / 'once')


@pytest.mark.parametrize('first', [0, 1, 3, 5, 6])
def test_a_resumed_run_drops_the_rows_of_steps_that_it_repeats(tmp_path, first):
  write(tmp_path, 0, 7)
  write(tmp_path, first, 8, value=0.5)
  assert steps(tmp_path) == {step: 0.5 * (step >= first) for step in range(1, 9)}


@pytest.mark.parametrize(('before', 'after'), [(2, 8), (8, 2), (3, 5)])
def test_a_resumed_run_may_have_files_of_other_sizes(tmp_path, before, after):
  write(tmp_path, 0, 7, every=before)
  write(tmp_path, 6, 12, every=after, value=0.5)
  assert steps(tmp_path) == {step: 0.5 * (step >= 6) for step in range(1, 13)}


def test_what_has_been_flushed_outlives_a_kill(tmp_path):
  code = """
import sys, os, signal
from exgrpo_jax.reporting import record_writer
from tests.reporting.test_record_writer import rows_of
writer = record_writer.Writer(sys.argv[1], 0, 4)
for step in range(1, 7):
  writer.add(step, rows_of(step))
writer.flush()
writer.add(7, rows_of(7))
os.kill(os.getpid(), signal.SIGKILL)
"""
  process = subprocess.run([sys.executable, '-c', code, str(tmp_path)])
  assert process.returncode == -signal.SIGKILL
  assert set(steps(tmp_path)) == set(range(1, 7))
  (tmp_path / 'records' / 'responses_000005.parquet.tmp').write_text('cut')  # by another kill
  write(tmp_path, 6, 9)
  write(tmp_path / 'once', 0, 9)
  assert content(tmp_path) == content(tmp_path / 'once')


def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space left'):
    write(tmp_path, 0, 1)


def test_an_error_of_the_thread_does_not_hide_what_ends_the_run(tmp_path):
  def fail():
    with record_writer.Writer(tmp_path, 0, 4) as writer:
      writer.add(1, {'responses': {}})  # no such table can be made
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    fail()


def test_a_damaged_file_is_named(tmp_path):
  write(tmp_path, 0, 1)
  path = tmp_path / 'records' / 'questions_000001.parquet'
  path.write_bytes(path.read_bytes()[:50])
  for use in (step_records.read, lambda workdir: write(workdir, 2, 2)):
    with pytest.raises(InputError, match=r'questions_000001\.parquet cannot be read as questions'):
      use(tmp_path)
