"""Descriptions of the Hugging Face architectures that this decoder implements.

A family describes what its models have in common, what their config.json may set, and
transformers' defaults. To add a family, add an entry here, any new weight names in tensor_names.py,
and a case in tests/helpers/make_checkpoints.py, so that tests compare it with transformers.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model

_NOTHING = MappingProxyType({})


class Family(NamedTuple):
  """A Hugging Face architecture. In the comments, `field` means a field of model.ShapeConfig."""

  model_type: str
  fixed: Mapping[str, Any] = _NOTHING  # field -> its value in all models of the family
  options: Mapping[str, str] = _NOTHING  # field -> the config.json name that sets it
  numbers: Mapping[str, str] = _NOTHING  # entries added to NUMBERS, or replacing entries there
  layers: str = 'f'  # layer kinds if config.json has no layer_types
  has_layer_types: bool = False  # whether config.json may contain layer_types
  has_window_flag: bool = False  # whether windows require use_sliding_window
  no_rope: bool = False  # whether config.json may contain no_rope_layers
  pattern: str = ''  # config.json name of the layer period, whose last layer has no window
  # If local_rope has its own base: (the base's key in config.json or '', default base).
  local_theta: tuple[str, float] | None = None
  defaults: Mapping[str, Any] = _NOTHING  # config.json defaults that differ from DEFAULTS
  any_head_size: bool = True  # if False, head_size is width / num_heads
  heads_divide_width: bool = False  # whether num_heads must divide width, even if head_dim is set
  has_gguf: bool = False  # whether its GGUF files are supported


# Numeric field of model.ShapeConfig -> its name in every family's config.json.
NUMBERS = dict(
  vocab_size='vocab_size', width='hidden_size', num_layers='num_hidden_layers',
  num_heads='num_attention_heads', mlp_width='intermediate_size', norm_epsilon='rms_norm_eps',
  tied_embeddings='tie_word_embeddings',
)  # fmt: skip
# transformers' defaults for fields missing from config.json.
DEFAULTS = dict(
  rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e4, hidden_act='silu',
  attention_bias=False, mlp_bias=False, use_sliding_window=False,
)  # fmt: skip
_CAUSAL = 'a token must attend only to earlier tokens'
_EXPERTS = 'all layers must have experts'
# config.json fields that change the computation in transformers but are not supported here
# -> (reason, values that have no effect).
REFUSED = {
  'is_causal': (_CAUSAL, (True,)),  # in transformers, null is not always causal
  'use_bidirectional_attention': (_CAUSAL, (False, None)),
  'is_encoder_decoder': ('the model must be decoder-only', (False, None)),
  'per_layer_config': ('all layers must have the same shape', ({}, None)),
  'mlp_only_layers': (_EXPERTS, ([], None)),
  'decoder_sparse_step': (_EXPERTS, (1, None)),
  'partial_rotary_factor': ('rotary positions apply to all dimensions of a head', (1, None)),
  'quantization_config': ('weights must be float32, bfloat16 or float16', ({}, None)),
  'attention_chunk_size': ('attention must be full or use a sliding window', (None,)),
  'transformers_weights': ('weights are read from model.safetensors or its index', (None,)),
}
_GEMMA = dict(norms='both', norm_offset=True, scaled_embeddings=True)
_ACTIVATION = dict(activation='hidden_act')
# Biases on all four attention projections or all three MLP projections.
_ATTENTION_BIAS = dict(attention_bias='attention_bias', output_bias='attention_bias')
_MLP_BIAS = dict(mlp_bias='mlp_bias')
_GEMMA_OPTIONS = _ATTENTION_BIAS | dict(
  activation='hidden_activation',
  query_scale='query_pre_attn_scalar',
  logit_cap='final_logit_softcapping',
)
_GEMMA_DEFAULTS = dict(
  hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
  num_key_value_heads=4, head_dim=256, hidden_activation='gelu_pytorch_tanh',
  query_pre_attn_scalar=256, sliding_window=4096, tie_word_embeddings=True,
)  # fmt: skip
_MINISTRAL3_ROPE = dict(
  rope_type='yarn', rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384,
  mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip

FAMILIES = {
  'Qwen2ForCausalLM': Family(
    'qwen2', fixed=dict(attention_bias=True), options=_ACTIVATION,
    has_layer_types=True, has_window_flag=True, any_head_size=False, has_gguf=True,
    defaults=dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
  ),
  'Qwen3ForCausalLM': Family(
    'qwen3', fixed=dict(query_key_norm=True), options=_ACTIVATION | _ATTENTION_BIAS,
    has_layer_types=True, has_window_flag=True, has_gguf=True,
    defaults=dict(head_dim=128, num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
  ),
  'Qwen3MoeForCausalLM': Family(
    'qwen3_moe', fixed=dict(query_key_norm=True), options=_ACTIVATION | _ATTENTION_BIAS,
    numbers=dict(
      mlp_width='moe_intermediate_size', num_experts='num_experts',
      experts_per_token='num_experts_per_tok', normalised_experts='norm_topk_prob',
    ),
    layers='s', has_window_flag=True,
    defaults=dict(
      num_key_value_heads=4, sliding_window=4096, moe_intermediate_size=768,
      num_experts=128, num_experts_per_tok=8, norm_topk_prob=False,
    ),
  ),
  'LlamaForCausalLM': Family(
    'llama', options=_ACTIVATION | _ATTENTION_BIAS | _MLP_BIAS,
    heads_divide_width=True, has_gguf=True,
  ),
  'MistralForCausalLM': Family(
    'mistral', options=_ACTIVATION, layers='s',
    defaults=dict(num_key_value_heads=8, sliding_window=4096),
  ),
  'MinistralForCausalLM': Family(
    'ministral', options=_ACTIVATION, layers='s', has_layer_types=True,
    defaults=dict(num_key_value_heads=8, sliding_window=4096),
  ),
  'Ministral3ForCausalLM': Family(
    'ministral3', options=_ACTIVATION | dict(query_beta='llama_4_scaling_beta'), layers='s',
    defaults=dict(
      head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_parameters=_MINISTRAL3_ROPE,
    ),
  ),
  'SmolLM3ForCausalLM': Family(
    'smollm3', options=_ACTIVATION | _ATTENTION_BIAS | _MLP_BIAS,
    has_layer_types=True, has_window_flag=True, no_rope=True,
    defaults=dict(
      num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True, no_rope_layer_interval=4,
    ),
  ),
  'Olmo2ForCausalLM': Family(
    'olmo2', fixed=dict(norms='after', query_key_norm=True, norm_all_heads=True),
    options=_ACTIVATION | _ATTENTION_BIAS, any_head_size=False, defaults=dict(rms_norm_eps=1e-5),
  ),
  'Olmo3ForCausalLM': Family(
    'olmo3', fixed=dict(norms='after', query_key_norm=True, norm_all_heads=True),
    options=_ACTIVATION | _ATTENTION_BIAS, any_head_size=False,
    layers='sssf', has_layer_types=True, local_theta=('', 5e5),
    defaults=dict(rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096),
  ),
  'Gemma2ForCausalLM': Family(
    'gemma2', fixed=_GEMMA, options=_GEMMA_OPTIONS | dict(attention_cap='attn_logit_softcapping'),
    layers='sf', has_layer_types=True, heads_divide_width=True,
    defaults=_GEMMA_DEFAULTS
    | dict(vocab_size=256000, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
  ),
  'Gemma3ForCausalLM': Family(
    # config.json may also contain attn_logit_softcapping, but transformers ignores it.
    'gemma3_text', fixed=_GEMMA | dict(query_key_norm=True), options=_GEMMA_OPTIONS,
    layers='sssssf', has_layer_types=True, pattern='sliding_window_pattern',
    heads_divide_width=True, local_theta=('rope_local_base_freq', 1e4),
    defaults=_GEMMA_DEFAULTS | dict(vocab_size=262208, rope_theta=1e6, sliding_window_pattern=6),
  ),
}  # fmt: skip
# Image models. Only the text part is read; its model_type, in text_config, selects the family.
WITH_IMAGES = ('Gemma3ForConditionalGeneration', 'Mistral3ForConditionalGeneration')
# Values of fields that a family neither fixes nor offers as options.
PLAIN: dict[str, Any] = dict(
  attention_bias=False, output_bias=False, mlp_bias=False, query_key_norm=False,
  norm_all_heads=False, norms='before', norm_offset=False, scaled_embeddings=False,
  activation='silu', query_scale=0.0, query_beta=0.0, attention_cap=0.0, logit_cap=0.0,
  num_experts=0, experts_per_token=0, normalised_experts=False,
)  # fmt: skip


def numbers(family: Family) -> dict[str, str]:
  """Map each numeric field of model.ShapeConfig to its name in the family's config.json."""
  return NUMBERS | dict(family.numbers)


def read(values: Mapping[str, Any], name: str, path: str, kind: type, why: str) -> Any:
  """Return a config.json field: a bool, or a positive int or float.

  Raises InputError if the field is missing or invalid. The message includes `why`, a clause that
  says what the field is for, such as 'which limits the context'.
  """
  if name not in values:
    raise InputError(f"{path}: no '{name}', {why}.")
  value = values[name]
  is_right = isinstance(value, bool) == (kind is bool) and isinstance(
    value, (int, float) if kind is float else kind
  )
  if not is_right or (kind is not bool and not 0 < value < math.inf):
    requirement = {bool: 'true or false', int: 'a whole number above 0', float: 'a number above 0'}[
      kind
    ]
    raise InputError(f'{path}: {name}={value!r}, {why}, must be {requirement}.')
  return value


def has(family: Family, config: model.ShapeConfig) -> bool:
  """Return True if the family supports this config, regardless of sizes and rotary scaling."""
  fields = PLAIN | dict(family.fixed)
  alike = all(
    field in family.options or field in family.numbers or getattr(config, field) == value
    for field, value in fields.items()
  ) and bool(config.num_experts) == ('num_experts' in family.numbers)
  # Fields set by the same config.json name must agree.
  pairs = {(name, getattr(config, field)) for field, name in family.options.items()}
  agree = len(pairs) == len({*family.options.values()})
  kinds = {*config.kinds}
  is_local = {kind.is_local for kind in kinds}
  # Without layer types, either all layers have a window or none do.
  windows = family.has_layer_types or is_local in ({False}, {family.layers == 's'})
  ropes = bool(family.local_theta) or is_local == {False} or config.local_rope == config.rope
  positions = family.no_rope or all(kind.has_positions for kind in kinds)
  return alike and agree and windows and ropes and positions


def described(config: model.ShapeConfig) -> str:
  """Describe how a config differs from PLAIN, for error messages."""
  differences = [
    f'{field}={getattr(config, field)!r}'
    for field, value in (PLAIN | dict(layers='f')).items()
    if getattr(config, field) != value
  ]
  if any(kind.is_local for kind in config.kinds) and config.local_rope != config.rope:
    differences.append('local_rope different from rope')
  return ', '.join(differences)
