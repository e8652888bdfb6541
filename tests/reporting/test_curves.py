"""The curves of a run: of the recorded one, and of records made by hand."""

import json
import math
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import artist, curves, drawing, metrics, records
from exgrpo_jax.reporting.panels import HeatMap, Lines, Stack
from tests.helpers import tiny


@pytest.fixture
def draw(tmp_path, monkeypatch):
  """A function that draws a run of some records and returns the axes: title -> axes."""

  def draw_curves(run):
    figures = []
    savefig = drawing.Figure.savefig

    def save_and_keep(figure, *args, **kwargs):
      figures.append(figure)
      savefig(figure, *args, **kwargs)

    records.write(tmp_path / records.FILE, run)
    with monkeypatch.context() as patch:
      patch.setattr(drawing.Figure, 'savefig', save_and_keep)
      curves.draw(tmp_path, ['png'])
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    return {ax.get_title(): ax for ax in figures[0].axes if ax.get_title()}

  return draw_curves


def panel_of(run, title):
  (panel,) = [panel for panel in curves.all_panels(run) if panel.title == title]
  return panel


# ---- Which panels, and of what ----


def test_a_real_run_has_all_panels_in_png_and_svg(recorded):
  drawn = curves.all_panels(metrics.read(recorded.workdir))
  assert [panel.title for panel in drawn] == [
    'Evaluation: pass@1, 95% interval',
    'Reward',
    'Pass rate',
    'Groups that teach nothing',
    'Clipped tokens',
    'Learning rate',
    'Gradient norm',
    'Entropy',
    'Response length',
    'Truncated responses',
    'Outcomes',
    'Time of a step by phase',
    'Replay buffer',
    'Replay buffer by bucket',
    'Importance ratio of replayed tokens',
    'Effective sample size of replay',
    'Age of replayed trajectories',
  ]
  assert (recorded.workdir / 'curves.png').read_bytes().startswith(b'\x89PNG')
  texts = [
    ''.join(node.itertext())
    for node in ET.parse(recorded.workdir / 'curves.svg').iter()
    if node.tag.endswith('}text')
  ]
  assert {panel.title for panel in drawn} <= set(texts)
  assert f'{tiny.QUESTIONS} × {tiny.ROLLOUTS} rollouts · seed {tiny.SEED} · step 32 of 32' in (
    ' '.join(texts)
  )
  assert not list(recorded.workdir.glob('curves*.new'))


def test_panels_without_data_are_left_out(draw):
  run = [{'step': 0, 'reward': 0.5, 'speed/tokens_per_second': 9.0}]
  assert list(draw([*run, {'step': 1, 'entropy': math.nan}])) == ['Reward']


@pytest.mark.parametrize('name', ['buffer/questions', 'skipped_updates'])
def test_counts_of_what_never_happened_have_no_panel(name):
  never = [{'step': step, 'reward': 0.0, name: 0} for step in range(1, 4)]
  assert [panel.title for panel in curves.all_panels(never)] == ['Reward']
  assert len(curves.all_panels([*never, {'step': 4, name: 1}])) == 2


@pytest.mark.parametrize('run', [[], [{'step': 0}]])
def test_nothing_to_draw_is_refused(run, tmp_path):
  records.write(tmp_path / records.FILE, run)
  with pytest.raises(InputError, match=f'nothing to draw: none of the {len(run)} records'):
    curves.draw(tmp_path)


def test_a_line_connects_the_records_that_have_its_metric(draw):
  run = [{'step': step, 'reward': 0.1} for step in range(5)]
  run[0]['eval/gsm8k/pass@1'] = 0.2
  run[4] |= {
    'eval/gsm8k/pass@1': 0.4,
    'eval/gsm8k/pass@1_low': 0.3,
    'eval/gsm8k/pass@1_high': 0.5,
  }
  ax = draw(run)['Evaluation: pass@1, 95% interval']
  (line,) = ax.lines
  np.testing.assert_array_equal(line.get_xydata(), [[0, 0.2], [4, 0.4]])
  (band,) = ax.collections
  assert set(map(tuple, band.get_paths()[0].vertices)) == {(4, 0.3), (4, 0.5)}
  assert [text.get_text() for text in ax.get_legend().get_texts()] == ['gsm8k']


def test_an_evaluation_has_one_line_per_source():
  panel = panel_of(
    [{'step': 0, 'eval/b/pass@1': 1.0, 'eval/a/c/pass@1': 1.0}], 'Evaluation: pass@1, 95% interval'
  )
  assert [line.label for line in panel.lines] == ['a/c', 'b']


def test_outcomes_are_the_shares_of_those_that_occur():
  run = [
    {'step': step, **dict.fromkeys(curves.OUTCOMES, 0.0)} | {'grading/correct': step / 4}
    for step in range(1, 4)
  ]
  for record in run:
    record['grading/no_answer'] = 1 - record['grading/correct']
  panel = panel_of(run, 'Outcomes')
  assert isinstance(panel, Stack) and panel.top == 1
  assert {label: list(layer) for label, layer in panel.layers.items()} == {
    'correct': [0.25, 0.5, 0.75],
    'no answer': [0.75, 0.5, 0.25],
  }


def test_buckets_are_a_row_each_over_the_steps(draw):
  run = [
    {'step': step, 'buffer/bucket_0': 0, 'buffer/bucket_1': step, 'buffer/bucket_2': 1}
    for step in range(1, 4)
  ]
  panel = panel_of(run, 'Replay buffer by bucket')
  assert isinstance(panel, HeatMap)
  np.testing.assert_array_equal(panel.counts_KS, [[0, 0, 0], [1, 2, 3], [1, 1, 1]])
  (mesh,) = draw(run)['Replay buffer by bucket'].collections
  assert mesh.get_array().mask.sum() == 3  # an empty bucket has no colour


def test_phases_add_up_to_the_step_and_a_slow_first_step_does_not_set_the_axis():
  times = {'time/generate': 3.0, 'time/await_update': 5.0, 'time/device_wait': 9.0}
  run = [{'step': step, 'time/step': 10.0, **times} for step in range(1, 101)]
  run[0]['time/step'] = 500.0
  panel = panel_of(run, 'Time of a step by phase')
  assert {label: layer[1] for label, layer in panel.layers.items()} == {
    'await update': 5,
    'generate': 3,
    'other, compiling': 2,
  }
  assert panel.top == pytest.approx(11)


# ---- How they are drawn ----


def test_a_long_line_is_smooth_over_the_faint_raw_one_and_a_short_one_has_markers(draw):
  run = [{'step': step, 'reward': float(step % 2)} for step in range(80)]
  raw, smooth = draw(run)['Reward'].lines
  assert raw.get_ydata().tolist() == [0, 1] * 40 and raw.get_alpha() < 0.5
  # The mean of five neighbours: of 0 1 0 1 0 it is .4, at the end of 0 1 0 it is 1/3.
  assert smooth.get_ydata()[[10, 11, 0]] == pytest.approx([0.4, 0.6, 1 / 3])
  assert smooth.get_color() == raw.get_color()
  (short,) = draw(run[:39])['Reward'].lines
  assert short.get_marker() == 'o' and len(short.get_ydata()) == 39


@pytest.mark.parametrize('share', [0.0, 0.01, 0.5, 1.0])
def test_the_axis_of_a_share_stays_within_0_and_1(draw, share):
  run = [{'step': step, 'length/truncated': share * (step > 0)} for step in range(3)]
  low, high = draw(run)['Truncated responses'].get_ylim()
  assert low == 0 and share <= high <= 1


def test_only_what_is_negative_has_a_negative_axis(draw):
  axes = draw([{'step': 0, 'reward': -1.0, 'replay/age_mean': 0.0}, {'step': 1, 'reward': 1.0}])
  assert axes['Reward'].get_ylim()[0] < -1
  assert axes['Age of replayed trajectories'].get_ylim()[0] == 0


def test_a_logarithmic_panel_leaves_out_values_that_are_not_positive_and_finite():
  values = [1.0, 0.0, math.inf, math.nan, 2.0]
  run = [{'step': step, 'gradient_norm': value} for step, value in enumerate(values)]
  panel = panel_of(run, 'Gradient norm')
  assert isinstance(panel, Lines) and panel.log
  (line,) = panel.lines
  assert (line.steps, line.values) == ([0, 4], [1.0, 2.0])


def test_the_title_names_workdir_config_and_steps(tmp_path, config):
  workdir = tmp_path / 'first_try'
  workdir.mkdir()
  run = [{'step': 12, 'reward': 1.0}]
  assert curves.title(workdir, run) == 'first_try · step 12'
  config.replay.ratio, config.num_steps = 0.25, 40
  (workdir / 'config.json').write_text(json.dumps(config.to_dict()))
  command = 'exgrpo train --config=configs/arithmetic.py --workdir=x'
  (workdir / 'environment.json').write_text(json.dumps([{'command': command}]))
  assert curves.title(workdir, run) == (
    'first_try · config arithmetic · ExGRPO, replay 0.25 · 6 × 4 rollouts · '
    f'seed {tiny.SEED} · step 12 of 40'
  )
  config.replay.ratio = 0.0
  (workdir / 'config.json').write_text(json.dumps(config.to_dict()))
  assert ' · GRPO · ' in curves.title(workdir, run)


# ---- While the run goes on ----


def test_the_picture_is_drawn_while_the_run_goes_on(tmp_path, monkeypatch):
  monkeypatch.setattr(artist, 'EVERY_SECONDS', 0.0)
  with metrics.Writer(tmp_path, 0, settings={'seed': 0}) as writer:
    writer.write(0, {'reward': 0.5})
    wait_for(tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_a_picture_that_is_not_old_enough_is_not_drawn_again(tmp_path):
  with metrics.Writer(tmp_path, 0, settings={'seed': 0}) as writer:
    started = time.monotonic()
    writer.write(0, {'reward': 0.5})
    assert time.monotonic() - started < artist.EVERY_SECONDS
    assert writer._artist._process is None


def test_a_picture_that_cannot_be_drawn_is_reported_once(tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(artist, 'EVERY_SECONDS', 0.0)
  picture = artist.Artist(tmp_path / 'absent')
  picture.draw()
  picture._process.wait()
  picture.draw()
  picture.draw()
  picture.close()
  (line,) = capfd.readouterr().err.splitlines()
  assert 'curves.png cannot be drawn during the run' in line and 'absent says why' in line


def test_the_process_that_draws_does_not_import_jax():
  """Which would take it seconds, and the accelerator from the run."""
  loaded = 'import sys; from exgrpo_jax.reporting import curves; print("jax" in sys.modules)'
  assert subprocess.check_output([sys.executable, '-c', loaded], text=True) == 'False\n'


def wait_for(path):
  deadline = time.monotonic() + 120
  while not os.path.exists(path):
    assert time.monotonic() < deadline
    time.sleep(0.05)
