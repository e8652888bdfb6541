"""Llama 3.1 8B as tuned for instructions.

exgrpo train --config=llama3_1_8b_instruct --workdir=/tmp/run
The licence is accepted on the model's page, then 'hf auth login'. The paper's figures (in / out of
distribution): on-policy 19.9 / 44.9, ExGRPO 23.0 / 52.0; not yet run here. The data are those
of qwen2_5_math_1_5b.py.
"""

from exgrpo_jax.configs import llama3_1_8b


def get_config():
  config = llama3_1_8b.get_config()
  config.model.repository = 'meta-llama/Llama-3.1-8B-Instruct'
  return config
