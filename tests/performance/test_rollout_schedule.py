"""The schedule is the scheduler's, without a model."""

import jax
import numpy as np
import pytest

from exgrpo_jax.performance import rollout_schedule
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import decode_loop, scheduler, token_sampling
from tests.performance.shapes import SMALL

PROMPT, LONGEST = 5, 5 + 300


def test_the_scheduler_decodes_as_often(mesh, monkeypatch):
  """With a real model whose responses end at their limits, since none of its tokens ends one."""
  lengths = np.random.default_rng(0).integers(1, 300, 40)
  spec = decode_loop.DecodeSpec(
    distribution=token_sampling.Distribution(1.0),
    slots=16,
    prompts=40,
    max_prompt=PROMPT,
    max_response=LONGEST - PROMPT,
    eos_ids=(SMALL.vocab_size,),
    pad_id=0,
  )
  steps, decode = [], decode_loop.decode

  def recorded(config, sampling, params, state, *rest):
    before = np.asarray(state.length_B)
    state, decoded = decode(config, sampling, params, state, *rest)
    steps.append(int(np.max(decoded.length_B - before)))
    return state, decoded

  monkeypatch.setattr(decode_loop, 'decode', recorded)
  params = model.init(SMALL, jax.random.key(0), mesh)
  responses = scheduler.generate(
    SMALL,
    model.decode_layout(SMALL, params, sharding.Meshes(mesh, mesh)),
    [np.ones(PROMPT, np.int32)] * len(lengths),
    list(range(len(lengths))),
    [0] * len(lengths),
    jax.random.key(0),
    spec,
    mesh,
    limits=lengths.tolist(),
  )
  assert [len(response.tokens) for response in responses] == lengths.tolist()
  generation = rollout_schedule.generation(lengths, 40, PROMPT, spec.slots, 1)
  assert [span.steps for span in generation.spans] == steps


@pytest.mark.parametrize(
  ('block', 'positions'),
  [
    (1, (11 + 11) + (12 + 1) + (13 + 1)),  # a free slot counts as one position
    (12, (12 + 12) + (12 + 12) + (24 + 12)),
  ],
)
def test_attention_reads_what_live_rows_have_written_in_whole_blocks(block, positions):
  """Two slots, prompts of 10, a response of 1 token and one of 3: three steps."""
  (span,) = rollout_schedule.generation(np.array([1, 3]), 2, 10, 2, block).spans
  assert span == (3, positions / 3)
