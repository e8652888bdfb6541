"""Dynamic sampling: the groups that a step draws, trains on, drops and leaves, against NumPy."""

import contextlib
import dataclasses
import math
import types

import numpy as np
import pytest

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.algorithm.settings import ReplayConfig
from exgrpo_jax.datatypes import Cursor, Experience, Question, Questions, QuestionSet, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import generation
from exgrpo_jax.rollout import dynamic, partial, stages
from exgrpo_jax.rollout.settings import LogprobCheckConfig, RolloutConfig
from exgrpo_jax.training import loop
from tests.helpers import buffers
from tests.helpers.decoding import ScriptedSampler

SEED, SIZE, Q, K = 3, 60, 4, 3
RIGHT, WRONG = Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')
STORED = (0, 3, 6, 7, 9)  # rows in the buffer; their fresh responses have equal rewards


def is_mixed(row):
  """Every third question gets both rewards; the others get only 0 or only 1."""
  return row % 3 == 2


class Rows(Questions):
  """Questions that consist only of a row number."""

  def __len__(self):
    return SIZE

  def read(self, rows):
    return [Question(int(row), (), str(row), 'math', '', '') for row in rows]

  def select(self, rows):
    raise NotImplementedError


class Judged:
  """A grader that identifies a question by its answer and has all verdicts at once."""

  def __init__(self):
    self.new = {}

  def submit(self, key, submission):
    row = int(submission.answer)
    self.new[key] = RIGHT if row % 3 == 1 or (is_mixed(row) and key[1] == 0) else WRONG

  def collect(self):
    found, self.new = self.new, {}
    return found


def setup(**values):
  config = RolloutConfig(questions=Q, group_size=K, slots=6, **values)
  data = QuestionSet('numbers', Rows(), [np.array([row], np.int32) for row in range(SIZE)])
  unused = dict(meshes=None, score_spec=None, logprob_check=LogprobCheckConfig())
  return stages.RolloutSetup(
    config=config,
    replay_config=ReplayConfig(),
    objective_config=objective.ObjectiveConfig(),
    tokenizer=types.SimpleNamespace(decode=str),
    seed=SEED,
    data=data,
    sampler=ScriptedSampler(lambda request: [request.question, request.sample]),
    **unused,
  )


def taken_steps(rollout, buffer, steps):
  """Yield each step's (plan, graded groups, metrics), without updating policy or buffer."""
  cursor, left, grader = Cursor(), (), Judged()
  for step in range(1, steps + 1):
    planned = stages.plan_step(rollout, buffer, cursor, step, left)
    plan, responses, measured = dynamic.sample(rollout, None, planned, grader)
    graded = stages.collect_verdicts(rollout, plan, responses, grader)
    yield planned, graded, measured | dynamic.metrics(rollout, graded)
    cursor, left = graded.plan.cursor, graded.partial_groups


def rows_of(plan):
  return [question.row for question in plan.questions]


def generator(purpose, place):
  return np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(purpose, place)))


class Stream:
  """A second implementation of the question stream, without retirement."""

  def __init__(self):
    self.epoch, self.rest = -1, []

  def draw(self, count, taken):
    rows = []
    while len(rows) < count:
      if not self.rest:
        self.epoch += 1
        self.rest = generator(7, self.epoch).permutation(SIZE).tolist()
      if (row := self.rest.pop(0)) not in taken and row not in rows:
        rows.append(row)
    return rows


def expected(stream, number, waiting, planned, factor):
  """Simulate a step without partial rollouts: (trained, dropped, left) rows, number drawn."""
  rows = rows_of(planned)[len(waiting) :]
  replayed = [row for row, drawn in zip(rows, planned.is_drawn[len(waiting) :]) if drawn]
  first = stream.draw(max(0, Q - len(replayed) - len(waiting)), [*waiting, *replayed])
  assert sorted(rows) == sorted([*replayed, *first])
  useful = [*waiting, *(row for row in rows if row in replayed or is_mixed(row))]
  useless = [row for row in rows if row not in useful]
  drawn, most = len(first), math.floor(factor * (Q - len(replayed)))
  while len(useful) < Q and drawn < most:
    share = max(1, drawn - len(useless)) / drawn  # of the drawn groups
    count = min(math.ceil((Q - len(useful)) / share), Q, most - drawn)
    rows += (new := stream.draw(count, [*waiting, *rows]))
    useful += [row for row in new if is_mixed(row)]
    useless += [row for row in new if not is_mixed(row)]
    drawn += count
  chosen = [*useful[:Q], *useless[: max(0, Q - len(useful))]]
  order = generator(15, number).permutation(len(chosen))
  dropped = [row for row in useless if row not in chosen]
  return [chosen[place] for place in order], dropped, useful[Q:], drawn


@pytest.mark.parametrize('stored', [(), STORED], ids=['fresh', 'replay'])
@pytest.mark.parametrize('factor', [1.5, 2.5, 6.0])
def test_a_step_trains_on_the_simulated_groups(factor, stored):
  entries = {row: buffers.entry(0.5, 1, buffers.trajectory(row, 1, step=1)) for row in stored}
  buffer = replay.Buffer(entries, started=bool(stored))
  stream, waiting, totals = Stream(), [], np.zeros(4, int)
  steps = taken_steps(setup(dynamic_sampling=factor), buffer, 12)
  for number, (planned, graded, measured) in enumerate(steps, 1):
    trained, dropped, left, drawn = expected(stream, number, waiting, planned, factor)
    assert rows_of(graded.plan) == [*trained, *dropped]
    assert [group.question_row for group in graded.partial_groups] == left
    fresh = [row for row, drawn in zip(trained, graded.plan.is_drawn) if not drawn]
    filled = len(fresh) - sum(map(is_mixed, fresh))
    assert measured == {
      'groups/drawn': drawn,
      'groups/dropped': len(dropped),
      'groups/filled': filled,
      'length/dropped': 2 * K * len(dropped),
    }
    assert sum(planned.is_drawn) == (Q // 2 if stored else 0)
    totals += (len(dropped), filled, len(left), drawn)
    waiting = left
    for group, responses in zip(graded.plan.questions, graded.responses):
      assert {tuple(one.tokens) for one in responses} <= {(group.row, k) for k in range(K)}
  has_dropped, has_filled, has_left, _ = totals > 0
  assert has_dropped and has_filled == (factor < 6) and (has_left or factor < 6)


@pytest.mark.parametrize('factor', [1.5, 8.0])
@pytest.mark.parametrize('in_flight', [4, 10])
def test_with_partial_rollouts_no_informative_group_is_lost(in_flight, factor):
  config = dict(partial=True, max_groups_in_flight=in_flight, max_staleness=2)
  rollout = setup(dynamic_sampling=factor, **config)
  stream, before, filled = Stream(), [], 0
  for number, (planned, graded, measured) in enumerate(
    taken_steps(rollout, replay.Buffer(), 15), 1
  ):
    assert rows_of(planned)[: len(before)] == before and len(rows_of(planned)) == in_flight
    finished, left = rows_of(graded.plan), [one.question_row for one in graded.partial_groups]
    drawn = stream.draw(measured['groups/drawn'], before)
    assert sorted([*finished, *left]) == sorted([*before, *drawn]) and len(left) <= in_flight
    assert len(finished) == Q + graded.num_dropped and not any(map(is_mixed, finished[Q:]))
    useless = [row for row in finished if not is_mixed(row)]
    assert measured['groups/filled'] == len(useless) - graded.num_dropped
    if measured['groups/filled']:
      assert len(finished) >= math.floor(factor * Q)
    ages = [number - one.first_step(number) for own in graded.responses for one in own]
    assert max(ages) <= 2
    before, filled = left, filled + measured['groups/filled']
  assert (filled > 0) == (factor < 8)


def test_the_pass_rate_of_all_fresh_groups_decides_when_replay_starts():
  """A third of the mixed groups' responses are right. The dropped groups raise the pass rate."""
  rollout = setup(dynamic_sampling=6.0)
  _, graded, _ = next(taken_steps(rollout, replay.Buffer(), 1))
  verdicts = [verdict.correct for group in graded.verdicts for verdict in group]
  of_trained, of_all = np.mean(verdicts[: Q * K]), np.mean(verdicts)
  assert of_trained == pytest.approx(1 / 3) and of_all > 0.4
  config = types.SimpleNamespace(
    replay=ReplayConfig(ratio=0.5, start_pass_rate=0.4),
    objective=objective.ObjectiveConfig(),
    rollout=rollout.config,
  )
  run = types.SimpleNamespace(
    experiment=types.SimpleNamespace(config=config),
    rollout=rollout,
    clock=lambda _: contextlib.nullcontext(),
  )
  unread = dict(scores=(), batch=None, sampling={}, mismatch={})
  replays = [None] * len(graded.responses)
  experience = Experience(**graded._asdict(), replays=replays, **unread)
  buffer, _ = loop.remember(run, replay.Buffer(), experience)
  assert buffer.started
  solved = {row for row in rows_of(graded.plan) if row % 3 == 1}
  assert {*buffer.retired_epoch} == solved and solved


@pytest.mark.parametrize(
  ('rewards', 'difficulty', 'expected'),
  [
    ([0, 0, 0], 'all', False),
    ([1, 1, 1], 'all', False),
    ([0, 1, 1], 'all', True),
    ([0.5, 0.5 + 1e-12, 0.5], 'all', False),  # equal in float32
    ([0.5, 0.75, 0.5], 'all', True),
    ([1, 0, 0, 0], 'easy', False),
    ([1, 0, 0, 0], 'hard', True),
  ],
)
def test_a_group_is_informative_if_its_rewards_differ_and_it_is_not_masked(
  rewards, difficulty, expected
):
  verdicts = [Verdict(reward, 'correct' if reward == 1 else 'wrong') for reward in rewards]
  assert partial.is_informative(ReplayConfig(difficulty=difficulty), verdicts) == expected


@pytest.mark.parametrize('mask', [False, True])
def test_a_group_is_dropped_if_all_its_rows_are_masked(mask):
  """The responses to every other question are truncated."""
  rollout = setup(dynamic_sampling=14.0, max_response=3)
  rollout = dataclasses.replace(
    rollout,
    objective_config=objective.ObjectiveConfig(mask_truncated=mask),
    sampler=ScriptedSampler(lambda request: [request.question] * (3 + request.question % 2)),
  )
  trained = set()
  for _, graded, measured in taken_steps(rollout, replay.Buffer(), 4):
    trained |= {*rows_of(graded.plan)[:Q]}
    assert measured['groups/filled'] == 0
  assert all(map(is_mixed, trained)) and any(row % 2 for row in trained) != mask


def test_the_metrics_of_rounds_are_merged(monkeypatch):
  rounds = [
    (30, {'rollout/slots_busy': 0.5, 'environment/turns_max': 4, 'environment/seconds': 2.0}),
    (10, {'rollout/slots_busy': 0.9, 'environment/turns_max': 3, 'environment/seconds': 1.0}),
    (0, {}),
  ]
  for _, measured in rounds[:2]:  # an environment's own counts are summed, whatever their names
    measured |= {'environment/hints_max': 2, 'environment/hits_mean': 1}
  expected = {
    'rollout/slots_busy': pytest.approx(0.6),
    'environment/turns_max': 4,
    'environment/seconds': 3.0,
    'environment/hints_max': 4,
    'environment/hits_mean': 2,
  }
  assert dynamic.merged(rounds) == expected
  # A round's weight is the number of tokens that it has generated: two in each response.
  monkeypatch.setattr(dynamic, 'merged', lambda rounds: {'tokens': sum(own for own, _ in rounds)})
  _, _, measured = next(taken_steps(setup(dynamic_sampling=6.0), replay.Buffer(), 1))
  assert measured['tokens'] == 2 * K * measured['groups/drawn']


def test_a_step_cannot_draw_more_questions_than_exist(recorded):
  """The recorded run has 12 questions; 4 + 2.25 * 4 are too many."""
  values = dict(questions=4, dynamic_sampling=2.25)
  config = recorded.experiment.config
  changed = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **values))
  opened = dataclasses.replace(recorded.experiment, config=changed)
  with pytest.raises(InputError, match=r'dynamic_sampling=2.25: a step may draw up to 13 '):
    generation.make_rollout(opened, recorded.data)
