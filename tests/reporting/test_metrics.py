"""What a run records and reads back."""

import json
import math

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics


def write_steps(workdir, first_step, steps, value):
  with metrics.Writer(workdir, first_step) as writer:
    for step in steps:
      writer.write(step, {'reward': value})


@pytest.fixture(autouse=True)
def at_noon(monkeypatch):
  """Every record is written at second 12."""
  monkeypatch.setattr('time.time', lambda: 12.0)


def test_a_step_is_one_line_of_strict_json_that_can_be_read_at_once(tmp_path):
  with metrics.Writer(tmp_path, 0) as writer:
    writer.write(0, {'reward': np.float64(1 / 3), 'entropy': math.nan, 'max': math.inf, 'n': 2})
    (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert line == (
    '{"step": 0, "reward": 0.3333333333333333, "entropy": "nan", "max": "inf", "n": 2.0, '
    '"timestamp": 12.0}'
  )
  (record,) = metrics.read(tmp_path)
  assert record['reward'] == 1 / 3 and math.isnan(record['entropy']) and record['max'] == math.inf


def test_a_resumed_run_drops_the_records_of_steps_that_it_repeats(tmp_path):
  write_steps(tmp_path, 0, range(4), 0.0)
  write_steps(tmp_path, 2, [2], 1.0)
  assert metrics.read(tmp_path) == [
    {'step': 0, 'reward': 0.0, 'timestamp': 12.0},
    {'step': 1, 'reward': 0.0, 'timestamp': 12.0},
    {'step': 2, 'reward': 1.0, 'timestamp': 12.0},
  ]


def test_an_incomplete_last_line_is_dropped(tmp_path):
  write_steps(tmp_path, 0, range(2), 0.0)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "rew')
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1]
  write_steps(tmp_path, 3, [3], 0.0)
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1, 3]


@pytest.mark.parametrize(
  'line', [b'{"reward": 1.0}', b'oops', b'[1]', b'{"step": 1, "reward": "x"}', b'\xff']
)
def test_a_damaged_record_is_named(tmp_path, line):
  write_steps(tmp_path, 0, [0], 0.0)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(line + b'\n')
  with pytest.raises(InputError, match=r'metrics\.jsonl:2: .* is not a record of metrics'):
    metrics.Writer(tmp_path, 0)


def test_a_kill_while_resuming_leaves_the_old_records(tmp_path, monkeypatch):
  write_steps(tmp_path, 0, range(3), 0.0)
  monkeypatch.setattr('os.replace', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    metrics.Writer(tmp_path, 1)
  assert len(metrics.read(tmp_path)) == 3


def test_without_a_file_there_are_no_records(tmp_path):
  assert metrics.read(tmp_path) == []


def test_rows_are_readable_text_and_strict_json(tmp_path):
  rows = [
    {'question': '1+1=?\n', 'response': '二 \ud800', 'reward': 1.0, 'correct': True},
    {'question': 'q', 'response': '', 'reward': math.nan, 'correct': False},
  ]
  path = tmp_path / 'samples' / 'step_000012.jsonl'
  metrics.write_rows(path, rows)
  text = path.read_text()
  assert '二' in text
  assert [json.loads(line) for line in text.splitlines()] == [rows[0], {**rows[1], 'reward': 'nan'}]
  assert list(path.parent.iterdir()) == [path]


def test_rows_are_written_atomically(tmp_path):
  path = tmp_path / 'rows.jsonl'
  metrics.write_rows(path, [{'question': 'a'}])
  with pytest.raises(TypeError):
    metrics.write_rows(path, [{'question': 'b'}, {'question': object()}])
  assert path.read_text() == '{"question": "a"}\n'
