"""Workdirs read as runs, by setting."""

import json

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import runs

CONFIG = {
  'seed': 0,
  'num_steps': 4,
  'replay': {'ratio': 0.5, 'sigma': 1.0},
  'rollout': {'questions': 2, 'group_size': 4, 'slots': 8},
}


@pytest.fixture
def workdir(tmp_path):
  """Makes the workdir of a run with such a config and metrics of one step."""

  def make(name, config=CONFIG, metrics='{"step": 1, "eval/sums/pass@1": 0.5}\n'):
    folder = tmp_path / name
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'metrics.jsonl').write_text(metrics)
    return str(folder)

  return make


def test_runs_that_differ_in_their_seed_and_layout_alone_are_of_one_setting(workdir):
  other = CONFIG | {'seed': 1, 'rollout': CONFIG['rollout'] | {'slots': 2}}
  plain = CONFIG | {'replay': {'ratio': 0.0, 'sigma': 1.0}}
  folders = [workdir('a'), workdir('plain', plain), workdir('b', other)]
  both, grpo = runs.read(folders)
  assert [run.workdir for run in both.runs] == [folders[0], folders[2]]
  assert (both.label, grpo.label) == ('replay.ratio=0.5', 'replay.ratio=0.0')
  assert [group.label for group in runs.read(folders[:1])] == ['ExGRPO, replay.ratio=0.5']


def test_a_benchmarks_score_is_its_average_where_it_has_one():
  names = ('eval/a/pass@1', 'eval/a/avg@4', 'eval/a/pass@4', 'eval/b/c/pass@1', 'eval/a/avg@4_low')
  assert runs.score_names([[{name: 0.5} for name in names]]) == {
    'a': 'eval/a/avg@4',
    'b/c': 'eval/b/c/pass@1',
  }


def test_what_is_no_run_is_refused(workdir, tmp_path):
  (tmp_path / 'empty').mkdir()
  one = workdir('one')
  for folders, words in (
    ([str(tmp_path / 'empty')], 'holds no config.json'),
    ([workdir('new', metrics='')], 'not written any metrics yet'),
    ([one, f'{one}/'], 'is named twice'),
    ([one, workdir('twin')], r'same seed \(0, 0\)'),
    ([workdir('broken', {})], r"config.json is no run's config: it lacks seed, num_steps"),
  ):
    with pytest.raises(InputError, match=words):
      runs.read(folders)
