"""Runs every part once, in under a minute, to test the installation.

exgrpo train --config=smoke --workdir=/tmp/smoke
The model learns next to nothing; use configs/arithmetic.py to see one learn.
"""

from exgrpo_jax.configs import arithmetic


def get_config():
  config = arithmetic.get_config()
  config.num_steps = 4
  config.rollout.update(dict(questions=8, group_size=4, slots=32))
  config.replay.start_pass_rate = 0.0  # so that replay starts within this short run
  config.data.train = 'arithmetic:train[20000:20064]'
  config.data.evaluation = ('arithmetic:test[:64]',)
  config.warm_start.update(dict(num_updates=60, data='arithmetic:train[:2000]'))
  config.evaluation.every = 4
  config.checkpoint.every = 2
  return config
