"""Built-in, custom and batched rewards, and the detection of code blocks."""

import asyncio
import dataclasses
import math
import re

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, programs, reward_functions, rewards, settings, verifier
from exgrpo_jax.workers import user_code
from exgrpo_jax.workers.pool import Worker
from tests.helpers import tiny

VALUES = {  # by reward, of responses
  rewards.think_format: {
    'So it is 2.\n</think>\nThe answer is 2.': 1.0,
    'So it is 2.': 0.0,
    '<think>\nSo it is 2.\n</think>\nThe answer is 2.': 1.0,
    ' \n<think>So it is 2.</think>The answer is 2.': 1.0,
    '<think><think>So it is 2.</think>The answer is 2.': 0.0,
    'Well: <think>So it is 2.</think>The answer is 2.': 0.0,
    '<think>\n</think>The answer is 2.': 0.0,
    '<think>So it is 2.': 0.0,
    'a</think>b</think>c': 0.0,
    'a</think>b<think>': 0.0,
    '\n</think>The answer is 2.': 0.0,
    'So it is 2.</think>\n': 0.0,
  },
  rewards.boxed_format: {
    r'</think>So \boxed{2}.': 1.0,
    r'\boxed{2}</think>It is 2.': 0.0,  # only in the thought
    r'\boxed{2': 0.0,
    r'\boxed{ }': 0.0,
    'The answer is 2.': 0.0,
  },
  rewards.latin_script: {
    'So x = 3, déjà vu': 1.0,
    '所以': 0.0,
    'да ab cd ef': 0.75,
    '𝑥 + α = π': 1.0,  # the only letters belong to formulas
    '3 + 4 = 7': 1.0,
  },
  rewards.has_code_block: {
    '```python\nprint(1)\n```': True,
    'Let us compute it.\n\n  ```\nx = 1': True,  # indented, and cut before its end
    'the function `f`, ``g`` and ```h``` in a line': False,
    '``\n`': False,
  },
}


@pytest.mark.parametrize(
  ('reward', 'expected'), VALUES.items(), ids=lambda x: getattr(x, '__name__', '')
)
def test_rewards_that_only_depend_on_the_text(reward, expected):
  assert {response: reward(response) for response in expected} == expected


@pytest.mark.parametrize(
  ('buffer', 'punishments'),  # by length, of a limit of 10; a buffer of 0 is a fifth of it
  [
    (4, {1: 0, 6: 0, 7: -0.25, 9: -0.75, 10: -1, 11: -1}),
    (10, {5: -0.5}),
    (0, {8: 0, 9: -0.5, 10: -1}),
  ],
)
def test_overlong_is_dapos_soft_punishment(buffer, punishments):
  for length, expected in punishments.items():
    assert rewards.overlong(length, max_response=10, overlong_buffer=buffer) == expected


# ---- The arguments of a reward, by parameter name ----

VERIFIER = verifier.VerifierConfig(('box',))


def made(function):
  """Return the RewardFunction of a local function."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(user_code, 'load', lambda _: function)
    return reward_functions.load('some.module:itself')


def test_arguments_are_selected_by_parameter_name():
  def reward(outcome, level, *others, shift=10.0, response='x', **more):
    assert not others and not more
    return len(response) + len(outcome) + level + shift

  row = {'response': 'four', 'outcome': 'wrong', 'level': 0.5, 'tokens': [1], 'other': 1}
  assert made(reward).of_one(row) == 4 + 5 + 0.5 + 10
  assert made(reward).columns == ['level']


def test_a_missing_column_is_none_alone_and_in_a_batch():
  def reward(level, bonus=None):
    is_batch = isinstance(level, list)
    assert bonus == ([7, None] if is_batch else None)
    return [-1 if one is None else one for one in level] if is_batch else float(level is None)

  assert made(reward).of_one({'length': 3}) == 1
  assert made(reward).of_batch([{'length': 3, 'bonus': 7}, {'length': 3, 'level': 2}]) == [-1, 2]


def test_an_async_reward_is_awaited_alone_and_in_a_batch():
  async def reward(length):
    await asyncio.sleep(0)
    return length

  assert made(reward).of_one({'length': 3}) == 3
  assert made(reward).of_batch([{'length': 3}, {'length': 4}]) == [3, 4]


@pytest.mark.parametrize(
  'rewards',
  [[0.0, value] for value in (float('nan'), None, '1', [1.0], np.float32('inf'), -2e10)] + [[0.0]],
)
def test_a_batch_must_return_a_finite_number_per_response(rewards):
  with pytest.raises(ValueError, match='returned '):
    made(lambda: rewards).of_batch([{}, {}])


def test_numpy_scalars_are_numbers():
  found = made(lambda: np.array([0.5, 2], np.float32)).of_batch([{}, {}])
  assert found == [0.5, 2.0] and {type(one) for one in found} == {float}


def asked(text):
  return {'question': text, 'messages': [{'role': 'user', 'content': text}]}


@pytest.mark.full
@pytest.mark.parametrize(
  ('name', 'right', 'wrong', 'reason'),
  [
    ('weighed_length', {'level': 2}, {'lvl': 2, 'id': 7}, "asks for 'level'.*'lvl', 'id'"),
    ('weighed_length', {'level': 2}, {'level': 'hard'}, 'TypeError'),
    ('of_question', asked('7+0'), asked('seven'), 'a batch of 3 responses: ValueError'),
  ],
)
def test_a_reward_that_reads_a_row_is_tried_on_a_data_row(name, right, wrong, reason):
  spec = f'tests.helpers.shaped:{name}'
  batched = (spec,) if name == 'of_question' else ()
  config = dataclasses.replace(tiny.GRADING, rewards=(spec,), batched=batched)
  pool.check(config, VERIFIER)  # not tried without data
  pool.check(config, VERIFIER, right)
  with pytest.raises(InputError, match=reason):
    pool.check(config, VERIFIER, wrong)


def test_only_requested_facts_are_sent(monkeypatch):
  sent, ask = [], Worker.ask
  monkeypatch.setattr(Worker, 'ask', lambda *args: sent.append(args[1]) or ask(*args))
  config = dataclasses.replace(tiny.GRADING, workers=1, rewards=('overlong',), overlong_buffer=4)
  facts = {'length': 8, 'max_response': 10, 'tokens': np.arange(8), 'level': 3}
  with pool.Grader(config, VERIFIER) as running:
    (verdict,) = running.grade([r'\boxed{1}'], ['1'], facts=[lambda: facts])
  assert sent == [[r'\boxed{1}', '1', 'math', {'length': 8, 'max_response': 10}]]
  assert verdict.reward == -0.5 and verdict.correct


# ---- Batched rewards get the right responses ----

SERVICE = 'tests.helpers.misbehaving:service'
CONFIG = dataclasses.replace(
  tiny.GRADING,
  workers=2,
  time_limit=30.0,
  rewards=('correctness', SERVICE),
  weights=(100.0, 1.0),
  batched=(SERVICE,),
  batch_size=4,
  batch_timeout=30.0,
)
RIGHT = r'\boxed{1}'


def grade(responses, **changes):
  with pool.Grader(dataclasses.replace(CONFIG, **changes), VERIFIER) as running:
    return running.grade(responses, ['1'] * len(responses))


def outcomes(verdicts):
  return [verdict.outcome for verdict in verdicts]


def test_batches_follow_submission_order_and_rewards_are_weighted():
  """Ten responses form batches of 4, 4 and 2: calls 2 to 4 of the process, after its trial."""
  verdicts = grade([RIGHT, 'none'] * 5)
  expected = [20, 21, 22, 23, 30, 31, 32, 33, 40, 41]
  assert [verdict.components for verdict in verdicts] == [
    {'correctness': float(n % 2 == 0), 'service': expected[n]} for n in range(10)
  ]
  assert [verdict.reward for verdict in verdicts] == [
    100 * (n % 2 == 0) + expected[n] for n in range(10)
  ]


def test_a_response_that_cannot_be_graded_is_not_in_the_batch():
  failing = 'tests.helpers.misbehaving:reward'  # its length, unless told otherwise
  verdicts = grade(
    [RIGHT, 'raise', RIGHT], rewards=('correctness', SERVICE, failing), weights=(1.0, 1.0, 0.0)
  )
  assert outcomes(verdicts) == ['correct', 'crashed', 'correct']
  assert [verdict.reward for verdict in verdicts] == [21, 0, 22]
  assert verdicts[1].components is None


@pytest.mark.full
@pytest.mark.parametrize('word', ['hang', 'die', 'fail'])
def test_a_batch_that_fails_once_is_retried(word, tmp_path):
  """In the same process after an exception, otherwise in a new one."""
  verdicts = grade([RIGHT, f'{word} {tmp_path}/once'], batch_timeout=1.0)
  assert outcomes(verdicts) == ['correct', 'no answer']
  assert [verdict.components['service'] for verdict in verdicts] == [20, 21]


@pytest.mark.full
def test_a_service_that_hangs_fails_the_rest_of_the_step_and_is_tried_again_in_the_next():
  responses = [RIGHT] * 5 + ['hang'] + [RIGHT] * 5  # the second batch hangs
  with pool.Grader(dataclasses.replace(CONFIG, batch_timeout=1.0), VERIFIER) as running:
    verdicts = running.grade(responses, ['1'] * 11)
    (later,) = running.grade([RIGHT], ['1'])
  assert outcomes(verdicts) == ['correct'] * 4 + ['timed out'] * 7
  assert {(v.reward, v.reason, v.components) for v in verdicts[4:]} == {
    (0.0, f'{SERVICE}: no rewards after 1 s (config.grading.batch_timeout)', None)
  }
  assert later.outcome == 'correct' and later.reward == 120


def test_an_exception_fails_only_its_batch_and_names_the_function():
  verdicts = grade([RIGHT] * 4 + ['fail'] + [RIGHT] * 7)
  assert outcomes(verdicts) == ['correct'] * 4 + ['crashed'] * 4 + ['correct'] * 4
  (reason,) = {verdict.reason for verdict in verdicts[4:8]}
  assert re.fullmatch(rf'{SERVICE}: OSError: the service is down \(/.*\.py:\d+\)', reason)
  (few,) = grade(['few'])
  assert few.reason == f'{SERVICE}: ValueError: it returned 0 numbers for 1 response'


def test_a_service_that_is_not_ready_in_time_has_timed_out(monkeypatch):
  """So the metric grading/timed_out includes it."""

  def late(*args, is_batched=False):
    started = program(*args, is_batched=is_batched)
    # No process is ready by then.
    return dataclasses.replace(started, timeout=0.01) if is_batched else started

  program = programs.program
  monkeypatch.setattr(programs, 'program', late)
  (verdict,) = grade([RIGHT])
  assert verdict.outcome == 'timed out' and 'not ready after 0.01 s' in verdict.reason


# ---- Validation of settings ----

MINE = 'mine:score'


@pytest.mark.parametrize(
  ('changes', 'named'),
  [
    ({'verifier': 'math_verfy'}, ["config.grading.verifier has no 'math_verfy'", "'math_verify'?"]),
    ({'rewards': ('overlng',)}, ["config.grading.rewards has no 'overlng'", "'overlong'?"]),
    ({'rewards': ()}, ['config.grading.rewards=()']),
    ({'rewards': ('correctness', 'mine:correctness')}, ["2 functions are named 'correctness'"]),
    ({'rewards': ('correctness', MINE), 'weights': (1.0,)}, ['weights=(1.0,)', 'must equal', MINE]),
    ({'weights': (math.inf,)}, ['config.grading.weights=(inf,)', 'from -100000 to 100000']),
    ({'weights': (-1e6,)}, ['config.grading.weights=(-1000000.0,)', 'from -100000 to 100000']),
    ({'batched': (MINE,)}, ['config.grading.batched', f"no '{MINE}'"]),
    ({'batched': ('correctness',)}, ["built-in 'correctness'", 'one response at a time']),
    ({'overlong_buffer': 13}, ['overlong_buffer=13', 'config.rollout.max_response=12']),
  ],
)
def test_invalid_settings_are_refused(changes, named):
  with pytest.raises(InputError) as refused:
    settings.check_rewards(dataclasses.replace(tiny.GRADING, **changes), 12)
  assert all(part in str(refused.value) for part in named), refused.value


def test_valid_settings_are_accepted():
  config = dataclasses.replace(
    tiny.GRADING,
    verifier='mine:Exact',
    rewards=('correctness', MINE),
    weights=(1.0, -0.5),
    batched=(MINE,),
    overlong_buffer=12,
  )
  settings.check_rewards(config, 12)
  settings.check_rewards(config.correctness_alone, 12)
  assert config.weight_of == {'correctness': 1.0, 'score': -0.5}
  assert config.correctness_alone.weight_of == {'correctness': 1.0}
