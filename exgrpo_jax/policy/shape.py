"""The shape of a decoder: its sizes, and what distinguishes its model family.

`ShapeConfig` describes everything that differs between model families. layers.py and model.py
implement it, and huggingface/architecture.py converts it to and from Hugging Face's config.json.
"""

import dataclasses
from typing import NamedTuple

from jax.sharding import Mesh

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import rotary, sharding


class Kind(NamedTuple):
  """A kind of layer within a model; parameter shapes are the same for all kinds."""

  is_local: bool  # attends only to the last `window` tokens
  has_positions: bool  # rotates queries and keys


# Letter in `ShapeConfig.layers` -> kind of layer.
KINDS = {
  'f': Kind(is_local=False, has_positions=True),  # full attention
  's': Kind(is_local=True, has_positions=True),  # sliding window
  'n': Kind(is_local=False, has_positions=False),
  'w': Kind(is_local=True, has_positions=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeConfig:
  """A decoder's shape, Qwen2.5-Math-1.5B by default; every field is static under jit."""

  vocab_size: int = setting(
    151936, '[0, inf)', "number of rows of the embedding; 0 means the tokenizer's vocabulary size"
  )
  width: int = setting(1536, '[1, inf)', 'size of the residual stream')
  num_layers: int = setting(28, '[1, inf)', 'number of layers, each with attention and an MLP')
  num_heads: int = setting(12, '[1, inf)', 'number of query heads')
  num_kv_heads: int = setting(
    2, '[1, inf)', 'number of key/value heads, each serving the same number of query heads'
  )
  head_size: int = setting(128, '[2, inf)', 'size of one head; must be even')
  mlp_width: int = setting(8960, '[1, inf)', 'number of hidden units in the MLP, or in each expert')
  num_experts: int = setting(
    0,
    '[0, inf)',
    'number of expert MLPs that a router chooses from for each token, as in Qwen3 MoE; 0 means a '
    'single MLP',
  )
  experts_per_token: int = setting(
    0, '[0, inf)', 'number of experts that the router chooses per token; 0 without experts'
  )
  normalised_experts: bool = setting(
    False, None, "normalize the weights of a token's experts to sum to 1"
  )
  activation: str = setting(
    'silu',
    ('silu', 'gelu', 'exact_gelu', 'relu'),
    "the activation of the MLP's gate; gelu is the tanh approximation, as in Gemma",
  )
  layers: str = setting(
    'f',
    None,
    'one letter per layer; a pattern shorter than the model is repeated. f attends to all earlier '
    'tokens and s to a sliding window; n and w are like f and s, but without positions',
  )
  window: int = setting(
    0,
    '[0, inf)',
    'number of tokens that s and w layers attend to, including the current token; 0 without such '
    'layers',
  )
  rope: rotary.RopeConfig = dataclasses.field(default_factory=rotary.RopeConfig)
  local_rope: rotary.RopeConfig = dataclasses.field(default_factory=rotary.RopeConfig)
  norm_epsilon: float = setting(
    1e-6, '(0, inf)', 'the value added to the mean square before the square root'
  )
  norms: str = setting(
    'before',
    ('before', 'after', 'both'),
    'where norms are applied: before attention and MLP, after them as in OLMo 2, or both as in '
    'Gemma',
  )
  norm_offset: bool = setting(False, None, 'norms multiply by 1 + their parameter, as in Gemma')
  attention_bias: bool = setting(True, None, 'add biases to queries, keys and values, as in Qwen2')
  output_bias: bool = setting(False, None, 'add a bias to the attention output projection')
  mlp_bias: bool = setting(False, None, "add biases to the MLP's three projections")
  query_key_norm: bool = setting(False, None, 'normalize queries and keys, as in Qwen3')
  norm_all_heads: bool = setting(
    False,
    None,
    'with query_key_norm: normalize over all heads together, as in OLMo 2, instead of per head',
  )
  query_scale: float = setting(
    0.0,
    '[0, inf)',
    'attention scores are divided by the square root of this value; 0 means head_size',
  )
  query_beta: float = setting(
    0.0,
    '[0, inf)',
    'queries are multiplied by 1 + query_beta * log(1 + floor(position / rope.original_positions)),'
    ' as in Ministral 3',
  )
  attention_cap: float = setting(
    0.0,
    '[0, inf)',
    'attention scores become cap * tanh(score / cap), as in Gemma 2; 0 turns this off',
  )
  logit_cap: float = setting(
    0.0, '[0, inf)', 'logits become cap * tanh(logit / cap), as in Gemma 2; 0 turns this off'
  )
  scaled_embeddings: bool = setting(
    False, None, 'multiply embeddings by the square root of the width, as in Gemma'
  )
  tied_embeddings: bool = setting(True, None, 'use the transposed embedding as the unembedding')
  dtype: str = setting(
    'bfloat16', ('float32', 'bfloat16'), 'the dtype of activations; trained parameters are float32'
  )

  def __post_init__(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise InputError(
        f'config.model.num_kv_heads={self.num_kv_heads}: the number must divide '
        f'config.model.num_heads={self.num_heads}, because each key/value head serves the same '
        'number of query heads. Choose a divisor.'
      )
    if self.head_size % 2:
      raise InputError(
        f'config.model.head_size={self.head_size}: the size must be even, because the rotary '
        'embedding rotates pairs of entries. Choose an even size.'
      )
    if not self.layers or {*self.layers} - {*KINDS}:
      raise InputError(
        f"config.model.layers='{self.layers}': the value must consist of the letters "
        f'{", ".join(KINDS)}, one per layer. A pattern shorter than the model is repeated.'
      )
    if not min(1, self.num_experts) <= self.experts_per_token <= self.num_experts:
      raise InputError(
        f'config.model.experts_per_token={self.experts_per_token}: the number must be at least 1 '
        f'and at most config.model.num_experts={self.num_experts}, or both settings must be 0. '
        'Change one of the two settings.'
      )
    if self.mlp_bias and self.num_experts:
      raise InputError(
        'config.model.mlp_bias=True: biases are not supported with '
        f'config.model.num_experts={self.num_experts}, because experts have no biases. Set '
        'config.model.mlp_bias=False.'
      )
    has_local = any(kind.is_local for kind in self.kinds)
    if has_local != bool(self.window):
      raise InputError(
        f'config.model.window={self.window}: the window must be above 0 if any of the '
        f"{self.num_layers} layers in config.model.layers='{self.layers}' has kind s or w. "
        'Otherwise, it must be 0. Change one of the two settings.'
      )

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """Return the kind of each layer."""
    times = -(-self.num_layers // len(self.layers))
    return tuple(KINDS[letter] for letter in (self.layers * times)[: self.num_layers])

  @property
  def route_dtype(self) -> str:
    """Return the dtype for expert indices; its largest value is never a valid index."""
    return 'uint8' if self.num_experts < 256 else 'uint16'

  @property
  def route_shape(self) -> tuple[int, int]:
    """Return the shape of a token's stored routing: (layers, experts per token)."""
    return self.num_layers, self.experts_per_token

  def layer_lengths(self, length: int) -> list[int]:
    """Return how many of `length` tokens each layer attends to and caches."""
    return [min(length, self.window) if kind.is_local else length for kind in self.kinds]


def check_meshes(config: ShapeConfig, meshes: sharding.Meshes) -> None:
  """Raise InputError if a mesh cannot split the model's dimensions evenly."""
  for part, mesh in meshes._asdict().items():
    _check_mesh(config, mesh, f'config.mesh.{part}')


def _check_mesh(config: ShapeConfig, mesh: Mesh, place: str) -> None:
  for axis, field in {
    'embed': 'width',
    'heads': 'num_heads',
    'kv_heads': 'num_kv_heads',
    'mlp': 'mlp_width',
    'experts': 'num_experts',
    'vocab': 'vocab_size',
  }.items():
    names, devices = sharding.split(mesh, axis)
    size = getattr(config, field)
    if size % devices == 0 or (axis == 'kv_heads' and devices % size == 0):
      continue
    alternative = ' or be a multiple of it' if axis == 'kv_heads' else ''
    raise InputError(
      f'{place}.{names}={devices}: the number of devices must divide '
      f'config.model.{field}={size}{alternative}, because each device stores an equal share. '
      'Choose a different number of devices.'
    )
