"""Llama 3.1 8B: the paper's weak backbone, which collapses in on-policy training.

exgrpo train --config=llama3_1_8b --workdir=/tmp/run
Accept the licence on the model's page, then run 'hf auth login'. The data is the same as in
qwen2_5_math_1_5b.py. docs/slices.md estimates memory and time.
Not yet run here. The paper's scores (in / out of distribution): on-policy 3.4 / 1.2 (collapsed),
ExGRPO 6.1 / 30.8.
"""

from exgrpo_jax.configs import qwen2_5_math_1_5b


def get_config():
  config = qwen2_5_math_1_5b.get_config()
  config.rollout.slots = 448  # for v5e:8x8 (64 chips); see docs/slices.md
  config.mesh.decoding.tensor = 4  # each chip holds a quarter of the weights
  config.model.repository = 'meta-llama/Llama-3.1-8B'
  config.model.extension.update(dict(rope_theta=0.0, max_position_embeddings=0))
  config.model.update(
    dict(
      vocab_size=128256,
      width=4096,
      num_layers=32,
      num_heads=32,
      num_kv_heads=8,
      head_size=128,
      mlp_width=14336,
      norm_epsilon=1e-5,
      attention_bias=False,
      tied_embeddings=False,
    )
  )
  config.model.rope.update(
    dict(
      theta=5e5,
      scaling='llama3',
      factor=8.0,
      low_frequency_factor=1.0,
      high_frequency_factor=4.0,
      original_positions=8192,
    )
  )
  return config
