"""Rotary positions (arXiv:2104.09864), plain or stretched for longer contexts.

Shape letter of its own: P = H/2 pairs of a head's entries.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Config:
  theta: float = setting('(0, inf)', 'base of the wavelengths, in positions')
  scaling: str = setting(
    ('none', 'linear', 'llama3'),
    'how wavelengths are stretched for contexts longer than those '
    'of pretraining: not, all alike, or the long ones alone',
  )
  factor: float = setting('[1, inf)', 'by how much, where scaling is not none')
  # llama3: wavelengths under original_positions / high_frequency_factor stay as they are, those
  # over original_positions / low_frequency_factor are stretched, and those between in part.
  low_frequency_factor: float = setting(
    '(0, inf)',
    'llama3: turns of the slowest pair of the partly stretched ones over original_positions',
  )
  high_frequency_factor: float = setting('(0, inf)', 'llama3: turns of the fastest one')
  original_positions: int = setting('[1, inf)', 'llama3: context of pretraining, in tokens')

  def __post_init__(self):
    if self.scaling == 'llama3' and self.low_frequency_factor >= self.high_frequency_factor:
      raise InputError(
        f'config.model.rope.low_frequency_factor={self.low_frequency_factor} must be below '
        f'high_frequency_factor={self.high_frequency_factor}: pairs between the two are '
        'stretched in part.'
      )


class Rotation(NamedTuple):
  """The rotary angles of each position; computed once for all layers."""

  cos_BTP: jax.Array  # float32; B is 1 where all rows share positions
  sin_BTP: jax.Array


def frequencies(config: Config, head_size: int) -> np.ndarray:
  """float32 [P], radians a position: pair i turns by theta^(-2i/H), stretched by the scaling.

  llama3 as in Llama 3.1 (arXiv:2407.21783 and its published code).
  """
  pair_P = np.arange(head_size // 2)
  plain_P = config.theta ** (-2 * pair_P / head_size)
  if config.scaling == 'linear':
    return (plain_P / config.factor).astype(np.float32)
  if config.scaling == 'none':
    return plain_P.astype(np.float32)
  turns_P = config.original_positions * plain_P / (2 * np.pi)
  low, high = config.low_frequency_factor, config.high_frequency_factor
  kept_P = np.clip((turns_P - low) / (high - low), 0, 1)  # share that is not stretched
  return (plain_P * (kept_P + (1 - kept_P) / config.factor)).astype(np.float32)


def rotations(config: Config, head_size: int, position_BT: jax.Array) -> Rotation:
  """The angles of integer positions [B, T]."""
  # float32: bfloat16 cannot tell position 257 from 256.
  angle_BTP = position_BT[:, :, None].astype(jnp.float32) * frequencies(config, head_size)
  return Rotation(jnp.cos(angle_BTP), jnp.sin(angle_BTP))


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
  """Turns each head's entry pairs, i with i + H/2 as Hugging Face does, in float32."""
  cos, sin = (table_BTP[:, :, None] for table_BTP in rotation)
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)
