"""What capacity compiles is the largest that a run asks for."""

import dataclasses

import jax
import numpy as np
import pytest

from exgrpo_jax import experiment
from exgrpo_jax.padding import length_buckets
from exgrpo_jax.performance import memory, programs
from exgrpo_jax.rollout import scoring
from tests.performance.shapes import SMALL


@pytest.fixture
def rollout(parsed):
  """Limits that no power of two meets: 700 + 1,800 tokens."""
  return dataclasses.replace(parsed.rollout, max_prompt=700, max_response=1800, slots=8)


@pytest.fixture
def spec(parsed, mesh):
  """Updates and scoring in passes of 4,999 tokens, which is one row of 2,500, or two of 2,048."""
  whole = experiment.update_spec(parsed, SMALL, mesh)
  return dataclasses.replace(
    whole, gradient=dataclasses.replace(whole.gradient, tokens_per_microbatch=4999)
  )


@pytest.fixture
def arguments(monkeypatch, mesh):
  """A function of a program and its arguments: the shapes that it is compiled for."""
  monkeypatch.setattr(
    programs, '_measure', lambda lowered: [leaf.shape for leaf in jax.tree.leaves(lowered.in_avals)]
  )

  def lower(program, *args):
    with jax.set_mesh(mesh):
      return program(*args)

  return lower


def test_scoring_is_compiled_for_the_most_tokens_that_a_pass_can_have(
  rollout, spec, mesh, arguments, monkeypatch
):
  shapes = arguments(
    programs.score, rollout, spec, memory.step_arrays(spec, spec.mesh).state.params
  )
  asked = []

  def stub(_config, _params, tokens_BT, *_):
    asked.append(tokens_BT.shape)
    return np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)

  monkeypatch.setattr(scoring, 'score_tokens', stub)
  one = np.zeros(1, np.int32)
  scoring.score(
    SMALL,
    {},
    mesh,
    [(one, np.zeros(n - 1, int)) for n in length_buckets(2500) for _ in range(160 * mesh.size)],
    limit=rollout.longest_row,
    tokens_per_pass=spec.gradient.tokens_per_microbatch,
    pad_id=0,
    temperature=1.0,
    logit_chunk=64,
  )
  largest = max(asked, key=lambda shape: (np.prod(shape), shape[1]))
  assert largest == (13 * mesh.size, 384)
  assert largest in shapes


def test_the_update_is_compiled_for_the_most_tokens_that_a_pass_can_have(rollout, spec, arguments):
  shapes = arguments(programs.accumulate, rollout, spec, memory.step_arrays(spec, spec.mesh))
  assert (13, 384) in [shape[1:] for shape in shapes]


def test_decoding_is_compiled_for_the_longest_cache_and_prefill_for_the_most_tokens(
  rollout, spec, arguments, mesh
):
  params = memory.step_arrays(spec, spec.mesh).decode_params
  decode = arguments(programs.decode, rollout, SMALL, spec.mesh, params)
  G, H = SMALL.num_kv_heads, SMALL.head_size
  assert (8, G, H, 2500) in decode and (8, G, 2500, H) in decode
  prefill = arguments(programs.prefill, rollout, SMALL, spec.mesh, params)
  assert (min(rollout.prompts, mesh.size), 700) in prefill  # one for each part of the rows
