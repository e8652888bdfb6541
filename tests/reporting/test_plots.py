"""`curves`: the PNG of one run."""

import math

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import plots


@pytest.fixture
def draw(tmp_path, monkeypatch):
  """A function that calls `curves` and returns its panels: title -> axes."""

  def draw_curves(records):
    figures = []
    savefig = plots.Figure.savefig

    def save_and_keep(figure, *args, **kwargs):
      figures.append(figure)
      savefig(figure, *args, **kwargs)

    with monkeypatch.context() as patch:
      patch.setattr(plots.Figure, 'savefig', save_and_keep)
      plots.curves(records, tmp_path / 'curves.png')
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    return {ax.get_title(): ax for ax in figures[0].axes}

  return draw_curves


def test_panels_without_data_are_left_out(draw):
  panels = draw(
    [{'step': 0, 'reward': 0.5, 'speed/tokens_per_second': 9.0}, {'step': 1, 'entropy': math.nan}]
  )
  assert list(panels) == ['Reward and pass rate']


def test_every_plotted_metric_has_a_line_in_a_panel_with_title_and_labels(draw):
  names = (
    'reward',
    'pass_rate/fresh',
    'pass_rate/replay',
    'entropy',
    'length/mean',
    'length/truncated',
    'buffer/questions',
    'buffer/retired',
    'replay/ratio_mean',
    'replay/ratio_max',
    'replay/effective_sample_size',
    'replay/age_mean',
    'gradient_norm',
    'eval/gsm8k/pass@1',
    'eval/gsm8k/valid_steps',
  )
  panels = draw([{'step': 0, **dict.fromkeys(names, 0.5)}])
  assert sum(len(ax.lines) for ax in panels.values()) == len(names)
  assert all(
    ax.get_title() and ax.get_ylabel() and ax.get_xlabel() == 'step' for ax in panels.values()
  )


def test_a_line_connects_the_records_that_have_its_metric(draw):
  records = [{'step': step, 'reward': 0.1} for step in range(5)]
  records[0]['eval/gsm8k/pass@1'] = 0.2
  records[4] |= {
    'eval/gsm8k/pass@1': 0.4,
    'eval/gsm8k/pass@1_low': 0.3,
    'eval/gsm8k/pass@1_high': 0.5,
  }
  ax = draw(records)['Evaluation: pass@1, 95% interval']
  (line,) = ax.lines
  np.testing.assert_array_equal(line.get_xydata(), [[0, 0.2], [4, 0.4]])
  (band,) = ax.collections
  assert set(map(tuple, band.get_paths()[0].vertices)) == {(4, 0.3), (4, 0.5)}


def test_an_evaluation_has_one_line_per_source(draw):
  ax = draw([{'step': 0, 'eval/b/pass@1': 1.0, 'eval/a/c/pass@1': 1.0}])[
    'Evaluation: pass@1, 95% interval'
  ]
  assert [line.get_label() for line in ax.lines] == ['a/c', 'b']


def test_a_legend_names_even_a_single_source(draw):
  ax = draw([{'step': 0, 'eval/gsm8k/pass@1': 1.0}])['Evaluation: pass@1, 95% interval']
  assert [text.get_text() for text in ax.get_legend().get_texts()] == ['gsm8k']


def test_a_logarithmic_panel_leaves_out_values_that_are_not_positive_and_finite(draw):
  values = [1.0, 0.0, math.inf, math.nan, 2.0]
  ax = draw([{'step': step, 'gradient_norm': value} for step, value in enumerate(values)])[
    'Gradient norm'
  ]
  np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[0, 1.0], [4, 2.0]])


@pytest.mark.parametrize('records', [[], [{'step': 0}]])
def test_nothing_to_draw_is_refused(records, tmp_path):
  with pytest.raises(InputError, match=f'nothing to draw: none of the {len(records)} records'):
    plots.curves(records, tmp_path / 'curves.png')
