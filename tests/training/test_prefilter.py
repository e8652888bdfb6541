"""The questions that a policy solves sometimes, and a run that begins with what that tells."""

import dataclasses
import json
import types

import pytest

from exgrpo_jax.data import questions
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import parse_config
from exgrpo_jax.grading import workers
from exgrpo_jax.training import prefilter, session
from tests.helpers import tiny

SAMPLES = 4


@pytest.fixture
def run(recorded, config, tmp_path, monkeypatch):
  """Filters the recorded run's questions by its first policy; gives the folder and the print."""
  monkeypatch.setattr(workers, 'COMMAND', tiny.WORKER)
  tiny.leave_out_pictures(monkeypatch.setattr)

  def call(capsys, **changes):
    settings = {'values': config, 'source': None, 'samples': SAMPLES, 'above': 0.0, 'below': 1.0}
    with recorded.compiling():
      prefilter.filter_questions(out=str(tmp_path / 'filtered'), **settings | changes)
    return tmp_path / 'filtered', capsys.readouterr().out

  return call


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_begins_with_what_is_known_of_the_questions_that_remain(
  run, recorded, config, tmp_path, capsys
):
  """The same questions by number, prompt, answer and pass rate, in the file and in the buffer."""
  out, printed = run(capsys)
  rates = {row['row']: row['pass_rate'] for row in rows(out / 'pass_rates.jsonl')}
  assert list(rates) == list(range(tiny.POOL))
  assert {rate * SAMPLES % 1 for rate in rates.values()} == {0}
  kept = [row for row, rate in rates.items() if 0 < rate < 1]
  assert 0 < len(kept) < tiny.POOL
  assert f'{len(kept)} of {tiny.POOL} questions left; solved 0: ' in printed

  data = str(out / 'questions.jsonl')
  before = recorded.data.questions.read(kept)
  after = list(questions.load(parse_config(config).data, data))
  assert [(q.messages, q.answer, q.kind) for q in after] == [
    (q.messages, q.answer, q.kind) for q in before
  ]
  assert [q.columns['pass_rate'] for q in after] == [rates[row] for row in kept]

  config.num_steps = 1
  config.rollout.questions = 2
  config.data.train = data
  config.experience.path = str(out / 'successes.parquet')
  with recorded.compiling(), session.open_run(config, str(tmp_path / 'run')) as begun:
    entries = begun.buffer.entries
    assert {row: entry.correctness for row, entry in entries.items()} == pytest.approx(
      {number: rates[row] for number, row in enumerate(kept)}
    )
    assert all(
      1 <= len(entry.trajectories) <= tiny.STORED and (entry.trajectories[0].logp <= 0).all()
      for entry in entries.values()
    )


MATH = {'problem': '1+1?', 'solution': r'So \boxed{2}.', 'level': 'Level 1', 'type': 'Algebra'}
ASKED = [{'role': 'user', 'content': '1+1?'}]


@pytest.mark.parametrize(
  ('row', 'fields'),
  [
    pytest.param({'question': '1+1?', 'answer': '<<1+1=2>>2\n#### 2'}, {}, id='gsm8k'),
    pytest.param(MATH, {}, id='math'),
    pytest.param({'prompt': '1+1?', 'solution': '2'}, {'answer_field': 'solution'}, id='trl'),
    pytest.param(
      {'prompt': ASKED, 'solution': '2', 'source_prompt': ASKED, 'data_source': 'd'}, {}, id='dapo'
    ),
    pytest.param(
      {
        'data_source': 'math',
        'prompt': ASKED,
        'reward_model': {'ground_truth': '0.50', 'style': 'rule'},
        'target': 'So 2.',
        'extra_info': {'index': 7, 'rate': float('nan')},
      },
      {'solution_field': 'target'},
      id='verl',
    ),
  ],
)
def test_what_remains_reads_back_as_it_was(config, jsonl, tmp_path, row, fields):
  """Whatever its columns are called, with the settings by which it was read."""
  reading = dataclasses.replace(parse_config(config).data, **fields, cache_dir=str(tmp_path))
  (before,) = questions.load(reading, jsonl(row))
  tried = prefilter.Tried(before, [], [types.SimpleNamespace(correct=False)] * 4)
  prefilter.write(str(tmp_path), [tried], [tried])
  (after,) = questions.load(reading, str(tmp_path / 'questions.jsonl'))
  expected = dataclasses.replace(before, columns={**before.columns, 'pass_rate': 0.0})
  assert repr(after) == repr(expected)  # NaN is not equal to itself


def test_bounds_that_leave_nothing_are_refused_with_the_pass_rates(run, capsys, tmp_path):
  with pytest.raises(InputError, match=r'leave none of the \d+ questions .* rates are 0: \d+,'):
    run(capsys, above=0.99, below=1.0)
  assert not (tmp_path / 'filtered' / 'questions.jsonl').exists()


def test_a_runs_own_policy_may_try_them(run, recorded, capsys):
  source = policies.Source('run', str(recorded.workdir), None)
  out, _ = run(capsys, values=policies.config_values(source, None), source=source, samples=2)
  assert {row['samples'] for row in rows(out / 'pass_rates.jsonl')} == {2}


def test_an_environment_is_refused(run, config, capsys):
  config.environment.name = 'guess'
  with pytest.raises(InputError, match=r"environment\.name='guess': questions are filtered"):
    run(capsys)
