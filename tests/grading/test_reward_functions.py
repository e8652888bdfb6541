"""What a reward gets by the names of its parameters."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, reward_functions, verifier
from exgrpo_jax.workers import user_code
from exgrpo_jax.workers.pool import Worker
from tests.helpers import tiny

VERIFIER = verifier.Config(require_think=False, require_box=True)


def made(function):
  """The RewardFunction of a function that no module has."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(user_code, 'load', lambda _: function)
    return reward_functions.load('some.module:itself')


def test_arguments_are_those_that_the_parameters_name():
  def reward(outcome, level, *others, shift=10.0, response='x', **more):
    assert not others and not more
    return len(response) + len(outcome) + level + shift

  row = {'response': 'four', 'outcome': 'wrong', 'level': 0.5, 'tokens': [1], 'other': 1}
  assert made(reward).of_one(row) == 4 + 5 + 0.5 + 10
  assert made(reward).columns == ['level']


def test_a_row_without_the_column_gives_none_in_one_and_in_a_batch():
  def reward(level, bonus=None):
    is_batch = isinstance(level, list)
    assert bonus == ([7, None] if is_batch else None)
    return [-1 if one is None else one for one in level] if is_batch else float(level is None)

  assert made(reward).of_one({'length': 3}) == 1
  assert made(reward).of_batch([{'length': 3, 'bonus': 7}, {'length': 3, 'level': 2}]) == [-1, 2]


@pytest.mark.parametrize(
  'rewards',
  [[0.0, value] for value in (float('nan'), None, '1', [1.0], np.float32('inf'), -2e10)] + [[0.0]],
)
def test_a_batch_has_a_finite_number_for_each_response(rewards):
  with pytest.raises(ValueError, match='returned '):
    made(lambda: rewards).of_batch([{}, {}])


def test_numpy_scalars_are_numbers():
  found = made(lambda: np.array([0.5, 2], np.float32)).of_batch([{}, {}])
  assert found == [0.5, 2.0] and {type(one) for one in found} == {float}


def asked(text):
  return {'question': text, 'messages': [{'role': 'user', 'content': text}]}


@pytest.mark.parametrize(
  ('name', 'right', 'wrong', 'reason'),
  [
    ('weighed_length', {'level': 2}, {'lvl': 2, 'id': 7}, "asks for 'level'.*'lvl', 'id'"),
    ('weighed_length', {'level': 2}, {'level': 'hard'}, 'TypeError'),
    ('of_question', asked('7+0'), asked('seven'), 'a batch of 3 responses: ValueError'),
  ],
)
def test_what_reads_a_row_is_tried_on_one_of_the_data(name, right, wrong, reason):
  spec = f'tests.helpers.shaped:{name}'
  batched = (spec,) if name == 'of_question' else ()
  config = dataclasses.replace(tiny.GRADING, rewards=(spec,), batched=batched)
  pool.check(config, VERIFIER)  # without data it cannot be tried
  pool.check(config, VERIFIER, right)
  with pytest.raises(InputError, match=reason):
    pool.check(config, VERIFIER, wrong)


def test_only_what_is_asked_for_is_sent(monkeypatch):
  sent, ask = [], Worker.ask
  monkeypatch.setattr(Worker, 'ask', lambda *args: sent.append(args[1]) or ask(*args))
  config = dataclasses.replace(tiny.GRADING, workers=1, rewards=('overlong',), overlong_buffer=4)
  facts = {'length': 8, 'max_response': 10, 'tokens': np.arange(8), 'level': 3}
  with pool.Grader(config, VERIFIER) as running:
    (verdict,) = running.grade([r'\boxed{1}'], ['1'], facts=[lambda: facts])
  assert sent == [[r'\boxed{1}', '1', 'math', {'length': 8, 'max_response': 10}]]
  assert verdict.reward == -0.5 and verdict.correct
