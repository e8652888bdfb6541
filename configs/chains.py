"""Five minutes on one core: ExGRPO from a mixture of careful, hasty and guessed solutions.

python -m exgrpo_jax.train --config=chains --workdir=/tmp/chains
Plain GRPO in its place: --config.replay.ratio=0
"""

from exgrpo_jax.configs import arithmetic


def get_config():
  config = arithmetic.get_config()
  config.num_steps = 60
  config.rollout.update(dict(questions=16, slots=128))
  config.data.train = 'chains:train'
  config.data.evaluation = ('chains:test', 'chains:ood[:500]')
  config.warm_start.update(
    # All of it, however often it is right: what it learns last is to use the terms in their order.
    # Small batches, for that takes many updates rather than many rows.
    dict(
      num_updates=4000,
      data='chains:pretraining',
      batch_size=16,
      learning_rate=4e-3,
      enough=1.0,
    )
  )
  config.model.update(
    dict(width=64, num_layers=2, num_heads=2, num_kv_heads=2, head_size=32, mlp_width=192)
  )
  config.model.rope.theta = 100.0  # rows have fewer than 90 tokens
  config.evaluation.update(dict(every=20, samples=1))
  config.optimizer.update(dict(learning_rate=1e-4, warmup_updates=5))
  return config
