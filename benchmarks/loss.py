"""The fused loss compared with a naive implementation: time, temporary memory, gradients."""

import functools

import jax
import jax.numpy as jnp

from benchmarks.frame import LIMITS, Bench, Figure, difference, in_turns
from exgrpo_jax.algorithm import objective
from exgrpo_jax.policy import logprobs, model


def measure(bench: Bench) -> list[Figure]:
  """Measure each loss with its gradient with respect to hidden states and unembedding.

  'fused' is `logprobs.fused_loss`, and 'naive' differentiates all logits at once.
  """
  prompt, chunk = bench.config.rollout.max_prompt, bench.config.rollout.logit_chunk
  batch = bench.batch(bench.lengths)
  target_BW = batch.tokens_BT[:, prompt:]
  config = bench.config.objective
  inputs = jax.tree.map(
    lambda x: x[:, prompt:], objective.loss_inputs(batch, config, target_BW.shape[1])
  )
  token_loss = functools.partial(objective.token_loss, config=config, clip=False, is_first=True)

  def fused(hidden_BWD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    return logprobs.fused_loss(
      hidden_BWD, kernel_DV, target_BW, inputs, token_loss, temperature=1.0, chunk=chunk
    )[0]

  def naive(hidden_BWD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    logits_BWV = jnp.einsum(
      'bwd,dv->bwv', hidden_BWD, kernel_DV, preferred_element_type=jnp.float32
    )
    logp_BWV = jax.nn.log_softmax(logits_BWV)
    entropy_BW = -jnp.sum(jnp.exp(logp_BWV) * logp_BWV, axis=-1)
    logp_BW = jnp.take_along_axis(logp_BWV, target_BW[..., None], axis=-1)[..., 0]
    return token_loss(logp_BW, entropy_BW, inputs)[0]

  shape = (*target_BW.shape, bench.model.width)
  args = (
    jax.random.normal(jax.random.key(0), shape, bench.model.dtype),
    model.unembedding(bench.model, bench.params),
  )
  programs = {
    name: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    for name, loss in {'fused': fused, 'naive': naive}.items()
  }
  times = in_turns(
    bench.size.repeats, *(functools.partial(program, *args) for program in programs.values())
  )
  found = []
  for (name, program), seconds in zip(programs.items(), times):
    memory = program.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
    found += [
      Figure(name, seconds, 's', f'{seconds / times[0]:.2f} times the fused loss'),
      Figure(f'{name}, memory', memory / 2**20, 'MiB', 'temporary'),
    ]
  gradients, of_naive = (programs[name](*args)[1] for name in ('fused', 'naive'))
  return [
    *found,
    Figure(
      'gradients',
      difference(gradients, of_naive),
      'relative',
      'of the fused loss, compared with the naive loss',
      limit=LIMITS[bench.model.dtype],
    ),
  ]
