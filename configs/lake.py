"""ExGRPO on crossing a frozen lake of 4 by 4 squares in up to ten turns.

exgrpo train --config=lake --workdir=/tmp/lake
exgrpo train --config=lake:6 --workdir=/tmp/lake_6
Successes are rarer on larger maps (4, 5 or 6 squares per side). The warm start imitates a player
who sometimes strays.
After the warm start, training takes one to two minutes on two cores. In the study `lake` (five
seeds, learning rate 4e-4, replay from the first step, fresh rows unclipped), pass@1 went from .22
to .66 (.62 to .70). On the largest map (learning rate 8e-4), it went from .02 to .16 (.13 to .20).
"""

from exgrpo_jax.configs import guess
from exgrpo_jax.errors import InputError

# Side -> (turns, tokens in a map, tokens in everything after the map).
SIDES = {'4': (10, 24, 256), '5': (11, 32, 300), '6': (12, 48, 400)}


def get_config(side='4'):
  if side not in SIDES:
    raise InputError(
      f"'{side}' after the colon must be one of {', '.join(SIDES)}: the side length of the map"
    )
  turns, prompt, response = SIDES[side]
  config = guess.get_config()
  config.environment.update(dict(name='lake', max_turns=turns, max_turn_tokens=4))
  # On CPUs, an idle slot costs as much per decode step as a busy one.
  config.rollout.update(dict(max_prompt=prompt, max_response=response, slots=32))
  config.data.train = f'lake:train_{side}'
  config.data.evaluation = (f'lake:test_{side}[:200]',)
  config.warm_start.update(
    # With more updates, the policy memorizes the smallest maps' 1,200 episodes, including strays.
    dict(num_updates=250, batch_size=32, data=f'lake:pretraining_{side}')
  )
  return config
