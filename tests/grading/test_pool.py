"""Every response gets its verdict, in order. tests/workers covers workers that hang or crash."""

import dataclasses
import math
import subprocess
import sys

import pytest

from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.grading import pool, programs, verifier, worker
from exgrpo_jax.grading.pool import Submission
from exgrpo_jax.runtime import activity
from tests.helpers import tiny
from tests.helpers.stand_ins import wait_until

VERIFIER = verifier.VerifierConfig(('box',))
CONFIG = dataclasses.replace(tiny.GRADING, workers=1, time_limit=30.0)
QUICK = dataclasses.replace(CONFIG, time_limit=1.0)
RIGHT = Verdict(reward=1.0, outcome='correct', answer='1', components={'correctness': 1.0})
WRONG = Verdict(reward=0.0, outcome='wrong', answer='1', components={'correctness': 0.0})
NONE = Verdict(reward=0.0, outcome='no answer', components={'correctness': 0.0})


def grader(reward='', config=CONFIG, **changes):
  if reward:
    changes['rewards'] = (f'tests.helpers.misbehaving:{reward}',)
  return pool.Grader(dataclasses.replace(config, **changes), VERIFIER)


@pytest.fixture(scope='module')
def plain():
  with grader() as shared:
    yield shared


@pytest.fixture(scope='module')
def obedient():
  """A grader whose worker does what the response says (misbehaving.reward)."""
  with grader('reward') as shared:
    yield shared


def rewarded(reward, outcome, answer=None, name='reward'):
  """Return a verdict with one component, the reward of the function called `name`."""
  return Verdict(reward, outcome, answer=answer, components={name: reward})


def outcomes(verdicts):
  return [verdict.outcome for verdict in verdicts]


# Order, keys and outcomes.


def test_verdicts_of_several_workers_are_complete_and_in_order():
  with grader(workers=2) as running:
    verdicts = running.grade([rf'\boxed{{{n % 3}}}' for n in range(60)], ['0'] * 60)
  assert verdicts == [(WRONG if n % 3 else RIGHT)._replace(answer=str(n % 3)) for n in range(60)]


def test_collect_returns_each_verdict_once_by_key_in_submission_order(plain):
  plain.submit(('question', 1), Submission(lambda: r'\boxed{1}', '1'))
  plain.submit(('question', 0), Submission(lambda: r'\boxed{1}', '2'))
  assert plain.grade([r'\boxed{1}', 'none'], ['4', '1']) == [
    WRONG,
    NONE,
  ]  # the submissions are unaffected
  assert list(plain.collect().items()) == [(('question', 1), RIGHT), (('question', 0), WRONG)]
  assert plain.collect() == {}


def test_progress_is_reported_while_responses_are_judged(plain):
  assert plain.progress() == ''
  plain.submit(0, Submission(lambda: r'\boxed{1}', '1'))
  wait_until(lambda: plain.progress() == '1 of 1 graded')
  seen = []

  def text():
    wait_until(lambda: 'graded' in activity.now())
    seen.append(activity.now())
    return ''

  plain.submit(1, Submission(text, '1'))
  plain.collect()
  assert seen[0].startswith('1 of 2 graded (') and activity.now() == ''


def test_repeated_keys_and_unequal_lengths_are_refused(plain):
  plain.submit(0, Submission(str, ''))
  with pytest.raises(KeyError, match='key 0'):
    plain.submit(0, Submission(str, ''))
  assert plain.collect() == {0: NONE}
  with pytest.raises(ValueError, match='zip'):
    plain.grade(['a', 'b'], ['1'])


def test_any_text_reaches_the_verifier_and_the_reward(obedient):
  texts = ['\x00\n"\\', 'é\u2028𝟙', '\ud800']
  verdicts = obedient.grade([rf'{text}\boxed{{1}}' for text in texts], ['1'] * 3)
  assert verdicts == [rewarded(len(text) + 9.0, 'correct', '1') for text in texts]


def test_a_long_response_is_judged_by_its_end(plain):
  long = 'x' * 2000
  assert plain.grade(
    [rf'{long}</think>\boxed{{1}}', rf'{long}\boxed{{1}}', rf'</think>{long}\boxed{{1}}'], ['1'] * 3
  ) == [RIGHT, NONE, NONE]


def test_a_verdict_contains_the_answer_as_written(plain):
  """Long answers stay whole, so that a majority vote can tell them apart."""
  long = '+'.join(['1'] * 100)
  verdicts = plain.grade([r'So \boxed{ \frac12 }.', rf'\boxed{{{long}}}'], ['0.5', '100'])
  assert [verdict.answer for verdict in verdicts] == [r'\frac12', long]
  assert outcomes(verdicts) == ['correct', 'correct']


def test_a_verdict_records_code_blocks_and_valid_steps():
  texts = ['one two', '```python\nprint(2)\n```', 'hang']
  with grader('reward', QUICK) as running:
    for n, text in enumerate(texts):
      check = [str.islower, None, str.isupper][n]
      running.submit(n, Submission(lambda text=text: text, '', check_steps=check))
    verdicts = running.collect().values()
  assert outcomes(verdicts) == ['no answer', 'no answer', 'timed out']
  assert [verdict.has_code_block for verdict in verdicts] == [False, True, False]
  assert [verdict.valid_steps for verdict in verdicts] == [True, None, False]


def test_a_custom_verifier_decides():
  with grader(verifier='tests.helpers.chance:Chance') as running:
    verdicts = running.grade([r'\boxed{1}', r'\boxed{1}'], ['8', '0'])  # always and never right
  assert outcomes(verdicts) == ['correct', 'wrong']
  assert [verdict.answer for verdict in verdicts] == [r'\boxed{1}'] * 2


# Rewards.


def test_a_reward_gets_answer_and_outcome_but_does_not_decide_the_outcome():
  with grader('outcome_of') as running:
    assert running.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', 'a', '1']) == [
      rewarded(1.0, 'correct', '1', 'outcome_of'),
      rewarded(12.0, 'wrong', '1', 'outcome_of'),
      rewarded(3.0, 'no answer', name='outcome_of'),
    ]


def test_a_reward_that_is_not_a_finite_number_counts_as_a_crash():
  with grader('worth') as running:
    verdicts = running.grade(['nan', 'inf', 'none', 'text', 'true', 'half'], [''] * 6)
  assert outcomes(verdicts) == ['crashed'] * 4 + ['no answer'] * 2
  assert [verdict.reward for verdict in verdicts] == [0, 0, 0, 0, 1, 0.5]
  assert verdicts[0].reason.startswith('tests.helpers.misbehaving:worth: ')


def test_batched_rewards_have_no_memory_limit_and_more_time_to_start():
  config = dataclasses.replace(CONFIG, memory_limit=512, batch_timeout=7.0)
  one, batch = (
    programs.program(config, VERIFIER, is_batched=of_batch) for of_batch in (False, True)
  )
  assert (one.memory_limit, one.timeout, one.standby_delay) == (512, 60, 0.1)
  assert (batch.memory_limit, batch.timeout, batch.standby_delay) == (0, 67, math.inf)


# ---- What a worker judges of a long response, and what it imports ----

# Pairs from the grading benchmark; most model answers have one of these forms.
COMMON = (
  ('7.50', '7.5'),
  (r'\frac{7}{8}', '7/8'),
  (r'7\sqrt{3}', r'\sqrt{3}\cdot 7'),
  ('x^2+7x+1', '1+x^2+7x'),
  ('(7, 3]', '(7, 3)'),
  (r'(0,1)\cup(2,3)', r'(2,3)\cup(0,1)'),
  (r'2\begin{pmatrix}1\\2\end{pmatrix}', '(2,4)'),
  (r'\text{no}', 'yes'),
)


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('x' * 10, 'x' * 10),
    ('y' * 9 + '</think>12', '</think>12'),  # only thought is cut
    ('y' * 9 + '</think>123', None),  # the end of the thought would be lost
    ('</think>' + 'y' * 20 + '</think>1', 'y</think>1'),
    ('<think>' + 'x' * 4, None),  # its last characters could look like an answer
  ],
)
def test_a_long_response_loses_only_thought(response, expected):
  assert worker.bounded(response, 10) == expected


@pytest.mark.full
def test_a_worker_imports_sympy_only_for_an_answer_that_needs_it():
  code = f"""
import sys
from exgrpo_jax.grading import verifier, worker
for given, truth in {COMMON!r}:
  verifier.judge(chr(92) + 'boxed{{' + given + '}}', truth)
assert 'sympy' not in sys.modules and 'jax' not in sys.modules
assert verifier.is_correct(r'\\boxed{{x^{{2022}}+1}}', r'1+x^{{2022}}')
assert 'sympy' in sys.modules
"""
  subprocess.run([sys.executable, '-c', code], check=True)
