"""The passes that scoring, the update and resuming make over rows of given lengths."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Pass
from exgrpo_jax.policy import sharding
from exgrpo_jax.rollout import scoring, settings, slots


def of_update(spec: gradients.UpdateSpec, responses: np.ndarray, prompt: int) -> list[list[Pass]]:
  """The passes of each minibatch.

  Args:
    spec: of the update.
    responses: int, tokens of each row's response, in the order of the rows.
    prompt: tokens of each prompt.
  """
  _, num_shards = sharding.split(spec.mesh, 'batch')
  minibatches = np.split(responses, spec.optimizer.minibatches)
  shapes = gradients.pass_shapes(spec, num_shards, len(minibatches[0]))
  return [packing.pack(part + prompt, part, *shapes) for part in minibatches]


def of_scoring(spec: gradients.UpdateSpec, responses: np.ndarray, prompt: int) -> list[Pass]:
  """The passes of one call of `scoring.score`; arguments as in `of_update`."""
  if not len(responses):
    return []
  budget = spec.gradient.tokens_per_microbatch
  shapes = scoring.pass_shapes(spec.model, spec.mesh, spec.longest_row, budget)
  return packing.pack(responses + prompt, np.zeros_like(responses), *shapes)


def of_resuming(
  rollout: settings.Config, decoding: Mesh, resumed: Sequence[np.ndarray]
) -> list[Pass]:
  """The passes that prefill responses begun in earlier steps.

  Args:
    rollout: of the run.
    decoding: the mesh of sampling.
    resumed: int, by step the tokens of each row, prompt included.
  """
  sizes = rollout.longest_row, rollout.slots, decoding
  return [one for rows in resumed if len(rows) for one in slots.packed_passes(rows, *sizes)]
