"""Llama 3.1 8B, instruction-tuned.

exgrpo train --config=llama3_1_8b_instruct --workdir=/tmp/run
Accept the licence on the model's page, then run 'hf auth login'. The data is the same as in
qwen2_5_math_1_5b.py. docs/slices.md estimates memory and time.
Not yet run here. The paper's scores (in / out of distribution): on-policy 19.9 / 44.9, ExGRPO
23.0 / 52.0.
"""

from exgrpo_jax.configs import llama3_1_8b


def get_config():
  config = llama3_1_8b.get_config()
  config.model.repository = 'meta-llama/Llama-3.1-8B-Instruct'
  return config
