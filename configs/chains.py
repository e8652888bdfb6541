"""Eight minutes on one busy core: ExGRPO from a mixture of careful, hasty and guessed solutions.

python -m exgrpo_jax.train --config=chains --workdir=/tmp/chains
Plain GRPO in its place: --config.replay.ratio=0
Three quarters of it are the warm start; keep that with --config.warm_start.path for other runs.
Held-out avg@8 at temperature 1, 2 seeds: 0.52 after the warm start, where each number of right
responses, 0 to 8 of 8, has 7 to 14% of the questions; 0.88 to 0.93 at step 25 and 0.93 to 0.98 at
the end, with replay and without. docs/results.md has the table.
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
