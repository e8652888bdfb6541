"""A model small enough for a test."""

from exgrpo_jax.policy import model
from tests.helpers.tiny import ROPE

SMALL = model.Config(
  vocab_size=256,
  width=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_size=32,
  mlp_width=256,
  rope=ROPE,
  norm_epsilon=1e-6,
  attention_bias=False,
  query_key_norm=False,
  tied_embeddings=False,
  dtype='float32',
)
