"""A step's numbers, worked by hand, and the alarms."""

import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Plan, Question, Response, Trajectory, Verdict
from exgrpo_jax.reporting import step_metrics

K = 3
CONFIG = replay.Config(
  ratio=0.5,
  start_pass_rate=0.0,
  sigma=1.0,
  question_selection='gaussian',
  trajectory_selection='newest',
  bucket_by='correctness',
  difficulty='all',
  count_replayed=True,
  max_trajectories=8,
)


def response(length, truncated=False):
  return Response(
    np.zeros(length, np.int32),
    np.zeros(length, np.float32),
    np.zeros(length, np.float32),
    truncated,
  )


def trajectory(step):
  return Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), 1.0, step)


RIGHT, WRONG = Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')
# One group half solved, one that replays step 4 in step 10 and solves all else, one not solved.
PLAN = Plan(
  10,
  2,
  True,
  tuple(Question(row, (), '', 'math', '', 's') for row in range(3)),
  (np.zeros(1, np.int32),) * 3,
  ((), (trajectory(4),), ()),
)
RESPONSES = [
  [response(1), response(2), response(3)],
  [response(4), response(6, truncated=True)],
  [response(2), response(2), response(4, truncated=True)],
]
REPLAYS = [None, trajectory(4), None]
VERDICTS = [[RIGHT, WRONG, WRONG], [RIGHT, RIGHT], [WRONG] * 3]


def found(plan=PLAN, responses=RESPONSES, replays=REPLAYS, verdicts=VERDICTS):
  return step_metrics.rollout_metrics(plan, responses, replays, verdicts)


def test_a_step_in_numbers():
  assert found() == {
    'reward': 3 / 8,
    'pass_rate/all': 3 / 8,
    'pass_rate/fresh': 1 / 6,
    'pass_rate/replay': 1.0,
    'zero_variance': pytest.approx(2 / 3),
    'length/mean': 3.0,
    'length/max': 6,
    'length/total': 24,
    'length/truncated': 2 / 8,
    'epoch': 2,
    'replay/rows': 1,
    'replay/age_mean': 6.0,
    'replay/age_max': 6,
    'grading/correct': 3 / 8,
    'grading/wrong': 5 / 8,
    'grading/no_answer': 0,
    'grading/timed_out': 0,
    'grading/crashed': 0,
  }


def test_the_replayed_reward_counts_in_its_groups_variance():
  failed = [VERDICTS[0], [WRONG, WRONG], VERDICTS[2]]  # with the replayed success: 0, 0, 1
  assert found(verdicts=failed)['zero_variance'] == pytest.approx(1 / 3)


def test_without_replay_there_are_no_replay_rates_and_ages():
  plan = Plan(10, 2, False, PLAN.questions[:1], PLAN.prompts[:1], ((),))
  names = set(found(plan, RESPONSES[:1], [None], VERDICTS[:1]))
  assert not names & {'pass_rate/replay', 'replay/age_mean', 'replay/age_max'}
  assert 'pass_rate/fresh' in names


def test_rewards_other_than_0_and_1_are_averaged_and_correctness_decides_the_pass_rate():
  odd = [[Verdict(-2.0, 'correct'), Verdict(5.0, 'wrong'), WRONG], *VERDICTS[1:]]
  numbers = found(verdicts=odd)
  assert numbers['reward'] == 5 / 8 and numbers['pass_rate/all'] == 3 / 8


def test_the_buffer_in_numbers():
  entries = {
    1: replay.Entry(0.0, 3, (trajectory(1),)),
    2: replay.Entry(2 / 3, 3, (trajectory(1), trajectory(2))),
    5: replay.Entry(2 / 3, 3, (trajectory(1),)),
  }
  assert step_metrics.buffer_metrics(CONFIG, replay.Buffer(entries, {7: 0, 8: 1}, True), K) == {
    'buffer/questions': 3,
    'buffer/retired': 2,
    'buffer/trajectories': 4,
    'buffer/started': True,
    'buffer/bucket_0': 1,
    'buffer/bucket_1': 0,
    'buffer/bucket_2': 2,
  }


def test_an_empty_buffer_in_numbers():
  assert set(step_metrics.buffer_metrics(CONFIG, replay.Buffer(), K).values()) == {0}


# Alarms.


def alarm(silent_steps=0, **numbers):
  return step_metrics.training_alarm(
    12, {'length/truncated': 0.9, 'pass_rate/all': 0.125} | numbers, silent_steps, 64
  )


def test_all_is_well():
  assert alarm() == ''


def test_every_response_cut_off_is_said_with_the_limit():
  assert alarm(**{'length/truncated': 1.0}) == (
    'step 12: every response was cut off at config.rollout.max_response=64 tokens. Raise it, or '
    'check that the model ever writes its end token.'
  )


@pytest.mark.parametrize(
  ('silent_steps', 'is_said'), [(1, False), (9, False), (10, True), (11, False), (20, True)]
)
def test_ten_steps_without_a_difference_in_reward_are_said(silent_steps, is_said):
  expected = (
    f'step 12: for {silent_steps} steps every group had equal rewards (pass rate 0.125), '
    'so nothing was learnt. The questions are too hard or too easy for this model, or '
    'the verifier does not read its answers: see samples/.'
  )
  assert alarm(silent_steps) == (expected if is_said else '')


SLOW, BROKEN = (Verdict(0.0, outcome, f'why it {outcome}') for outcome in ('timed out', 'crashed'))


def test_the_share_of_each_outcome_of_a_grading():
  numbers = found(
    verdicts=[[RIGHT, Verdict(0.0, 'no answer'), SLOW], [RIGHT, WRONG], [BROKEN, SLOW, SLOW]]
  )
  assert {name: value * 8 for name, value in numbers.items() if name.startswith('grading/')} == {
    'grading/correct': 2,
    'grading/wrong': 1,
    'grading/no_answer': 1,
    'grading/timed_out': 3,
    'grading/crashed': 1,
  }


@pytest.mark.parametrize(('max_failures', 'is_said'), [(0.0, True), (0.37, True), (0.375, False)])
def test_failed_gradings_over_their_limit_are_said_with_a_reason(max_failures, is_said):
  judged = [[RIGHT, SLOW, WRONG], [RIGHT, BROKEN], [SLOW, WRONG, Verdict(0.0, 'no answer')]]
  said = step_metrics.grading_alarm(12, judged, max_failures)
  assert said == is_said * (
    'step 12: of 8 gradings 2 timed out and 1 crashed, over config.grading.max_failures='
    f'{max_failures:g}; they count as wrong, with reward 0. One of them: why it timed out.'
  )


def test_gradings_that_all_came_back_are_not_spoken_of():
  assert step_metrics.grading_alarm(12, VERDICTS, 0.0) == ''
