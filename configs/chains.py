"""Five minutes on two cores: ExGRPO from a mixture of careful, hasty and guessed solutions.

exgrpo train --config=chains --workdir=/tmp/chains
Plain GRPO in its place: --config.replay.ratio=0
Most of it is the warm start; keep that with --config.warm_start.path for other runs.
Held-out pass@1 at temperature 1, one seed: .43 after the warm start and .92 at the end, in and out
of distribution, and .88 and .89 on another machine; .91 and .88 with plain GRPO, which reads twice
as many fresh questions. docs/results.md has the studies that begin with it, and what they do not
show.
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
    # Runs of all seeds begin with the policy that it makes, as those of a language model do.
    dict(num_updates=2000, data='chains:pretraining', learning_rate=5e-3, enough=1.0, seed=2)
  )
  config.model.update(
    dict(width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, mlp_width=192)
  )
  config.evaluation.every = 20
  config.optimizer.update(dict(learning_rate=2e-4, warmup_updates=5))
  config.metrics.recorded_groups = 16  # all: they are short
  return config
