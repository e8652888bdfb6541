"""Reading runs and grouping them by setting."""

import json
import math

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import runs

CONFIG = {
  'seed': 0,
  'num_steps': 4,
  'replay': {'ratio': 0.5, 'sigma': 1.0},
  'rollout': {'questions': 2, 'group_size': 4, 'slots': 8},
  'environment': {'workers': 0},
}


@pytest.fixture
def workdir(tmp_path):
  """Make the workdir of a run with such a config and metrics of one step."""

  def make(name, config=CONFIG, metrics='{"step": 1, "eval/sums/pass@1": 0.5}\n'):
    folder = tmp_path / name
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'metrics.jsonl').write_text(metrics)
    return str(folder)

  return make


def test_runs_that_differ_only_in_seed_and_layout_have_the_same_setting(workdir):
  other = CONFIG | {'seed': 1, 'rollout': CONFIG['rollout'] | {'slots': 2}}
  other |= {'environment': {'workers': 4}}
  plain = CONFIG | {'replay': {'ratio': 0.0, 'sigma': 1.0}}
  folders = [workdir('a'), workdir('plain', plain), workdir('b', other)]
  both, grpo = runs.read(folders)
  assert [run.workdir for run in both.runs] == [folders[0], folders[2]]
  assert (both.label, grpo.label) == ('replay.ratio=0.5', 'replay.ratio=0.0')
  assert [group.label for group in runs.read(folders[:1])] == ['ExGRPO, replay.ratio=0.5']


def test_labels_contain_just_enough_to_tell_settings_apart(workdir):
  def labels(*settings):
    folders = [
      workdir(
        f'{len(settings)}{place}',
        CONFIG | {'num_steps': steps, 'data': {'train': spec}, 'replay': {'ratio': ratio}},
      )
      for place, (ratio, spec, steps) in enumerate(settings)
    ]
    return [group.label for group in runs.read(folders)]

  first, second = (0.5, 'a specification', 60), (0.0, 'of some length', 24)
  assert labels(first, second) == ['replay.ratio=0.5', 'replay.ratio=0.0']
  assert labels(first, second, (0.0, 'of some length', 60)) == [
    'replay.ratio=0.5, num_steps=60',
    'replay.ratio=0.0, num_steps=24',
    'replay.ratio=0.0, num_steps=60',
  ]


def test_a_benchmarks_score_is_its_average_if_it_has_one():
  names = ('eval/a/pass@1', 'eval/a/avg@4', 'eval/a/pass@4', 'eval/b/c/pass@1', 'eval/a/avg@4_low')
  assert runs.score_names([[{name: 0.5} for name in names]]) == {
    'a': 'eval/a/avg@4',
    'b/c': 'eval/b/c/pass@1',
  }


def test_if_the_number_of_samples_changes_the_newest_score_counts():
  names = {10: 'eval/a/avg@4', 20: 'eval/a/avg@16', 0: 'eval/a/avg@8'}
  found = [{'step': step, name: 0.5} for step, name in names.items()]
  assert runs.score_names([found]) == {'a': 'eval/a/avg@16'}


def test_folders_that_are_not_runs_are_refused(workdir, tmp_path):
  (tmp_path / 'empty').mkdir()
  one = workdir('one')
  for folders, words in (
    ([str(tmp_path / 'empty')], 'contains no config.json'),
    ([workdir('new', metrics='')], 'not written any metrics yet'),
    ([one, f'{one}/'], 'was given twice'),
    ([one, workdir('twin')], r'same seed \(seeds: 0, 0\)'),
    ([workdir('broken', {})], r'config.json: this is not .* because it lacks seed, num_steps'),
  ):
    with pytest.raises(InputError, match=words):
      runs.read(folders)


# ---- Metrics over steps ----


def test_a_series_has_the_steps_at_which_all_seeds_are_finite():
  of_seeds = [
    [{'step': 0, 'reward': 0.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': 5.0}],
    [{'step': 0, 'reward': 2.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': math.nan}],
  ]
  found = runs.over_seeds(of_seeds, 'reward')
  assert (found.steps.tolist(), found.mean.tolist()) == ([0, 1], [1, 1])
  assert found.std.tolist() == [pytest.approx(2**0.5), 0]
  assert runs.over_seeds(of_seeds, 'loss') is None


def test_smoothing_averages_a_fortieth_of_the_points_on_either_side():
  # A fortieth of 80 points is two: the mean of 0 1 0 1 0 is .4, and of 0 1 0 at the end 1/3.
  values = [0.0, 1.0] * 40
  assert runs.smoothed(values)[[10, 11, 0]] == pytest.approx([0.4, 0.6, 1 / 3])
  assert runs.smoothed(values[:3], points=80) == pytest.approx([1 / 3] * 3)
