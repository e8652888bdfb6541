"""The paper's continual training: ExGRPO from LUFFY's stronger policy (arXiv:2504.14945).

exgrpo train --config=luffy_7b_continual --workdir=/tmp/run
The data is the same as in qwen2_5_math_1_5b.py. We have not run this config yet.
To add the off-policy traces that LUFFY was trained on, download the dataset's parquet file, and set
--config.experience.path to it: its column `target` contains the traces. With
--config.experience.missing_logprobs=zero, the traces get the same weights as in LUFFY.
"""

from exgrpo_jax.configs import qwen2_5_math_7b


def get_config():
  config = qwen2_5_math_7b.get_config()
  config.model.repository = 'Elliott/LUFFY-Qwen-Math-7B-Zero'
  # The authors extended the context of Qwen2.5-Math-7B before they trained this model.
  config.model.rope.theta = config.model.extension.rope_theta
  config.model.extension.update(dict(rope_theta=0.0, max_position_embeddings=0))
  return config
