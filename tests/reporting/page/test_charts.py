"""Numbers and panels for the page."""

import math

import numpy as np
import pytest

from exgrpo_jax.reporting import metrics
from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.page.charts import Line


def test_numbers_keep_six_digits_and_non_finite_values_are_null():
  values = [0.0, 3.0, -2.5, 0.1 + 0.2, 1234567.8, 1e-9, np.nan, np.inf, -np.inf]
  assert charts.numbers(values) == [0, 3, -2.5, 0.3, 1234570.0, 1e-9, None, None, None]
  assert all(isinstance(value, int) for value in charts.numbers(np.array([2.0, -7.0])))


def test_lines_of_a_panel_are_smoothed_alike_however_long_they_are():
  values = np.array([1.0, 4.0] * 40)
  lines = [Line(str(count), range(count), values[:count]) for count in (80, 24, 3, 1)]
  long, short, three, one = (line['smooth'] for line in charts.lines('Reward', '', lines)['lines'])
  assert short[:22] == long[:22]  # means over two neighbors on either side
  assert (short[23], three, one) == (3, [2, 2, 2], [1])
  for alone in (charts.lines('', '', lines[1:]), charts.lines('', '', lines, smooth=False)):
    assert not any('smooth' in line for line in alone['lines'])


# ---- A run's metrics ----


def panels_of(run, replays=True):
  """Title -> panel."""
  made = [panel for part in charts.overview(run, replays).values() for panel in part]
  return {panel['title']: panel for panel in made}


def test_a_real_run_has_all_panels(recorded):
  parts = charts.overview(metrics.read(recorded.workdir), replays=True)
  assert {part: [panel['title'] for panel in made] for part, made in parts.items()} == {
    'score': ['Evaluation: pass@1, 95% interval', 'Reward', 'Pass rate'],
    'signal': ['Groups without a learning signal', 'Clipped tokens', 'Learning rate'],
    'training': [
      *('Gradient norm', 'Entropy', 'Response length', 'Truncated responses', 'Outcomes'),
      'Step time by phase',
    ],
    'replay': [
      *('Replay buffer', 'Replay buffer by bucket', 'Importance ratio of replayed tokens'),
      *('Effective sample size of replay', 'Age of replayed trajectories'),
    ],
  }


def test_panels_without_data_are_left_out():
  run = [{'step': 0, 'reward': 0.5, 'perf/tokens_per_second': 9.0}]
  assert list(panels_of([*run, {'step': 1, 'entropy': math.nan}])) == ['Reward']


@pytest.mark.parametrize('name', ['buffer/questions', 'optimizer/skipped'])
def test_counts_that_are_always_0_have_no_panel(name):
  never = [{'step': step, 'reward': 0.0, name: 0} for step in range(1, 4)]
  assert list(panels_of(never)) == ['Reward']
  assert len(panels_of([*never, {'step': 4, name: 1}])) == 2


def test_a_line_connects_the_records_that_have_its_metric():
  run = [{'step': step, 'reward': 0.1} for step in range(5)]
  run[0] |= {'eval/gsm8k/pass@1': 0.2, 'eval/a/c/pass@1': 1.0}
  run[4] |= {f'eval/gsm8k/pass@1{end}': v for end, v in (('', 0.4), ('_low', 0.3), ('_high', 0.5))}
  other, line = panels_of(run)['Evaluation: pass@1, 95% interval']['lines']
  assert (other['label'], line['label']) == ('a/c', 'gsm8k') and 'band' not in other
  assert (line['steps'], line['values']) == ([0, 4], [0.2, 0.4])
  assert line['band'] == {'steps': [4], 'low': [0.3], 'high': [0.5]}


def test_several_epochs_have_a_line_each():
  name = 'policy/clip_fraction'
  run = [
    {'step': step, name: 0.2, f'{name}/epoch_1': 0.1, f'{name}/epoch_2': 0.3} for step in (1, 2)
  ]
  labels = [line['label'] for line in panels_of(run)['Clipped tokens']['lines']]
  assert labels == ['clipped', 'clipped, epoch 1', 'clipped, epoch 2']


def test_a_logarithmic_panel_leaves_out_values_that_are_not_positive_and_finite():
  values = [1.0, 0.0, math.inf, math.nan, 2.0]
  run = [{'step': step, 'gradient_norm': value} for step, value in enumerate(values)]
  panel = panels_of(run)['Gradient norm']
  assert panel['log'] and panel['lines'][0]['steps'] == [0, 4]


def test_only_outcomes_that_occur_are_stacked():
  names = [f'grading/{outcome.replace(" ", "_")}' for outcome in charts.OUTCOMES]
  run = [
    {'step': step} | dict.fromkeys(names, 0) | {names[0]: step / 4, names[2]: 1 - step / 4}
    for step in range(1, 4)
  ]
  assert panels_of(run)['Outcomes']['layers'] == [
    {'label': 'correct', 'values': [0.25, 0.5, 0.75]},
    {'label': 'no answer', 'values': [0.75, 0.5, 0.25]},
  ]


def test_each_bucket_has_a_row_over_the_steps():
  run = [
    {'step': step, 'buffer/bucket_0': 0, 'buffer/bucket_1': step, 'buffer/bucket_2': 1}
    for step in range(1, 4)
  ]
  assert panels_of(run)['Replay buffer by bucket']['counts'] == [[0, 0, 0], [1, 2, 3], [1, 1, 1]]
  assert not panels_of(run, replays=False)


def test_phases_add_up_to_the_step_and_a_slow_first_step_does_not_set_the_axis():
  times = {'time/generate': 3.0, 'time/await_update': 5.0, 'time/device_wait': 9.0}
  run = [{'step': step, 'time/step': 10.0, **times} for step in range(1, 101)]
  run[0]['time/step'] = 500.0
  short = panels_of(run[:12])['Step time by phase']
  panel = panels_of(run)['Step time by phase']
  assert {layer['label']: layer['values'][1] for layer in panel['layers']} == {
    'await update': 5,
    'generate': 3,
    'other, compiling': 2,
  }
  assert panel['top'] == short['top'] == pytest.approx(11)


def test_on_a_logarithmic_axis_a_zero_does_not_change_the_average():
  values = np.full(200, 0.5)
  values[100] = 0
  line = charts.Line('norm', np.arange(200), values)
  (drawn,) = charts.lines('', '', [line], log=True)['lines']
  assert drawn['smooth'] == pytest.approx([0.5] * 200)
