"""The schedule of responses that span steps keeps its promises."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from exgrpo_jax.performance import carried_schedule, rollout_schedule, workload
from exgrpo_jax.performance.scripted_rollouts import Rollouts, drawn_groups
from exgrpo_jax.policy import model, sharding
from tests.performance.shapes import SMALL

PROMPT, BLOCK = 5, 16


@pytest.fixture
def rollout(parsed):
  """Eight questions of four samples in 32 slots."""
  return dataclasses.replace(
    parsed.rollout, questions=8, samples=4, slots=32, carry=True, in_flight=0, max_age=8
  )


def drawn(count, seed=0):
  """Groups of responses with a long tail."""
  rng = np.random.default_rng(seed)
  lengths = np.clip(40 * np.exp(rng.normal(size=(count, 4))), 1, 400).astype(int)
  return list(lengths)


def taken(groups, rollout):
  return list(carried_schedule.steps(groups, rollout, PROMPT, BLOCK))


def test_every_group_is_trained_once_and_all_its_tokens_are_decoded(rollout):
  groups = drawn(200)
  found = taken(groups, rollout)
  trained = [tuple(lengths) for step in found for lengths in step.trained]
  assert len(trained) == len(found) * 8
  drawn_by_then = {tuple(lengths) for lengths in groups[: len(trained) + rollout.groups_in_flight]}
  assert len(set(trained)) == len(trained) and set(trained) <= drawn_by_then
  assert {tuple(lengths) for lengths in groups[:80]} <= set(trained)  # none is forgotten
  decoded = sum(step.generation.tokens for step in found)
  assert sum(map(sum, trained)) <= decoded <= sum(lengths.sum() for lengths in groups)


@pytest.mark.parametrize('max_age', [1, 2, 3])
def test_no_group_is_trained_too_late(rollout, max_age):
  """A limit that binds; without one some would be older."""
  found = taken(drawn(200), dataclasses.replace(rollout, max_age=max_age))
  assert max(step.ages.max() for step in found) == max_age
  free = taken(drawn(200), dataclasses.replace(rollout, max_age=50))
  assert max(step.ages.max() for step in free) > max_age


def test_slots_are_busy_in_the_steady_state(rollout):
  def busy(in_flight):
    of = dataclasses.replace(rollout, in_flight=in_flight)
    groups = drawn(carried_schedule.num_groups(of))
    generations = [step.generation for step in carried_schedule.steady(groups, of, PROMPT, BLOCK)]
    tokens = sum(each.tokens for each in generations)
    return tokens / 32 / sum(each.decode_steps for each in generations)

  assert busy(8) < 0.5 < busy(16) < busy(0) and busy(0) > 0.93


def test_with_a_steps_groups_in_flight_each_step_is_a_rollout_of_its_own(rollout):
  groups = drawn(40)
  found = taken(groups, dataclasses.replace(rollout, in_flight=8))
  assert len(found) == 5
  for place, step in enumerate(found):
    lengths = np.concatenate(groups[8 * place : 8 * place + 8])
    alone = rollout_schedule.decoded(
      lengths, np.zeros_like(lengths), PROMPT, 32, BLOCK, to_the_end=False
    )
    assert step.generation.spans == [span for span, _ in alone]
    assert step.generation.tokens == lengths.sum()
    assert step.generation.prompts == 8 and not len(step.generation.resumed)
    assert not step.ages.any() and not step.carried


def test_two_steps_by_hand(rollout):
  """Two slots, groups of one response, one trained per step, of 3 that are in flight.

  The first step ends with the response of 2 tokens, the second with that of 3 in the freed slot.
  """
  tiny = dataclasses.replace(rollout, questions=1, slots=2, in_flight=3)
  groups = [np.array([length]) for length in (9, 2, 3, 7)]
  first, second = taken(groups, tiny)
  assert first == carried_schedule.Step(
    first.generation, [groups[1]], ages=np.array([0]), carried=0
  )
  assert [span.steps for span in first.generation.spans] == [2]
  assert first.generation.prompts == 2 and first.generation.tokens == 4
  assert [span.steps for span in second.generation.spans] == [3]
  assert second.generation.resumed.tolist() == [PROMPT + 2] and second.generation.prompts == 1
  assert [lengths.tolist() for lengths in second.trained] == [[3]]
  _, second = itertools.islice(carried_schedule.steps(groups, tiny, 10, block=1), 2)
  assert second.generation.spans == [(3, (13 + 11 + 14 + 12 + 15 + 13) / 3)]


def test_the_real_scheduler_does_the_same(mesh):
  """Step for step: the same syncs, ages and tokens that are prefilled anew."""
  work = workload.Workload(
    model=dataclasses.replace(SMALL, num_layers=1),
    slots=16,
    questions=4,
    samples=4,
    prompt=PROMPT,
    response=24,
    lengths='lognormal',
    microbatch=80,
    remat='none',
    chunk=16,
    repeats=1,
  )
  rollouts = Rollouts(work, mesh, carries=True, closes_up=False)
  meshes = sharding.Meshes(mesh, mesh)
  with jax.set_mesh(mesh):
    params = model.decode_layout(work.model, workload.random_params(work, mesh), meshes)
  taken = [rollouts.take(params) for _ in range(8)]
  groups = [np.array(group.limits) for group in itertools.islice(drawn_groups(work), 100)]
  found = carried_schedule.steps(groups, rollouts.config, PROMPT, 1)
  for real, step in zip(taken, found):
    assert [sync.steps for sync in real.syncs] == [span.steps for span in step.generation.spans]
    assert sum(sync.tokens for sync in real.syncs) == step.generation.tokens
    assert real.resumed == step.generation.resumed.sum()
    assert real.ages == step.ages.tolist()
    assert real.lengths.tolist() == np.concatenate(step.trained).tolist()
  assert max(max(real.ages) for real in taken) > 1 and any(real.resumed for real in taken)
