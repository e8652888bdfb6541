"""Rotary position embedding (arXiv:2104.09864), plain or scaled for longer contexts.

Further shape letter: P = H/2 pairs of entries in a head.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Array
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary embedding settings: the base and scaling of the wavelengths."""

  theta: float = setting(1e4, '(0, inf)', 'the base of the wavelengths, in positions')
  scaling: str = setting(
    'none',
    ('none', 'linear', 'llama3', 'yarn'),
    'which wavelengths to stretch for contexts longer than in pretraining: none, all by the '
    'same factor (linear), or only the long ones (llama3, yarn)',
  )
  factor: float = setting(
    1.0, '[1, inf)', 'the factor that stretches wavelengths, unless scaling is none'
  )
  # llama3: wavelengths below original_positions / high_frequency_factor are kept, wavelengths above
  # original_positions / low_frequency_factor are stretched, and the others are interpolated.
  low_frequency_factor: float = setting(
    1.0,
    '(0, inf)',
    'llama3: pairs that turn less often than this over original_positions are stretched by factor',
  )
  high_frequency_factor: float = setting(
    4.0,
    '(0, inf)',
    'llama3: pairs that turn more often than this are unchanged; pairs in between are interpolated',
  )
  original_positions: int = setting(
    4096, '[1, inf)', 'llama3, yarn and query_beta: the pretraining context length, in tokens'
  )
  # yarn: like llama3, but interpolated over the pair's index instead of its number of turns.
  beta_fast: float = setting(
    32.0,
    '(0, inf)',
    'yarn: pairs that turn more often than this over original_positions are unchanged',
  )
  beta_slow: float = setting(
    1.0, '(0, inf)', 'yarn: pairs that turn less often than this are stretched by factor'
  )
  attention_factor: float = setting(
    1.0, '(0, inf)', 'yarn: both queries and keys are multiplied by this value'
  )

  def __post_init__(self) -> None:
    if self.scaling == 'llama3' and self.low_frequency_factor >= self.high_frequency_factor:
      raise InputError(
        f'config.model.rope.low_frequency_factor={self.low_frequency_factor}: the factor must be '
        f'below high_frequency_factor={self.high_frequency_factor}, because the scaling is '
        'interpolated between the two factors. Change one of them.'
      )
    if self.scaling == 'yarn' and self.beta_slow >= self.beta_fast:
      raise InputError(
        f'config.model.rope.beta_slow={self.beta_slow}: the value must be below '
        f'beta_fast={self.beta_fast}, because the scaling is interpolated between the two values. '
        'Change one of them.'
      )


class Rotation(NamedTuple):
  """The rotation of queries and keys by position, computed once for all layers."""

  cos_BTP: jax.Array  # float32, cosines of the angles; B is 1 if all rows share positions
  sin_BTP: jax.Array
  query_scale_BT: jax.Array | None = None  # float32, the factor on queries; None means 1


def frequencies(config: RopeConfig, head_size: int) -> np.ndarray:
  """Compute each pair's radians per position, float32 [P]: theta^(-2i/H) for pair i, then scaled.

  llama3 follows Llama 3.1 (arXiv:2407.21783 and its published code); yarn follows arXiv:2309.00071.
  """
  pair_P = np.arange(head_size // 2)
  frequency_P = config.theta ** (-2 * pair_P / head_size)
  if config.scaling == 'linear':
    return (frequency_P / config.factor).astype(np.float32)
  if config.scaling == 'none':
    return frequency_P.astype(np.float32)
  if config.scaling == 'llama3':
    turns_P = config.original_positions * frequency_P / (2 * np.pi)
    low, high = config.low_frequency_factor, config.high_frequency_factor
    weight_P = np.clip((turns_P - low) / (high - low), 0, 1)  # weight of the unscaled frequency
  else:
    weight_P = _yarn_weights(config, frequency_P)
  return (frequency_P * (weight_P + (1 - weight_P) / config.factor)).astype(np.float32)


def _yarn_weights(config: RopeConfig, frequency_P: np.ndarray) -> np.ndarray:
  """Compute YaRN's weight for each pair's unscaled frequency, interpolated over the pair index."""
  P = len(frequency_P)

  def pair(turns: float) -> float:
    """Return the fractional index of the pair that makes `turns` turns in `original_positions`."""
    return P * np.log(config.original_positions / (turns * 2 * np.pi)) / np.log(config.theta)

  first = max(np.floor(pair(config.beta_fast)), 0)
  last = min(np.ceil(pair(config.beta_slow)), 2 * P - 1)
  return 1 - np.clip((np.arange(P) - first) / (last - first or 1e-3), 0, 1)


def rotations(config: RopeConfig, head_size: int, position_BT: Array) -> Rotation:
  """Compute the rotation at each integer position [B, T]."""
  chex.assert_rank(position_BT, 2)
  # In float32, because bfloat16 cannot distinguish positions 256 and 257.
  angle_BTP = position_BT[:, :, None].astype(jnp.float32) * frequencies(config, head_size)
  rotation = Rotation(cos_BTP=jnp.cos(angle_BTP), sin_BTP=jnp.sin(angle_BTP))
  if config.scaling != 'yarn':
    return rotation
  return jax.tree.map(lambda table_BTP: config.attention_factor * table_BTP, rotation)


def unrotated(position_BT: Array, head_size: int) -> Rotation:
  """Return a rotation by an angle of 0, for layers without rotary positions."""
  shape = *position_BT.shape, head_size // 2
  return Rotation(cos_BTP=jnp.ones(shape), sin_BTP=jnp.zeros(shape))


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotate each head's pairs of entries (i, i + H/2), as in Hugging Face, in float32."""
  chex.assert_rank([x_BTNH, rotation.cos_BTP, rotation.sin_BTP], [4, 3, 3])
  cos, sin = rotation.cos_BTP[:, :, None], rotation.sin_BTP[:, :, None]
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)
