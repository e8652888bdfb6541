"""Routes: the experts that the sampler chose for each token, for router replay (arXiv:2510.11370).

Routing is a step function: a tiny numerical difference between sampler and trainer can send a token
to a different expert. The importance ratio then compares the outputs of different experts. With
`rollout.router_replay`, a response keeps the experts chosen for its tokens and its prompt. All
later forward passes over the response use these experts, with weights from the current router.
This module uses only NumPy. Shape letters: R rows, C experts per token.
"""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.policy import model


def unknown(config: model.ShapeConfig, *sizes: int) -> np.ndarray:
  """Return unknown routes, which leave the choice of experts to the router: [*sizes, L, C]."""
  dtype = np.dtype(config.route_dtype)
  return np.full((*sizes, *config.route_shape), np.iinfo(dtype).max, dtype)


def padded(config: model.ShapeConfig, rows: Sequence[np.ndarray | None], length: int) -> np.ndarray:
  """Pad the rows' routes [T, L, C] and stack them: [R, length, L, C]. None means unknown routes."""
  routes_RTLC = unknown(config, len(rows), length)
  for padded_TLC, routes_TLC in zip(routes_RTLC, rows):
    if routes_TLC is not None:
      padded_TLC[: len(routes_TLC)] = routes_TLC
  return routes_RTLC


def completed(
  prefix_TLC: np.ndarray | None, routes_SLC: np.ndarray | None, cached: int, length: int
) -> np.ndarray | None:
  """Return all known routes of a row of `length` tokens, or None if no routes are known.

  Args:
    prefix_TLC: the first tokens' routes if they were known before the row got its slot, or None.
    routes_SLC: the routes recorded in the slot; None if routes are not kept or the row has no slot.
    cached: the number of tokens in the slot's cache.
    length: the number of tokens in the prompt and the response.
  """
  if routes_SLC is None:
    return prefix_TLC
  unknown_index = np.iinfo(routes_SLC.dtype).max
  routes_TLC = np.full((length, *routes_SLC.shape[1:]), unknown_index, routes_SLC.dtype)
  routes_TLC[:cached] = routes_SLC[:cached]
  if prefix_TLC is not None:
    first_TLC = routes_TLC[: len(prefix_TLC)]
    first_TLC[:] = np.where(prefix_TLC < unknown_index, prefix_TLC, first_TLC)
  return routes_TLC
