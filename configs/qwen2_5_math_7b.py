"""Qwen2.5-Math 7B: the paper's main backbone.

exgrpo train --config=qwen2_5_math_7b --workdir=/tmp/run
The data is the same as in qwen2_5_math_1_5b.py. docs/slices.md estimates memory and time.
Not yet run here. The paper's scores (in / out of distribution): on-policy 45.3 / 56.4, ExGRPO
48.3 / 58.3.
"""

from exgrpo_jax.configs import qwen2_5_math_1_5b


def get_config():
  config = qwen2_5_math_1_5b.get_config()
  config.rollout.slots = 1024  # for v5e:8x8 (64 chips); see docs/slices.md
  config.mesh.decoding.tensor = 4  # each chip holds a quarter of the weights
  config.model.repository = 'Qwen/Qwen2.5-Math-7B'
  config.model.update(
    dict(
      vocab_size=152064,
      width=3584,
      num_layers=28,
      num_heads=28,
      num_kv_heads=4,
      head_size=128,
      mlp_width=18944,
      tied_embeddings=False,
    )
  )
  return config
