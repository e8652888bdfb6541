"""Routes: the experts that the sampler chose for each token, for router replay (arXiv:2510.11370).

A router's choice is a step function. A tiny difference between sampler and trainer can make a token
choose another expert. A ratio of two policies then compares different sums. With
`rollout.router_replay` a response keeps the experts of its tokens and of its prompt. All later
forward passes over the response use these experts, weighted by the router at that time. NumPy;
shape letters: R rows, C experts of a token.
"""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.policy import model


def unknown(config: model.ShapeConfig, *sizes: int) -> np.ndarray:
  """Return routes that leave the choice to the router: [*sizes, L, C]."""
  dtype = np.dtype(config.route_dtype)
  return np.full((*sizes, *config.route_shape), np.iinfo(dtype).max, dtype)


def padded(config: model.ShapeConfig, rows: Sequence[np.ndarray | None], length: int) -> np.ndarray:
  """Pad the routes of rows [T, L, C] to one array [R, length, L, C]; None is unknown routes."""
  routes_RTLC = unknown(config, len(rows), length)
  for padded_TLC, routes_TLC in zip(routes_RTLC, rows):
    if routes_TLC is not None:
      padded_TLC[: len(routes_TLC)] = routes_TLC
  return routes_RTLC


def completed(
  begun_TLC: np.ndarray | None, found_SLC: np.ndarray | None, cached: int, length: int
) -> np.ndarray | None:
  """Return the routes of a row of `length` tokens, or None if they are not kept.

  Args:
    begun_TLC: the routes of its first tokens that were known when it got its slot, if any.
    found_SLC: its slot's routes; None if it has none.
    cached: how many tokens its slot's cache has.
    length: of prompt and response.
  """
  if found_SLC is None:
    return begun_TLC
  none = np.iinfo(found_SLC.dtype).max
  whole_TLC = np.full((length, *found_SLC.shape[1:]), none, found_SLC.dtype)
  whole_TLC[:cached] = found_SLC[:cached]
  if begun_TLC is not None:
    first_TLC = whole_TLC[: len(begun_TLC)]
    first_TLC[:] = np.where(begun_TLC < none, begun_TLC, first_TLC)
  return whole_TLC
