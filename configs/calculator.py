"""Sums of large numbers with a calculator: ExGRPO over episodes of at most six turns.

exgrpo train --config=calculator --workdir=/tmp/calculator
The warm start learns from a player who at times stops early and at times takes a wrong number.
"""

from exgrpo_jax.configs import guess


def get_config():
  config = guess.get_config()
  config.environment.update(dict(name='calculator', max_turns=6, max_turn_tokens=12))
  config.rollout.update(dict(max_prompt=32, max_response=112))
  config.data.train = 'calculator:train'
  config.data.evaluation = ('calculator:test[:200]',)
  config.warm_start.data = 'calculator:pretraining'
  return config
