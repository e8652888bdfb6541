"""The simulated schedule matches the real scheduler and the guarantees of partial rollouts."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks import frame, scripted
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import programs, scheduler, settings

PROMPT, BLOCK = 5, 16


@pytest.fixture
def rollout():
  """Eight questions with four samples each, in 32 slots."""
  return settings.RolloutConfig(
    questions=8, group_size=4, slots=32, partial=True, max_groups_in_flight=0, max_staleness=8
  )


@pytest.fixture(scope='module')
def bench():
  return frame.open_bench(
    frame.SIZES['tiny'],
    ['rollout.questions=4', 'rollout.group_size=4', 'rollout.slots=16', 'rollout.max_response=192'],
  )


def drawn(count):
  """Draw groups of responses with long-tailed lengths."""
  normal = np.random.default_rng(0).normal(size=(count, 4))
  return list(np.clip(40 * np.exp(normal), 1, 400).astype(int))


def taken(groups, rollout):
  return list(programs.partial_rollouts(groups, rollout, PROMPT, BLOCK))


@pytest.mark.full
def test_the_simulation_syncs_like_the_real_scheduler(bench, monkeypatch):
  """The real model's responses end at their limits, because no token ends a response."""
  syncs = []
  monkeypatch.setattr(scheduler, 'metrics', lambda found: syncs.extend(found) or {})
  lengths = np.random.default_rng(0).integers(1, 192, 40)
  bench.generate(lengths.tolist(), samples=1)
  generation = programs.generation_of(lengths, 40, PROMPT, bench.config.rollout.slots, 1)
  assert [span.steps for span in generation.spans] == [sync.steps for sync in syncs]


@pytest.mark.full
def test_the_simulation_matches_the_real_scheduler_with_partial_rollouts(bench):
  """In each step, the syncs, the ages and the re-prefilled tokens are the same."""
  rollouts = scripted.Rollouts(bench, carries=True)
  params = model.decode_layout(bench.model, bench.params, bench.meshes)
  taken = [rollouts.take(params) for _ in range(8)]
  supply = itertools.islice(scripted.drawn_groups(rollouts.config), 100)
  groups = [np.array(group.limits) for group in supply]
  prompt = bench.config.rollout.max_prompt
  for real, step in zip(taken, programs.partial_rollouts(groups, rollouts.config, prompt, 1)):
    assert [sync.steps for sync in real.syncs] == [span.steps for span in step.generation.spans]
    assert real.decoded == step.generation.tokens
    assert real.resumed == step.generation.resumed.sum()
    assert real.ages == step.ages.tolist()
    assert real.lengths.tolist() == np.concatenate(step.trained).tolist()
  assert max(max(real.ages) for real in taken) > 1 and any(real.resumed for real in taken)


@pytest.mark.parametrize(
  ('block', 'positions'),
  [
    (1, (11 + 11) + (12 + 1) + (13 + 1)),  # a free slot counts as one position
    (12, (12 + 12) + (12 + 12) + (24 + 12)),
  ],
)
def test_attention_reads_the_tokens_of_live_rows_in_whole_blocks(block, positions):
  """Two slots, prompts of 10 tokens, and responses of 1 and 3 tokens take three steps."""
  (span,) = programs.generation_of(np.array([1, 3]), 2, 10, 2, block).spans
  assert span == (3, positions / 3)


def test_every_group_is_trained_on_once_and_all_its_tokens_are_decoded(rollout):
  groups = drawn(200)
  found = taken(groups, rollout)
  trained = [tuple(lengths) for step in found for lengths in step.trained]
  assert len(trained) == len(found) * 8
  drawn_by_then = {tuple(lengths) for lengths in groups[: len(trained) + rollout.groups_in_flight]}
  assert len(set(trained)) == len(trained) and set(trained) <= drawn_by_then
  assert {tuple(lengths) for lengths in groups[:80]} <= set(trained)  # no group is lost
  decoded = sum(step.generation.tokens for step in found)
  assert sum(map(sum, trained)) <= decoded <= sum(lengths.sum() for lengths in groups)


@pytest.mark.parametrize('max_age', [1, 3])
def test_no_group_is_trained_on_too_late(rollout, max_age):
  """The limit is effective: without it, some groups would be older."""
  found = taken(drawn(200), dataclasses.replace(rollout, max_staleness=max_age))
  assert max(step.ages.max() for step in found) == max_age
  free = taken(drawn(200), dataclasses.replace(rollout, max_staleness=50))
  assert max(step.ages.max() for step in free) > max_age


def test_slots_are_busy_in_the_steady_state(rollout):
  def busy(in_flight):
    of = dataclasses.replace(rollout, max_groups_in_flight=in_flight)
    steps = programs.steady_steps(drawn(programs.num_groups(of)), of, PROMPT, BLOCK)
    tokens = sum(step.generation.tokens for step in steps)
    return tokens / 32 / sum(step.generation.decode_steps for step in steps)

  assert busy(8) < 0.5 < busy(16) < busy(0) and busy(0) > 0.93


def test_with_only_one_steps_groups_in_flight_each_step_is_a_separate_rollout(rollout):
  groups = drawn(40)
  found = taken(groups, dataclasses.replace(rollout, max_groups_in_flight=8))
  assert len(found) == 5
  for place, step in enumerate(found):
    lengths = np.concatenate(groups[8 * place : 8 * place + 8])
    nothing = np.zeros_like(lengths)
    alone = programs.decoded_in(lengths, nothing, PROMPT, 32, BLOCK, to_the_end=False)
    assert step.generation.spans == [span for span, _ in alone]
    assert step.generation.tokens == lengths.sum()
    assert step.generation.prompts == 8 and not len(step.generation.resumed)
    assert not step.ages.any() and not step.carried


def test_two_steps_by_hand(rollout):
  """Two slots, three groups in flight with one response each, and one trained group per step.

  The first step ends with the response of 2 tokens. The second ends with the response of 3 tokens,
  which fills the freed slot.
  """
  tiny = dataclasses.replace(rollout, questions=1, slots=2, max_groups_in_flight=3)
  groups = [np.array([length]) for length in (9, 2, 3, 7)]
  first, second = taken(groups, tiny)
  assert (first.trained, first.ages, first.carried) == ([groups[1]], [0], 0)
  assert [span.steps for span in first.generation.spans] == [2]
  assert first.generation.prompts == 2 and first.generation.tokens == 4
  assert [span.steps for span in second.generation.spans] == [3]
  assert second.generation.resumed.tolist() == [PROMPT + 2] and second.generation.prompts == 1
  assert [lengths.tolist() for lengths in second.trained] == [[3]]
  _, second = programs.partial_rollouts(groups, tiny, 10, block=1)
  assert second.generation.spans == [(3, (13 + 11 + 14 + 12 + 15 + 13) / 3)]
