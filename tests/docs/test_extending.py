"""The examples of docs/extending.md do what the page says."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.algorithm import objective, terms, trajectory_rules
from exgrpo_jax.config import build, defaults
from exgrpo_jax.data import questions
from exgrpo_jax.datatypes import ReplayScores, Response, Trajectory
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.settings import Config
from exgrpo_jax.grading.verifier import Judgement
from exgrpo_jax.huggingface import families
from exgrpo_jax.rollout import selection
from exgrpo_jax.rollout.sampler import requests_for
from tests.docs import documents

HEADINGS = (
  'loss term',
  'selection rule',
  'model family',
  'data source',
  'verifier',
  'sampler',
  'callback',
)
BLOCKS = dict(
  zip(
    HEADINGS,
    documents.blocks((documents.DOCS / 'extending.md').read_text(), 'python'),
    strict=True,
  )
)


def run(heading):
  """The names that an example defines."""
  names = {}
  exec(BLOCKS[heading], names)
  return names


@pytest.fixture(autouse=True)
def tables():
  """What the examples add is gone after the test."""
  tables = (terms.SHAPINGS, trajectory_rules.RULES, families.FAMILIES)
  before = [dict(table) for table in tables]
  yield
  for table, entries in zip(tables, before):
    table.clear()
    table.update(entries)


def settings(**changes):
  """The checked config with some values changed."""
  values = defaults(Config)
  for section, (name, value) in changes.items():
    values[section][name] = value
  return build(Config, values, 'config')


def test_examples_have_about_ten_lines():
  assert all(len([x for x in block.splitlines() if x]) <= 12 for block in BLOCKS.values())


def test_a_loss_term():
  run('loss term')
  config = settings(objective=('shaping', 'truncated')).objective
  weights = objective.replay_weights(np.zeros(2), np.log([0.5, 3.0]), config)
  np.testing.assert_allclose(weights, [0.5, 1.0], rtol=1e-6)
  with pytest.raises(InputError, match=r"terms\.SLOPES has none for 'truncated'"):
    dataclasses.replace(config, replay_advantage='balanced')


def test_a_selection_rule():
  run('selection rule')
  kind = settings(replay=('trajectory_selection', 'shortest')).replay.trajectory_selection
  stored = [
    Trajectory(np.zeros(length, np.int32), np.zeros(length, np.float32), 1.0, step=1)
    for length in (3, 2)
  ]
  scored = [ReplayScores(*np.zeros((4, length), np.float32)) for length in (3, 2)]
  picked, _ = selection.pick(kind, [stored], lambda _: scored, np.random.default_rng(0))
  assert picked == [stored[1]]


def test_a_model_family():
  described = families.FAMILIES['Olmo2ForCausalLM']
  families.FAMILIES['Olmo2ForCausalLM'] = None
  run('model family')
  assert families.FAMILIES['Olmo2ForCausalLM'] == described


def test_a_data_source(tmp_path):
  (tmp_path / 'squares.py').write_text(BLOCKS['data source'])
  config = settings(data=('cache_dir', str(tmp_path / 'cache'))).data
  loaded = questions.load(config, f'{tmp_path}/squares.py:test')
  assert (len(loaded), loaded[3].answer) == (100, str(1003**2))


def test_a_verifier():
  judge = run('verifier')['LastLine']().judge
  question = type('Question', (), {'answer': '3'})
  assert judge('1\n3', question) == Judgement('correct', '3')
  assert judge('3\n1', question).outcome == 'wrong'


def test_a_sampler():
  finished = []
  requests = requests_for([np.int32([7, 8, 9])], [0], samples=2, step=1, limit=2)
  responses, _ = run('sampler')['Parrot']().generate(
    None, requests, lambda index, _: finished.append(index)
  )
  assert finished == [0, 1] and [r.tokens.tolist() for r in responses] == [[7, 8]] * 2


def test_a_callback():
  told = [[Response(np.zeros(length), *np.zeros((2, length)), False)] for length in (3, 5)]
  experience = type('Experience', (), {'responses': told})
  assert run('callback')['longest'](None, None, experience) == {'length/longest': 5}
