"""Checksums of the arrays in a checkpoint, and of the frozen base that its adapters belong to.

Each is the sum of an array's bits: the same on every mesh, and changed by any flipped bit.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy.model import Params


def of_state(state: TrainState, cursor: Mapping[str, int]) -> dict[str, int]:
  """Name -> checksum of each array; the cursor's numbers stand for themselves."""
  return {f'cursor.{name}': value for name, value in cursor.items()} | _named(state)


def of_base(base: Params) -> dict[str, int]:
  """Name -> checksum of each array of the frozen base of LoRA's adapters."""
  return {f'base{name}': value for name, value in _named(base).items()}


def digest(state: TrainState, base_sums: Mapping[str, int]) -> str:
  """Twelve hexadecimal digits that identify the parameters, or the base where there is one.

  Made of the sums of the whole state, whose program saving needs anyway.
  """
  sums = base_sums or {k: v for k, v in _named(state).items() if k.startswith('.params')}
  return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]


def changed(saved: Mapping[str, int], computed: Mapping[str, int]) -> str:
  """The names of what differs from what was saved, or was not saved, joined; '' for none."""
  return ', '.join(name for name, value in computed.items() if value != saved.get(name))


def _named(tree: Any) -> dict[str, int]:
  named = jax.tree_util.tree_leaves_with_path(jax.device_get(bit_sums(tree)))
  return {jax.tree_util.keystr(path): int(value) for path, value in named}


@jax.jit
def bit_sums(tree: Any) -> Any:
  """uint32 sums, which wrap around and so do not depend on the order of addition."""

  def bits(leaf: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf, f'uint{8 * leaf.dtype.itemsize}')

  return jax.tree.map(lambda leaf: jnp.sum(bits(leaf), dtype=jnp.uint32), tree)
