"""The paper's continual training: ExGRPO from a stronger policy, LUFFY's (arXiv:2504.14945).

exgrpo train --config=luffy_7b_continual --workdir=/tmp/run
Not yet run here. The data are those of qwen2_5_math_1_5b.py. Off-policy traces, as LUFFY itself
was trained on, are --config.experience.path=openr1.parquet, whose target column has them if prepare
was told to --keep_target; --config.experience.missing_logprobs=zero weighs them as LUFFY does.
"""

from exgrpo_jax.configs import qwen2_5_math_7b


def get_config():
  config = qwen2_5_math_7b.get_config()
  config.model.repository = 'Elliott/LUFFY-Qwen-Math-7B-Zero'
  # The authors trained it from a Qwen2.5-Math-7B whose context they had extended already.
  config.model.rope.theta = config.model.extension.rope_theta
  config.model.extension.update(dict(rope_theta=0.0, max_position_embeddings=0))
  return config
