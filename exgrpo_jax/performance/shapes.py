"""The model shapes that benchmarks measure, with random weights."""

import dataclasses

from exgrpo_jax.policy import model, rotary

_ROPE = rotary.Config(
  theta=1e4,
  scaling='none',
  factor=1.0,
  low_frequency_factor=1.0,
  high_frequency_factor=4.0,
  original_positions=4096,
)
# 55.3 million parameters, 38.9 million of them in the matrix products of a decode step.
_REFERENCE = model.Config(
  vocab_size=32000,
  width=512,
  num_layers=8,
  num_heads=8,
  num_kv_heads=2,
  head_size=64,
  mlp_width=1408,
  rope=_ROPE,
  norm_epsilon=1e-6,
  attention_bias=False,
  query_key_norm=False,
  tied_embeddings=False,
  dtype='float32',
)
SHAPES = {
  # So small that a benchmark takes seconds: to try whether it runs.
  'tiny': dataclasses.replace(
    _REFERENCE,
    vocab_size=256,
    width=64,
    num_layers=1,
    num_heads=4,
    head_size=16,
    mlp_width=128,
  ),
  'reference': _REFERENCE,
  'qwen2_5_1_5b': dataclasses.replace(
    _REFERENCE,
    vocab_size=151936,
    width=1536,
    num_layers=28,
    num_heads=12,
    head_size=128,
    mlp_width=8960,
    attention_bias=True,
    tied_embeddings=True,
    dtype='bfloat16',
  ),
}
