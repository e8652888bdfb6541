"""A frozen lake of 4 by 4 squares: ExGRPO over episodes of at most ten turns.

exgrpo train --config=lake --workdir=/tmp/lake
exgrpo train --config=lake:6 --workdir=/tmp/lake_6
The larger the map (4, 5 or 6 squares to a side), the rarer a success. The warm start learns from a
player who strays.
"""

from exgrpo_jax.configs import guess
from exgrpo_jax.errors import InputError

# Side -> turns, and tokens of a map and of all that follows it.
SIDES = {'4': (10, 24, 256), '5': (11, 32, 300), '6': (12, 48, 400)}


def get_config(side='4'):
  if side not in SIDES:
    raise InputError(
      f"'{side}' after the colon must be one of {', '.join(SIDES)}: the side of a map"
    )
  turns, prompt, response = SIDES[side]
  config = guess.get_config()
  config.environment.update(dict(name='lake', max_turns=turns, max_turn_tokens=4))
  # A step of the CPU's decoding costs as much for an idle slot as for a busy one.
  config.rollout.update(dict(max_prompt=prompt, max_response=response, slots=32))
  config.data.train = f'lake:train_{side}'
  config.data.evaluation = (f'lake:test_{side}[:200]',)
  config.warm_start.update(
    # More updates learn the 1,200 episodes of the smallest maps by heart, strays included.
    dict(num_updates=250, batch_size=32, data=f'lake:pretraining_{side}')
  )
  return config
