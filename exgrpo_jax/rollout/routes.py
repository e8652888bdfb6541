"""Routes: the experts that the sampler chose for each token, for router replay (arXiv:2510.11370).

A router's choice is a step function: the least difference between sampler and trainer can make a
token choose another expert, and a ratio of two policies then compares different sums. With
`rollout.router_replay` a response keeps its tokens' experts, those of its prompt included, and all
later forward passes over it use these, weighted by the router of their time. NumPy; shape letters:
R rows, C experts of a token.
"""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.policy import model


def unknown(config: model.ShapeConfig, *sizes: int) -> np.ndarray:
  """Routes of tokens for which the router is to choose: [*sizes, L, C]."""
  dtype = np.dtype(config.route_dtype)
  return np.full((*sizes, *config.route_shape), np.iinfo(dtype).max, dtype)


def padded(config: model.ShapeConfig, rows: Sequence[np.ndarray | None], length: int) -> np.ndarray:
  """The routes of rows [T, L, C] in one array [R, length, L, C]; of a row without any, unknown."""
  routes_RTLC = unknown(config, len(rows), length)
  for padded_TLC, routes_TLC in zip(routes_RTLC, rows):
    if routes_TLC is not None:
      padded_TLC[: len(routes_TLC)] = routes_TLC
  return routes_RTLC


def completed(
  begun_TLC: np.ndarray | None, found_SLC: np.ndarray | None, cached: int, length: int
) -> np.ndarray | None:
  """The routes of a row of `length` tokens, or None where they are not kept.

  Args:
    begun_TLC: what was known of its first tokens as it got its slot, if anything.
    found_SLC: what its slot has; None while it has none.
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
