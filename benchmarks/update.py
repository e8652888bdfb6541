"""The time of one update, and its FLOP/s relative to a plain matrix product."""

import jax
import jax.numpy as jnp

from benchmarks import flops
from benchmarks.frame import Bench, Figure, in_turns
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.experiment.experiment import update_spec
from exgrpo_jax.learner import gradients, optimizer


def measure(bench: Bench) -> list[Figure]:
  """Measure the speed of updates with a single minibatch."""
  spec = update_spec(bench.config, bench.model, bench.meshes.training)
  batch, prompt = bench.batch(bench.lengths), bench.config.rollout.max_prompt
  responses = int(bench.lengths.sum())
  tokens = responses + bench.rows * prompt
  states = [first_state(bench, spec)]  # each update donates its state

  def run() -> None:
    states.append(update(spec, states.pop(), batch))

  [seconds] = in_turns(bench.size.repeats, run)
  count = flops.update_flops(bench.model, tokens, tokens // bench.rows, responses, frozen=False)
  minibatch = gradients.passes(spec, bench.lengths + prompt, bench.lengths)
  computed = sum(one.shape.num_tokens for one in minibatch)
  return [
    Figure('update', seconds, 's', f'{bench.rows} rows, mean {tokens // bench.rows:,} tokens'),
    Figure('speed', tokens / seconds, 'tokens/s', 'including prompts'),
    Figure('packing', computed / tokens, 'x', f'computed / real tokens; {len(minibatch)} passes'),
    Figure(
      'share of FLOPs',
      100 * count / seconds / bench.flops,
      '%',
      f'of a plain matrix product; {count / 1e12:.3g} TFLOP per update',
    ),
  ]


def first_state(bench: Bench, spec: gradients.UpdateSpec) -> optimizer.TrainState:
  """Make the state before the first update from copies, because updates donate it."""
  return optimizer.init(spec.optimizer, 1, jax.tree.map(jnp.copy, bench.params))


def update(
  spec: gradients.UpdateSpec, state: optimizer.TrainState, batch: Batch
) -> optimizer.TrainState:
  """Run an update, wait for it, and return the new state. Donates `state`."""
  gradient, sums = gradients.minibatch_gradient(
    spec, state.params, batch, clip=False, is_first=True
  )
  state, norms = gradients.apply_gradient(spec, state, gradient)
  jax.block_until_ready((sums, norms))
  return state
