"""The invented run is whole: its files are read as a run's, and fit together."""

import dataclasses
import json
import pathlib

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.data import tokenizer
from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.performance.synthetic import run_folder
from exgrpo_jax.reporting import records, step_records
from tests.performance.shapes import SMALL_RUN

SIZE = dataclasses.replace(SMALL_RUN, steps=12, evaluate_every=5)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('invented')
  run_folder.write(folder, SIZE)
  return folder


@pytest.fixture(scope='module')
def tables(workdir):
  """Tables of responses, questions and tokens."""
  tokens = [
    step_records.read_file(path, 'tokens') for path in step_records.files(workdir, 'tokens')
  ]
  return *step_records.read(workdir), pa.concat_tables(tokens)


def test_every_step_has_its_questions_and_half_are_replayed_after_the_start(tables):
  responses, questions, _ = tables
  assert questions['step'].to_pylist() == np.repeat(np.arange(1, 13), 8).tolist()
  by_step = questions['is_replay'].to_numpy(zero_copy_only=False).reshape(12, 8).sum(1)
  assert by_step.tolist() == [0] * 5 + [4] * 7
  assert responses.num_rows == 12 * 8 * 4


def test_responses_and_questions_tell_the_same_story(tables):
  responses, questions, _ = tables
  rewards = responses['reward'].to_numpy().reshape(-1, 4)
  correctness = questions['correctness'].to_numpy()
  assert (rewards.mean(1) == correctness).all()
  replays = questions['is_replay'].to_numpy(zero_copy_only=False)
  is_replay = responses['is_replay'].to_numpy(zero_copy_only=False).reshape(-1, 4)
  assert (is_replay == replays[:, None] * [0, 0, 0, 1]).all()
  assert (rewards[is_replay] == 1).all()
  written = responses['policy_step'].to_numpy().reshape(-1, 4)[is_replay]
  assert written.min() >= 1 and (written < questions['step'].to_numpy()[replays]).all()
  retired = np.asarray(questions['retired_step'].is_valid())
  assert (retired == (correctness == 1)).all()
  after = questions['bucket_after'].to_pylist()
  assert all((bucket is None) == (share in (0, 1)) for bucket, share in zip(after, correctness))


def test_recorded_tokens_are_those_of_responses(tables, workdir):
  responses, _, tokens = tables
  keys = ('step', 'question', 'group', 'sample')
  length = dict(
    zip(zip(*(responses[k].to_pylist() for k in keys)), responses['length'].to_pylist())
  )
  is_replay = dict(zip(length, responses['is_replay'].to_pylist()))
  rows = tokens.to_pylist()
  assert len(rows) == 12 * 2 * 4
  opened = tokenizer.load(workdir / 'tokenizer')
  for row in rows:
    key = tuple(row[name] for name in keys)
    assert {len(row[name]) for name in ('tokens', 'logp', 'entropy')} == {length[key]}
    assert (row['past_logp'] is not None) == is_replay[key]
    assert (row['tokens'][-1] in opened.eos_ids) == (length[key] < SIZE.longest)
    assert max(row['logp']) <= 0 <= min(row['entropy'])


def test_metrics_have_the_names_that_a_run_writes(workdir, recorded):
  of_invented = set().union(*records.read(workdir))
  of_run = set().union(*records.read(recorded.workdir))
  own = ('eval/', 'validation/', 'parity/', 'time/', 'alignment/', 'memory/', 'valid_steps/')
  missing = {name for name in of_run - of_invented if not name.startswith(own)}
  assert missing == set()


def test_evaluations_are_those_of_the_paper_in_small(workdir):
  files = sorted((workdir / 'evaluation').iterdir())
  steps = [0, 5, 10, 12]
  assert [path.name[:11] for path in files[::2]] == [f'step_{step:06d}' for step in steps]
  lines = [json.loads(line) for line in files[0].read_text().splitlines()]
  assert [line['row'] for line in lines] == list(range(5))


def test_the_buffer_has_questions_that_were_visited(workdir, tables):
  (step,) = checkpoint.steps(str(workdir))
  buffer = buffer_files.read(checkpoint.buffer_folder(str(workdir), step))
  assert len(buffer.entries) == 10
  assert set(buffer.entries) <= set(tables[1]['question'].to_pylist())


def test_the_same_run_comes_out_each_time(workdir, tmp_path):
  run_folder.write(tmp_path, SIZE)
  for name in ('metrics.jsonl', 'console.log', 'records/responses_000001.parquet'):
    assert (tmp_path / name).read_bytes() == pathlib.Path(workdir, name).read_bytes()
