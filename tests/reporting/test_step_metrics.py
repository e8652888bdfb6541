"""The metrics of a step, worked out by hand."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Plan, Question, Response, Trajectory, Verdict
from exgrpo_jax.reporting import step_rows

K = 3
CONFIG = replay.ReplayConfig()


def question(row):
  return Question(row=row, messages=(), answer='', kind='math', solution='', source='s')


def response(length, truncated=False):
  tokens_T, values_T = np.zeros(length, np.int32), np.zeros(length, np.float32)
  return Response(tokens=tokens_T, logp=values_T, entropy=values_T, truncated=truncated)


def trajectory(step):
  values_T = np.zeros(2, np.float32)
  return Trajectory(tokens=np.zeros(2, np.int32), logp=values_T, reward=1.0, step=step)


def entry(correctness, *trajectories):
  return replay.Entry(correctness=correctness, prompt_length=3, trajectories=trajectories)


def stored(routes=None):
  nothing = np.zeros(0, np.float32)
  return Trajectory(tokens=nothing, logp=nothing, reward=1.0, step=1, routes=routes)


RIGHT, WRONG, NO_ANSWER, TIMED_OUT, CRASHED = (
  Verdict(reward=float(outcome == 'correct'), outcome=outcome, reason='')
  for outcome in step_rows.OUTCOMES
)
# Step 10 has three groups: one with one success in three, one that replays a trajectory of step 4
# and solves the rest, and one that solves nothing.
PLAN = Plan(
  step=10,
  cursor=Cursor(2),
  replay_started=True,
  questions=tuple(map(question, range(3))),
  prompts=(np.zeros(1, np.int32),) * 3,
  candidates=((), (trajectory(4),), ()),
  is_drawn=(False, True, False),
)
RESPONSES = [
  [response(1), response(2), response(3)],
  [response(4), response(6, truncated=True)],
  [response(2), response(2), response(4, truncated=True)],
]
REPLAYS = [None, trajectory(4), None]
VERDICTS = [[RIGHT, WRONG, WRONG], [RIGHT, RIGHT], [WRONG] * 3]


def rollout_metrics(plan=PLAN, responses=RESPONSES, replays=REPLAYS, verdicts=VERDICTS):
  return step_rows.rollout_metrics(plan, responses, replays, verdicts)


def test_the_metrics_of_a_step():
  assert rollout_metrics() == {
    'reward': 3 / 8,
    'reward_std': pytest.approx((3 * 5) ** 0.5 / 8),  # sqrt(p (1 - p))
    'reward_std_within': pytest.approx(2**0.5 / 9),  # one success in three, and two equal groups
    'pass_rate/all': 3 / 8,
    'pass_rate/fresh': 1 / 6,
    'pass_rate/replay': 1.0,
    'groups/zero_advantage': pytest.approx(2 / 3),
    'length/mean': 3.0,
    'length/max': 6,
    'length/total': 24,
    'length/truncated': 2 / 8,
    'epoch': 2,
    'replay/questions': 1,
    'replay/rows': 1,
    'replay/age_mean': 6.0,
    'replay/age_max': 6,
    'grading/correct': 3 / 8,
    'grading/wrong': 5 / 8,
    'grading/no_answer': 0,
    'grading/timed_out': 0,
    'grading/crashed': 0,
  }


def test_the_replayed_reward_counts_in_the_variance_of_its_group():
  failed = [VERDICTS[0], [WRONG, WRONG], VERDICTS[2]]  # with the replayed success: 0, 0, 1
  assert rollout_metrics(verdicts=failed)['groups/zero_advantage'] == pytest.approx(1 / 3)


def test_rewards_that_differ_by_less_than_float32_shows_are_equal():
  """Advantages are made of them in float32."""
  third = [WRONG._replace(reward=0.3), WRONG._replace(reward=0.1 + 0.2), WRONG._replace(reward=0.3)]
  assert third[0].reward != third[1].reward
  metrics = rollout_metrics(verdicts=[VERDICTS[0], [RIGHT, WRONG], third])
  assert metrics['groups/zero_advantage'] == pytest.approx(1 / 3)


def test_without_replay_there_is_no_replay_pass_rate_and_no_age():
  first = dict(questions=PLAN.questions[:1], prompts=PLAN.prompts[:1], candidates=((),))
  plan = dataclasses.replace(PLAN, **first)
  names = set(rollout_metrics(plan, RESPONSES[:1], [None], VERDICTS[:1]))
  assert not names & {'pass_rate/replay', 'replay/age_mean', 'replay/age_max'}
  assert 'pass_rate/fresh' in names


def test_any_rewards_are_averaged_and_correctness_alone_decides_the_pass_rate():
  odd = [[RIGHT._replace(reward=-2.0), WRONG._replace(reward=5.0), WRONG], *VERDICTS[1:]]
  metrics = rollout_metrics(verdicts=odd)
  assert metrics['reward'] == 5 / 8 and metrics['pass_rate/all'] == 3 / 8


def test_the_shares_of_the_grading_outcomes():
  metrics = rollout_metrics(
    verdicts=[[RIGHT, NO_ANSWER, TIMED_OUT], [RIGHT, WRONG], [CRASHED, TIMED_OUT, TIMED_OUT]]
  )
  assert {name: value * 8 for name, value in metrics.items() if name.startswith('grading/')} == {
    'grading/correct': 2,
    'grading/wrong': 1,
    'grading/no_answer': 1,
    'grading/timed_out': 3,
    'grading/crashed': 1,
  }


def test_the_metrics_of_the_buffer():
  one, other = stored(), stored(np.zeros((5, 2, 3), np.uint16))
  of_questions = {1: entry(0.0, one), 2: entry(2 / 3, one, other), 5: entry(2 / 3, other)}
  buffer = replay.Buffer(entries=of_questions, retired_epoch={7: 0, 8: 1}, started=True)
  bucketed = replay.Bucketed(buffer, replay.buckets(CONFIG, buffer, K))
  assert step_rows.buffer_metrics(bucketed, K) == {
    'buffer/questions': 3,
    'buffer/retired': 2,
    'buffer/trajectories': 4,
    'buffer/started': True,
    'buffer/route_bytes': 2 * 5 * 2 * 3 * 2,
    'buffer/bucket_0': 1,
    'buffer/bucket_1': 0,
    'buffer/bucket_2': 2,
  }
  empty = step_rows.buffer_metrics(replay.Bucketed(replay.Buffer(), {}), K)
  assert set(empty.values()) == {0}
