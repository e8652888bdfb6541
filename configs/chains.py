"""Two minutes on two cores: ExGRPO from a mixture of careful, hasty and guessed solutions.

exgrpo train --config=chains --workdir=/tmp/chains
Plain GRPO in its place: --config.replay.ratio=0
It begins with a model that ships with the package; config chains_from_scratch makes that one.
TIMES AND SCORES
"""

from exgrpo_jax.configs import chains_from_scratch


def get_config():
  config = chains_from_scratch.get_config()
  config.model.path = 'shipped:chains'
  config.warm_start.num_updates = 0
  return config
