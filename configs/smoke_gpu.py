"""Tests bfloat16 training on this GPU, on the arithmetic task with a wider model.

exgrpo train --config=smoke_gpu --workdir=/tmp/smoke_gpu
To train a checkpoint on a GPU, use configs/one_gpu.py.
"""

from exgrpo_jax.configs import arithmetic


def get_config():
  config = arithmetic.get_config()
  config.rollout.update(dict(questions=64, slots=512))
  config.data.train = 'arithmetic:train[20000:21280]'
  config.model.update(
    dict(
      width=256,
      num_layers=4,
      num_heads=4,
      num_kv_heads=2,
      head_size=64,
      mlp_width=768,
      dtype='bfloat16',
    )
  )
  config.logprob_check.max = 1.0  # allows for bfloat16 rounding
  return config
