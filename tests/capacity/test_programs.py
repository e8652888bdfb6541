"""What capacity compiles is the largest that a run asks for."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from exgrpo_jax.capacity import arrays as held
from exgrpo_jax.capacity import programs
from exgrpo_jax.experiment import experiment
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import sharding
from exgrpo_jax.rollout import scoring
from tests.capacity.shapes import SMALL


@pytest.fixture
def rollout(parsed):
  """Limits that no power of two meets: 700 + 1,800 tokens."""
  return dataclasses.replace(parsed.rollout, max_prompt=700, max_response=1800, slots=8)


@pytest.fixture
def spec(parsed, mesh):
  """Updates and scoring in passes of 4,999 tokens, which is one row of 2,500."""
  whole = experiment.update_spec(parsed, SMALL, mesh)
  return dataclasses.replace(
    whole,
    gradient=dataclasses.replace(whole.gradient, tokens_per_microbatch=4999),
    longest_row=2500,
    max_response=1800,
  )


@pytest.fixture
def arguments(monkeypatch, mesh):
  """A function of a program and its arguments: the shapes that it is compiled for."""
  monkeypatch.setattr(
    programs,
    '_measure',
    lambda lowered, *_: [leaf.shape for leaf in jax.tree.leaves(lowered.in_avals)],
  )

  def lower(program, *args):
    with jax.set_mesh(mesh):
      return program(*args)

  return lower


def test_scoring_is_compiled_for_the_most_tokens_that_a_pass_can_have(
  rollout, spec, mesh, arguments, monkeypatch
):
  shapes = arguments(programs.score, rollout, spec, held.step_arrays(spec, spec.mesh).state.params)
  asked = []

  def stub(_config, _params, tokens_BT, *_):
    asked.append(tokens_BT.shape)
    return np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)

  monkeypatch.setattr(scoring, 'score_tokens', stub)
  one = np.zeros(1, np.int32)
  for num_rows in (1, 512):
    scoring.score(
      SMALL,
      {},
      mesh,
      [(one, np.zeros(2499 - n % 7, int)) for n in range(num_rows)] + [(one, one)],
      limit=rollout.longest_row,
      tokens_per_pass=spec.gradient.tokens_per_microbatch,
      pad_id=0,
      temperature=1.0,
      logit_chunk=64,
    )
  # 4,999 tokens are one row of 2,500.
  assert set(asked) <= {(mesh.size, 2500), (mesh.size, 625)} and max(asked) in shapes


def test_the_update_is_compiled_for_the_most_tokens_that_a_pass_can_have(rollout, spec, arguments):
  shapes = arguments(programs.accumulate, rollout, spec, held.step_arrays(spec, spec.mesh))
  rows = rollout.questions * rollout.samples // spec.optimizer.minibatches
  _, num_shards = sharding.split(spec.mesh, 'batch')
  long, _ = gradients.pass_shapes(spec, num_shards, rows)
  stacks = [shape for shape in shapes if shape[1:] == (long.count, 2500)]
  assert stacks and all(count * long.count >= rows for count, *_ in stacks)


def test_decoding_is_compiled_for_the_longest_cache_and_prefill_for_the_most_tokens(
  rollout, spec, arguments, mesh
):
  params = held.step_arrays(spec, spec.mesh).decode_params
  decode = arguments(programs.decode, rollout, SMALL, spec.mesh, params)
  G, H = SMALL.num_kv_heads, SMALL.head_size
  assert (8, G, H, 2500) in decode and (8, G, 2500, H) in decode
  prefill = arguments(programs.prefill, rollout, SMALL, spec.mesh, params)
  assert (min(rollout.prompts, mesh.size), 700) in prefill  # one for each part of the rows


def test_what_jax_cannot_read_is_read_as_libtpu_writes_it():
  """By a stand-in for the two compilations: which programs JAX cannot read is chance."""

  class Unreadable:
    def as_text(self):
      raise jax.errors.JaxRuntimeError('INTERNAL: RET_CHECK failure')

    def compile(self, compiler_options):
      folder = pathlib.Path(compiler_options['xla_dump_to'])
      (folder / 'module_0001.jit_f.cl_1.after_codegen.txt').write_text('HloModule jit_f')
      (folder / 'module_0001.jit_f.cl_1.before_optimizations.txt').write_text('')

  assert programs._text(Unreadable(), Unreadable()) == 'HloModule jit_f'
