"""The overview of a run: its warnings, its starts, how long it took and what to do next."""

import datetime
import json

import pytest

from exgrpo_jax.configs import base
from exgrpo_jax.reporting import messages, runs, step_records
from exgrpo_jax.reporting.page import overview
from exgrpo_jax.reporting.page.overview import warnings_of
from exgrpo_jax.reporting.runs import Recorded
from tests.reporting.page.test_comparison import SCORE, benchmark

BEGUN = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)
COMMAND = 'exgrpo train --config=chains --workdir=chains'  # typed in some folder


def copied(workdir):
  return f'exgrpo train --config=chains --workdir={workdir}'


def start(first_step, minute=0):
  time = (BEGUN + datetime.timedelta(minutes=minute)).isoformat()
  names = dict(command=COMMAND, commit=None, packages={}, python='3', hosts=1)
  machine = {'device': {'count': 1, 'kind': 'cpu'}, 'first_host': {'system': 'Linux'}}
  return {'time': time, 'first_step': first_step, **names, **machine}


def described(folder, records, starts=(), benchmarks=(), num_steps=60, num_epochs=0.0, **changes):
  """The overview of a run with these metrics and starts."""
  config = runs.flat(base.get_config().to_dict())
  config |= {'num_steps': num_steps, 'num_epochs': num_epochs, **changes}
  (folder / 'environment.json').write_text(json.dumps(list(starts)))
  tables = [step_records.SCHEMAS[name].empty_table() for name in ('responses', 'questions')]
  return overview.describe(Recorded(str(folder), config, records, *tables), benchmarks)


def test_a_start_that_had_no_step_left_is_not_listed(tmp_path):
  found = described(tmp_path, [{'step': 60}], [start(0), start(31, 5), start(61, 9)])
  assert [shown['first_step'] for shown in found['starts']] == [0, 31]


def test_the_time_runs_from_each_start_to_its_last_record(tmp_path):
  minutes = {0: 1, 30: 4, 31: 11, 60: 14}  # 4 from the first start, 4 from the second
  records = [
    {'step': step, 'timestamp': BEGUN.timestamp() + 60 * minute, 'time/step': 90.0}
    for step, minute in minutes.items()
  ]
  found = dict(described(tmp_path, records, [start(0), start(31, 10)])['facts'])
  assert found['duration'] == '0:08:00, 0:06:00 of it in steps'
  found = dict(described(tmp_path, records)['facts'])
  assert found['duration'] == '0:06:00 in steps'


@pytest.mark.parametrize(
  ('rights', 'sign', 'advice'),
  [
    pytest.param(
      {0: 1, 20: 10, 60: 19}, 1, 'the score was still rising on chains. To train longer:', id='up'
    ),
    pytest.param({0: 19, 20: 1, 60: 1}, -1, 'The score fell on chains. docs/not', id='down'),
    pytest.param(
      {0: 9, 20: 9, 60: 10}, 0, 'On chains, the change may be due to chance', id='noise'
    ),
  ],
)
def test_a_change_has_an_interval_and_leads_to_advice(tmp_path, rights, sign, advice):
  by_step = {step: [1] * count + [0] * (20 - count) for step, count in rights.items()}
  records = [{'step': step, SCORE: count / 20} for step, count in rights.items()]
  found = described(tmp_path, records, [start(0)], benchmark(by_step))
  (change,) = [score['change'] for score in found['scores']]
  mean, low, high = change['estimate']
  assert (change['from'], change['questions'], change['sign']) == (0, 20, sign)
  assert mean == pytest.approx((rights[60] - rights[0]) / 20) and low < mean < high
  assert (low <= 0 <= high) == (sign == 0)
  texts = [text for text, _ in found['next']]
  assert sum(advice in text for text in texts) == 1 and texts[-1].startswith('The run is finished')
  longer = [command for text, command in found['next'] if 'To train longer' in text]
  assert longer == [f'{copied(tmp_path)} --config.num_steps=120'] * (sign == 1)
  again = start(0) | {'command': f'{COMMAND} --config.num_epochs=1.5'}
  found = described(tmp_path, records, [again], benchmark(by_step), num_epochs=1.5)
  commands = [command for text, command in found['next'] if 'To train longer' in text]
  assert commands == [f'{copied(tmp_path)} --config.num_epochs=3'] * (sign == 1)
  decays = {'optimizer.schedule': 'cosine'}  # it could not be resumed
  found = described(tmp_path, records, [start(0)], benchmark(by_step), **decays)
  assert not any('To train longer' in text for text, _ in found['next'])


def test_a_run_that_stopped_early_is_not_advised_to_train_longer(tmp_path):
  rights = {0: 19, 20: 1, 60: 19}  # rising again, but the best score is from step 0
  by_step = {step: [1] * count + [0] * (20 - count) for step, count in rights.items()}
  values = {0: 0.9, 20: 0.1, 60: 0.8}
  records = [{'step': s, SCORE: v, 'validation/score': v} for s, v in values.items()]
  changes = {'num_steps': 100, 'evaluation.patience': 2}
  found = described(tmp_path, records, [start(0)], benchmark(by_step), **changes)
  texts = [text for text, _ in found['next']]
  assert any('the score was still rising on chains' in text for text in texts)
  assert not any('To train longer' in text for text in texts)


@pytest.mark.parametrize(('step', 'left'), [(12, '48 steps are'), (59, '1 step is')])
def test_an_unfinished_run_shows_how_to_resume_it(tmp_path, step, left):
  found = described(tmp_path, [{'step': 0}, {'step': step}], [start(0)])
  assert found['next'] == [
    [f'{left} left. If the run has stopped, resume it with:', copied(tmp_path)]
  ]


@pytest.mark.parametrize(
  ('record', 'commands'),
  [({'step': 0, SCORE: 0.5}, []), ({'step': 9}, ['export']), ({'step': 9, SCORE: 0.5}, None)],
)
def test_a_finished_run_suggests_only_possible_commands(tmp_path, monkeypatch, record, commands):
  monkeypatch.setattr(messages.importlib.util, 'find_spec', lambda _: None)  # no TensorBoard
  monkeypatch.setattr(messages.shutil, 'which', lambda _: None)
  found = described(tmp_path, [record], num_steps=record['step'])
  names = [line.split()[1] for line in found['next'][-1][1].splitlines()]
  assert names == (['evaluate', 'export'] if commands is None else commands)


def test_warnings_have_the_step_that_they_name_or_the_current_step(tmp_path):
  lines = """
---- 2026-11-23  exgrpo train
WARNING: before the first step
step  1/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: the grader is slow
step  2/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: step 4: the run is killed before the line of its step
step  3/60 | reward  0.500
WARNING: after the last
"""
  (tmp_path / 'console.log').write_text(lines)
  assert [(found['step'], found['text']) for found in warnings_of(tmp_path)] == [
    (1, 'before the first step'),
    (2, 'step 2: half of all is truncated'),
    (2, 'the grader is slow'),
    (3, 'after the last'),
    (4, 'step 4: the run is killed before the line of its step'),
  ]
  assert warnings_of(tmp_path / 'nowhere') == []
