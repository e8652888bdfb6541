"""Rows of steps in files: written in the background, dropped where a resumed run repeats them."""

import os
import signal
import subprocess
import sys

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import record_writer, step_records


def rows_of(step, value=0.0):
  """Two responses and a question of a step."""
  responses = {
    'step': [step] * 2,
    'question': [7, 7],
    'group': [0, 0],
    'sample': [0, 1],
    'is_replay': [False, True],
    'reward': [value, 1.0],
    'outcome': ['wrong', 'correct'],
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
    'shaped_mean': [None, 0.5],
    'shaped_variance': [None, 0.125],
    'times_replayed': [None, 3],
  }
  questions = {
    'step': [step],
    'question': [7],
    'group': [0],
    'is_replay': [True],
    'correctness': [0.5],
    'bucket_before': [None],
    'bucket_after': [1],
    'retired_step': [None],
  }
  return {'responses': responses, 'questions': questions}


def write(workdir, first, last, every=4, value=0.0):
  with record_writer.Writer(workdir, first, every) as writer:
    for step in range(max(1, first), last + 1):
      writer.add(step, rows_of(step, value))


def steps(workdir):
  """The steps recorded, and the reward of the first response of each."""
  responses, questions = step_records.read(workdir)
  assert responses['step'].to_pylist()[::2] == questions['step'].to_pylist()
  return dict(zip(questions['step'].to_pylist(), responses['reward'].to_pylist()[::2]))


def content(workdir):
  return {path.name: path.read_bytes() for path in (workdir / 'records').iterdir()}


def test_what_is_written_is_read_back(tmp_path):
  write(tmp_path, 0, 2)
  responses, questions = step_records.read(tmp_path)
  of_step = rows_of(2)
  assert responses.slice(2).to_pydict() == of_step['responses']
  assert questions.slice(1).to_pydict() == of_step['questions']


def test_without_a_file_there_are_no_rows(tmp_path):
  responses, questions = step_records.read(tmp_path)
  assert responses.num_rows == questions.num_rows == 0
  assert responses.schema == step_records.RESPONSES
  assert responses['entropy'].to_numpy().tolist() == []


def test_a_file_holds_the_steps_of_a_window(tmp_path):
  write(tmp_path, 0, 9)
  assert sorted(content(tmp_path)) == [
    f'{name}_{first:06d}.parquet' for name in ('questions', 'responses') for first in (1, 5, 9)
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
