"""The sums that `objective.token_loss` returns, and a step's metrics made of them. Pure."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np


# One program: a few dozen small ones would fill XLA:CPU's queue and block the host.
@jax.jit
def merge_sums(slices: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
  """Combines the sums of several slices: those named *_max by maximum, others by addition."""

  def merged(name: str) -> jax.Array:
    values = jnp.stack([sums[name] for sums in slices])
    return values.max(axis=0) if name.endswith('_max') else values.sum(axis=0)

  return {name: merged(name) for name in slices[0]}


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
  """Means over a step's tokens from the sums of its minibatches (host scalars).

  The replay/ and carry/ values are absent in a step without replayed or carried tokens. The
  effective sample size is (sum w)^2 / (n sum w^2) over replayed tokens, in (0, 1]: 1 for equal
  weights.
  """
  tokens, fresh, replayed = sums['tokens'], max(sums['fresh_tokens'], 1), sums['replay_tokens']
  carried = sums['carried_tokens']
  values = {'entropy': sums['entropy'] / max(tokens, 1), 'clip_share': sums['clipped'] / fresh}
  values['outside_clip_range'] = sums['outside'] / fresh
  if 'kl' in sums:
    values['kl'] = sums['kl'] / max(fresh - carried, 1)
  if 'balance' in sums:
    values['experts/balance'] = sums['balance'] / sums['updates']
  if replayed:
    values['replay/ratio_mean'] = sums['ratio'] / replayed
    values['replay/ratio_max'] = sums['ratio_max']
    shaped_mean = values['replay/shaped_mean'] = sums['shaped'] / replayed
    # Rounding must not make a variance negative.
    values['replay/shaped_variance'] = max(sums['shaped_squared'] / replayed - shaped_mean**2, 0.0)
    ratio_squared = max(sums['ratio_squared'], 1e-30)
    values['replay/effective_sample_size'] = sums['ratio'] ** 2 / (replayed * ratio_squared)
  if carried:
    values['carry/token_share'] = carried / fresh
    values['carry/ratio_mean'] = sums['carried_ratio'] / carried
    values['carry/ratio_max'] = sums['carried_ratio_max']
    values['carry/outside_clip_range'] = sums['carried_outside'] / carried
  return values


def expert_metrics(choices_LE: np.ndarray) -> dict[str, float]:
  """How even the load of the experts was, from how often a step's tokens chose each of them.

  'experts/load_max' is the largest load of a layer's experts in even shares, the mean over layers;
  'experts/unused' the share of experts, in all layers, that no token chose.
  """
  even_L1 = np.maximum(choices_LE.mean(axis=1, keepdims=True), 1e-9)
  return {
    'experts/load_max': float(np.mean(np.max(choices_LE / even_L1, axis=1))),
    'experts/unused': float(np.mean(choices_LE == 0)),
  }
