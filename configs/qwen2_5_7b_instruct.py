"""Qwen2.5 7B Instruct: a backbone that already follows instructions.

exgrpo train --config=qwen2_5_7b_instruct --workdir=/tmp/run
The data is the same as in qwen2_5_math_1_5b.py. docs/slices.md estimates memory and time.
Not yet run here. The paper's scores (in / out of distribution): on-policy 35.2 / 56.0, ExGRPO
39.3 / 62.2.
"""

from exgrpo_jax.configs import qwen2_5_math_7b


def get_config():
  config = qwen2_5_math_7b.get_config()
  config.model.repository = 'Qwen/Qwen2.5-7B-Instruct'
  config.model.extension.update(dict(rope_theta=0.0, max_position_embeddings=0))
  config.model.rope.theta = 1e6
  return config
