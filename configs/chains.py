"""Two minutes on two cores: ExGRPO from a mixture of careful, hasty and guessed solutions.

python -m exgrpo_jax.train --config=chains --workdir=/tmp/chains
Plain GRPO in its place: --config.replay.ratio=0
"""

from exgrpo_jax.configs import arithmetic


def get_config():
  config = arithmetic.get_config()
  config.num_steps = 100
  config.data.train = 'chains:train[20000:22560]'
  config.data.evaluation = ('chains:test[:500]', 'chains:ood[:500]')
  config.warm_start.update(
    # All of it, however often it is right: what it learns last are the hasty solutions.
    dict(num_updates=2000, data='chains:train[:20000]', learning_rate=5e-3, enough=1.0)
  )
  config.model.update(
    dict(width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, mlp_width=192)
  )
  config.evaluation.update(dict(every=25, samples=8))
  config.optimizer.learning_rate = 1e-4  # at 3e-4 nothing is left to learn after ten steps
  config.checkpoint.every = 50
  return config
