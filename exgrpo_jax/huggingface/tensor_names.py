"""Map the tensors of a Hugging Face checkpoint to our parameters."""

from typing import NamedTuple

from exgrpo_jax.policy import model

ParamPath = tuple[str, ...]  # keys in the nested parameter dict
# A tensor's place in a parameter: () for the whole parameter, (layer,) or (layer, expert).
Index = tuple[int, ...]


class Tensor(NamedTuple):
  """A tensor in a Hugging Face checkpoint, and how it relates to our parameter."""

  name: str
  shape: tuple[int, ...]  # shape in the file; projection matrices are [out, in]
  num_inputs: int  # number of our parameter's leading dimensions that are projection inputs


# By `ShapeConfig.norms`: our name for a layer's norm -> its name in the file.
_NORMS = {
  'before': {'attention_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm'},
  'after': {
    'attention_post_norm': 'post_attention_layernorm',
    'mlp_post_norm': 'post_feedforward_layernorm',
  },
  'both': {
    'attention_norm': 'input_layernorm',
    'attention_post_norm': 'post_attention_layernorm',
    'mlp_norm': 'pre_feedforward_layernorm',
    'mlp_post_norm': 'post_feedforward_layernorm',
  },
}


def of(config: model.ShapeConfig) -> dict[tuple[ParamPath, Index], Tensor]:
  """Return all tensors of a checkpoint, in file order.

  Returns:
    (path, index) -> Tensor, where path locates our parameter in the tree that `model.init` returns,
    and index is the tensor's place within the parameter.
  """
  V, D = config.vocab_size, config.width
  embedding = _projection('model.embed_tokens.weight', D, V, num_inputs=0)
  layout: dict[tuple[ParamPath, Index], Tensor] = {(('embedding_VD',), ()): embedding}
  for layer in range(config.num_layers):
    for (path, index), tensor in _layer_tensors(config, f'model.layers.{layer}').items():
      layout[('layers', *path), (layer, *index)] = tensor
  layout[('final_norm', 'scale'), ()] = _vector('model.norm.weight', D)
  if not config.tied_embeddings:
    layout[('unembedding_DV',), ()] = _projection('lm_head.weight', D, V)
  return layout


def text_name(name: str) -> str | None:
  """Return a tensor's name in a text-only checkpoint, or None for the image tensors.

  transformers writes `model.language_model.layers`, but up to version 4.51 it wrote
  `language_model.model.layers`.
  """
  if name.removeprefix('model.').startswith(('vision_tower.', 'multi_modal_projector.')):
    return None
  return name.removeprefix('language_model.').replace('model.language_model.', 'model.', 1)


def _layer_tensors(config: model.ShapeConfig, prefix: str) -> dict[tuple[ParamPath, Index], Tensor]:
  D, H = config.width, config.head_size
  query, kv = config.num_heads * H, config.num_kv_heads * H
  attention = f'{prefix}.self_attn'
  layout: dict[ParamPath, Tensor] = {
    ('attention', 'query_DNH'): _projection(f'{attention}.q_proj.weight', D, query),
    ('attention', 'key_DGH'): _projection(f'{attention}.k_proj.weight', D, kv),
    ('attention', 'value_DGH'): _projection(f'{attention}.v_proj.weight', D, kv),
    ('attention', 'out_NHD'): _projection(f'{attention}.o_proj.weight', query, D, num_inputs=2),
  }
  for path, name in _NORMS[config.norms].items():
    layout[path, 'scale'] = _vector(f'{prefix}.{name}.weight', D)
  if config.attention_bias:
    layout |= {
      ('attention', 'query_bias_NH'): _vector(f'{attention}.q_proj.bias', query),
      ('attention', 'key_bias_GH'): _vector(f'{attention}.k_proj.bias', kv),
      ('attention', 'value_bias_GH'): _vector(f'{attention}.v_proj.bias', kv),
    }
  if config.output_bias:
    layout['attention', 'out_bias_D'] = _vector(f'{attention}.o_proj.bias', D)
  if config.query_key_norm:
    sizes = (query, kv) if config.norm_all_heads else (H, H)
    for (name, norm), size in zip([('q_norm', 'query_norm'), ('k_norm', 'key_norm')], sizes):
      layout['attention', norm, 'scale'] = _vector(f'{attention}.{name}.weight', size)
  tensors: dict[tuple[ParamPath, Index], Tensor] = {
    (path, ()): tensor for path, tensor in layout.items()
  }
  return tensors | _mlp_tensors(config, f'{prefix}.mlp')


def _mlp_tensors(config: model.ShapeConfig, prefix: str) -> dict[tuple[ParamPath, Index], Tensor]:
  D, F, E = config.width, config.mlp_width, config.num_experts
  layout: dict[tuple[ParamPath, Index], Tensor] = {}
  if E:
    layout[('mlp', 'router_DE'), ()] = _projection(f'{prefix}.gate.weight', D, E)
  letter = 'E' if E else ''
  for index, module in [((e,), f'{prefix}.experts.{e}') for e in range(E)] or [((), prefix)]:
    layout[('mlp', f'gate_{letter}DF'), index] = _projection(f'{module}.gate_proj.weight', D, F)
    layout[('mlp', f'up_{letter}DF'), index] = _projection(f'{module}.up_proj.weight', D, F)
    layout[('mlp', f'down_{letter}FD'), index] = _projection(f'{module}.down_proj.weight', F, D)
  if config.mlp_bias:
    layout |= {
      (('mlp', 'gate_bias_F'), ()): _vector(f'{prefix}.gate_proj.bias', F),
      (('mlp', 'up_bias_F'), ()): _vector(f'{prefix}.up_proj.bias', F),
      (('mlp', 'down_bias_D'), ()): _vector(f'{prefix}.down_proj.bias', D),
    }
  return layout


def _vector(name: str, size: int) -> Tensor:
  return Tensor(name=name, shape=(size,), num_inputs=0)


def _projection(name: str, in_size: int, out_size: int, num_inputs: int = 1) -> Tensor:
  return Tensor(name=name, shape=(out_size, in_size), num_inputs=num_inputs)
