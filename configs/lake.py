"""A frozen lake of 4 by 4 squares: ExGRPO over episodes of at most ten turns.

exgrpo train --config=lake --workdir=/tmp/lake
A larger map: --config.data.train=lake:train_6 --config.warm_start.data=lake:pretraining_6,
with more turns and longer responses. The warm start learns from a player who strays.
"""

from exgrpo_jax.configs import guess


def get_config():
  config = guess.get_config()
  config.environment.update(dict(name='lake', max_turns=10, max_turn_tokens=4))
  config.rollout.update(dict(max_prompt=24, max_response=256))
  config.data.train = 'lake:train_4'
  config.data.evaluation = ('lake:test_4[:200]',)
  # More updates learn its 1,200 episodes by heart, strays included.
  config.warm_start.update(dict(num_updates=400, data='lake:pretraining_4'))
  return config
