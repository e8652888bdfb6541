"""Supervised training of the base policy of chains, followed by ExGRPO.

exgrpo train --config=chains_from_scratch --workdir=/tmp/chains_from_scratch
To create only the base policy (exgrpo_jax/huggingface/shipped/chains), in /tmp/base/export/last:
exgrpo train --config=chains_from_scratch --workdir=/tmp/base --config.num_steps=0 \
  --config.export.last=True
The supervised training takes five minutes on two AVX2 cores; the config chains skips it. The
studies use chains_from_scratch because some of them change the supervised training. After this
training, held-out pass@1 at temperature 1 is .45.
"""

from exgrpo_jax.configs import arithmetic


def get_config():
  config = arithmetic.get_config()
  config.num_steps = 60
  config.rollout.update(dict(questions=16, slots=128))
  config.data.train = 'chains:train'
  config.data.evaluation = ('chains:test', 'chains:ood[:500]')
  config.warm_start.update(
    # Don't stop early at any pass rate: the last thing that the policy learns is to use the terms
    # in order. The seed is fixed so that runs with different seeds start from the same policy.
    dict(
      num_updates=2000, data='chains:pretraining', learning_rate=5e-3, stop_at_pass_rate=1.0, seed=2
    )
  )
  config.model.update(
    dict(width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, mlp_width=192)
  )
  config.evaluation.every = 20
  config.optimizer.update(dict(learning_rate=2e-4, warmup_updates=5))
  config.metrics.recorded_groups = 16  # all groups, because their responses are short
  return config
