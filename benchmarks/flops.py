"""Parameters and FLOPs of a model, by formula.

The compiler's count is not used because it counts the body of a loop once.
"""

from exgrpo_jax.policy import model


def parameter_count(shape: model.ShapeConfig) -> int:
  """Count the parameters except biases and norm scales, which make up a thousandth."""
  embeddings = shape.vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
  return embeddings + shape.num_layers * layer_parameter_count(shape)


def layer_parameter_count(shape: model.ShapeConfig) -> int:
  """Count the entries of one layer's matrices, including all experts."""
  return _layer_entries(shape, max(1, shape.num_experts))


def hidden_units(shape: model.ShapeConfig) -> int:
  """Count a token's hidden units in a layer, summed over the token's experts."""
  return max(1, shape.experts_per_token) * shape.mlp_width


def _layer_entries(shape: model.ShapeConfig, num_mlps: int) -> int:
  D, H = shape.width, shape.head_size
  attend = D * H * 2 * (shape.num_heads + shape.num_kv_heads)
  return attend + D * shape.num_experts + num_mlps * 3 * D * shape.mlp_width


def forward_flops(shape: model.ShapeConfig, num_tokens: int, length: int, num_logits: int) -> int:
  """Count the FLOPs of a forward pass: matrix products, causal attention and the unembedding.

  `num_tokens` is summed over rows that have `length` tokens each; `num_logits` tokens get logits.
  """
  return sum(_weights_and_attention(shape, num_tokens, length, num_logits))


def update_flops(
  shape: model.ShapeConfig, num_tokens: int, length: int, num_logits: int, *, frozen: bool
) -> int:
  """Count the FLOPs of a forward and a backward pass; arguments as in `forward_flops`.

  For each product of the forward pass, the backward pass has two: one for each factor's gradient.
  `frozen` weights need no gradient. Products with LoRA's adapters, about a hundredth of the FLOPs
  at rank 32, are left out.
  """
  of_weights, of_attention = _weights_and_attention(shape, num_tokens, length, num_logits)
  return (2 if frozen else 3) * of_weights + 3 * of_attention


def _weights_and_attention(
  shape: model.ShapeConfig, num_tokens: int, length: int, num_logits: int
) -> tuple[int, int]:
  entries = _layer_entries(shape, max(1, shape.experts_per_token))
  layers = 2 * shape.num_layers * entries * num_tokens
  # A token attends to half of its row on average, or to the window except where the row begins.
  pairs = sum(2 * keys - keys**2 / max(1, length) for keys in shape.layer_lengths(length))
  attention = 2 * shape.num_heads * shape.head_size * num_tokens * pairs
  return layers + 2 * shape.width * shape.vocab_size * num_logits, round(attention)
