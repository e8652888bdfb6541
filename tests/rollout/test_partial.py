"""Which groups a step trains on, and the bookkeeping of responses that span steps."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Response, Span, Turn, Verdict
from exgrpo_jax.experiment import generation
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import partial, scoring, stages
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.runtime.randomness import Purpose


def response(length, spans=(), **values):
  """Make a response of `length` tokens with log-probabilities -1, -2, and so on."""
  logp = -np.arange(1, length + 1, dtype=np.float32)
  tokens = np.arange(length, dtype=np.int32)
  return Response(
    tokens=tokens, logp=logp, entropy=-logp, truncated=False, spans=tuple(spans), **values
  )


@pytest.mark.parametrize(
  ('begun', 'complete', 'expected'),
  [
    ([5, 5, 5], [True, False, False], None),  # two are needed
    ([5, 5, 5], [True, False, True], [0, 2]),
    ([5, 5, 5], [True, True, True], [0, 1]),  # in the order drawn
    ([5, 4, 3], [True, True, True], [1, 2]),  # the oldest
    ([5, 2, 5], [True, False, True], [0, 2]),
    ([5, 1, 5], [True, False, True], None),  # at step 6 the second one would be too old
    ([5, 1, 5], [True, True, True], [0, 1]),
    # Step 6 trains on only two groups, but all three unfinished groups must be trained on by then.
    ([5, 5, 2, 2, 2], [True, True, False, False, False], None),
    ([5, 5, 2, 2, 2], [True, True, True, False, False], [0, 2]),
  ],
)
def test_a_step_trains_on_the_oldest_complete_groups_unless_others_would_get_too_old(
  begun, complete, expected
):
  assert partial.trained(begun, complete, step=5, questions=2, max_age=4) == expected


@pytest.mark.parametrize(
  ('questions', 'in_flight', 'max_age', 'oldest'), [(1, 3, 2, 2), (3, 12, 3, 3), (4, 4, 1, 0)]
)
def test_no_group_gets_too_old_and_each_is_trained_on_once(questions, in_flight, max_age, oldest):
  """This holds for groups of any duration. Each step continues until it can train."""
  rng = np.random.default_rng(0)
  left = {}  # group -> (first step, remaining duration)
  names, trained, ages = itertools.count(), [], []
  for step in range(200):
    while len(left) < in_flight:
      left[next(names)] = step, rng.choice([1, 3, 1000])
    while True:
      groups = list(left)
      begun, missing = zip(*left.values())
      if chosen := partial.trained(begun, [m <= 0 for m in missing], step, questions, max_age):
        break
      left = {name: (first, missing - 1) for name, (first, missing) in left.items()}
    assert len(chosen) == questions
    for place in chosen:
      trained.append(groups[place])
      ages.append(step - left.pop(groups[place])[0])
  assert max(ages) == oldest
  assert len(set(trained)) == len(trained)
  assert set(trained) | set(left) == set(range(next(names)))


def test_a_response_records_the_tokens_of_each_step():
  config = RolloutConfig(partial=True)
  before = response(3, [Span(2, 1), Span(4, 2)], is_complete=False, tis_weight=np.ones(3))
  now = partial.continued(config, before, response(5), 6)
  assert now.spans == (Span(2, 1), Span(4, 2), Span(6, 2)) and now.is_complete
  assert now.tis_weight is before.tis_weight
  assert partial.continued(config, before, response(3, is_complete=False), 6).spans == before.spans
  for step, count in ((2, 0), (3, 1), (4, 1), (5, 3), (6, 3), (7, 5)):
    assert now.tokens_before(step) == count
  assert now.first_step(6) == 2 and EMPTY_RESPONSE.first_step(6) == 6


def test_metrics_weigh_ages_by_tokens():
  told = response(6, [Span(4, 4), Span(5, 2)], turns=(Turn(1, 4, 0.0),))  # one sampled token each
  groups = [[response(3, [Span(2, 1), Span(4, 2)])], [response(1, [Span(5, 1)])], [told]]
  measured = partial.metrics(5, groups, remaining=[None] * 7)
  assert measured == {'staleness/mean': 6 / 6, 'staleness/max': 3, 'staleness/groups_left': 7}
  assert partial.metrics(5, [[response(3)]], remaining=[]) == {}


def test_only_tokens_of_the_step_get_the_trainers_log_probabilities():
  """Only these tokens get new weights, because earlier tokens belong to earlier policies."""
  begun = response(3, [Span(4, 2), Span(5, 1)], tis_weight=np.float32([0.5, 0.25]))
  idle = response(2, [Span(4, 2)], tis_weight=np.float32([0.1, 0.2]))
  fresh = response(2, [Span(5, 2)])
  trainer = [np.float32([7, 7, -2]), np.float32([-1, -4])]
  found = stages.recomputed([[begun, idle], [fresh]], trainer, 1.5, step=5)
  np.testing.assert_array_equal(found[0][0].logp, np.float32([-1, -2, -2]))
  np.testing.assert_array_equal(found[0][0].tis_weight, np.float32([0.5, 0.25, 1.5]))
  assert found[0][1] is idle
  np.testing.assert_array_equal(found[1][0].logp, trainer[1])
  np.testing.assert_allclose(found[1][0].tis_weight, [1, np.exp(-2)], rtol=1e-6)


def test_only_tokens_of_the_step_are_compared_with_the_trainer():
  begun, fresh = response(3, [Span(4, 2), Span(5, 1)]), response(2, [Span(5, 2)])
  trainer = [np.float32([7, 7, -3.5]), np.float32([-1, -2])]
  assert scoring.differences(trainer, [begun, fresh], 5) == {
    'rollout_mismatch/logprob_mean': pytest.approx(0.5 / 3),
    'rollout_mismatch/logprob_max': 0.5,
  }


def test_by_default_enough_groups_are_in_flight_to_keep_the_slots_busy(recorded):
  def in_flight(**values):
    config = dataclasses.replace(recorded.rollout.config, questions=3, group_size=4, **values)
    return config.groups_in_flight

  assert in_flight(partial=False, max_groups_in_flight=9) == 3
  assert in_flight(partial=True, max_groups_in_flight=9) == 9
  assert in_flight(partial=True, slots=5, max_staleness=8) == 3 + 3 * 2
  assert in_flight(partial=True, slots=99, max_staleness=2) == 9  # more would get too old


class Judged:
  """A grader that judges every response wrong."""

  def __init__(self):
    self.new = {}

  def submit(self, key, _):
    self.new[key] = Verdict(0.0, 'wrong')

  def collect(self):
    found, self.new = self.new, {}
    return found


@pytest.mark.full
def test_neither_steps_nor_slots_change_the_tokens_of_a_response(recorded):
  """Compare four steps under one policy with a single step that finishes all its groups."""
  params = jax.device_put(
    recorded.steps[9].params, jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  own = dict(questions=2, max_groups_in_flight=6, slots=5, max_staleness=4)

  def made(carry):
    config = dataclasses.replace(recorded.rollout.config, partial=carry, **own)
    return generation.stages_of(recorded.experiment, recorded.data, Purpose.ROLLOUT, rollout=config)

  rollout = made(carry=True)
  decode_params = model.decode_layout(recorded.experiment.model, params, recorded.experiment.meshes)
  plan = stages.plan_step(rollout, replay.Buffer(), Cursor(), 1)
  rows = [question.row for question in plan.questions]
  at_once, _ = stages.generate(made(carry=False), decode_params, plan, lambda *_: None)
  found, begun_before, grader = {}, 0, Judged()
  for step in range(2, 6):
    responses, _ = stages.generate(rollout, decode_params, plan, grader.submit)
    trained = stages.collect_verdicts(rollout, plan, responses, grader)
    for group in trained.partial_groups:
      assert len(group.verdicts) == sum(one.is_complete for one in group.responses)
    found |= dict(zip((question.row for question in trained.plan.questions), trained.responses))
    begun_before += sum(len(one.spans) > 1 for group in trained.responses for one in group)
    plan = stages.plan_step(rollout, replay.Buffer(), plan.cursor, step, trained.partial_groups)
    assert partial.drawn_in(plan) == [group.drawn for group in trained.partial_groups] + [step] * 2
  assert begun_before > 2 and {*rows} <= {*found}
  for row, group in zip(rows, at_once):
    for one, other in zip(found[row], group, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
