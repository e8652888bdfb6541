"""What a reward gets by the names of its parameters."""

import contextlib
import dataclasses

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, reward_functions, verifier
from tests.helpers import tiny

VERIFIER = verifier.Config(require_think=False, require_box=True)


def made(function):
  """The RewardFunction of a function that no module has."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reward_functions.importlib, 'import_module', lambda _: function)
    function.itself = function
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


@pytest.mark.parametrize('value', [float('nan'), None, '1', [1.0], np.float32('inf')])
def test_what_is_no_finite_number_is_an_error_in_a_batch_too(value):
  with pytest.raises(ValueError, match=r'returned .*, not a'):
    made(lambda: [0.0, value]).of_batch([{}, {}])


def test_a_batch_has_one_reward_for_each_response():
  with pytest.raises(ValueError, match='returned 1 numbers for 2 responses'):
    made(lambda: [0.0]).of_batch([{}, {}])


def test_numpy_scalars_are_numbers():
  found = made(lambda: np.array([0.5, 2], np.float32)).of_batch([{}, {}])
  assert found == [0.5, 2.0] and {type(one) for one in found} == {float}


def test_a_column_that_no_row_has_is_refused_with_those_there_are():
  config = dataclasses.replace(
    tiny.GRADING, rewards=('correctness', 'tests.helpers.shaped:weighed_length')
  )
  pool.check(config, VERIFIER)  # without data it cannot be tried
  pool.check(config, VERIFIER, {'level': 2})
  with pytest.raises(
    InputError,
    match=r"shaped:weighed_length' cannot be used \(ValueError: it asks for 'level', which is no c"
    r"olumn of the data \(they have: 'lvl', 'id'\) and none of response, .*overlong_buffer\)",
  ):
    pool.check(config, VERIFIER, {'lvl': 2, 'id': 7})
  with pytest.raises(InputError, match=r"tried on .*, '1', 'correct'\): TypeError"):
    pool.check(config, VERIFIER, {'level': 'hard'})


def test_what_reads_the_question_is_tried_on_one_of_the_data():
  batched = 'tests.helpers.shaped:of_question'
  config = dataclasses.replace(tiny.GRADING, rewards=(batched,), batched=(batched,))
  pool.check(config, VERIFIER)
  for text, why in (
    ('7+0', ''),
    ('seven', r'tried on a batch of 3 responses: ValueError: invalid l'),
  ):
    row = {'question': text, 'messages': [{'role': 'user', 'content': text}]}
    with pytest.raises(InputError, match=why) if why else contextlib.nullcontext():
      pool.check(config, VERIFIER, row)


def test_only_what_is_asked_for_is_sent():
  sent = []
  config = dataclasses.replace(tiny.GRADING, workers=1, rewards=('overlong',), overlong_buffer=4)
  facts = {'length': 8, 'max_response': 10, 'tokens': np.arange(8), 'level': 3}
  with pytest.MonkeyPatch.context() as patch:
    original = pool.WorkerSlot.ask
    patch.setattr(pool.WorkerSlot, 'ask', lambda *args: sent.append(args[2]) or original(*args))
    with pool.Grader(config, VERIFIER) as running:
      (verdict,) = running.grade([r'\boxed{1}'], ['1'], facts=[lambda: facts])
  assert sent == [[r'\boxed{1}', '1', 'math', {'length': 8, 'max_response': 10}]]
  assert verdict.reward == -0.5 and verdict.correct
