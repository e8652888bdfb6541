"""Environment settings."""

import dataclasses

from exgrpo_jax.config import check_known, setting
from exgrpo_jax.errors import InputError

BUILT_IN = {
  'guess': 'exgrpo_jax.environments.toys:Guess',
  'calculator': 'exgrpo_jax.environments.toys:Calculator',
  'lake': 'exgrpo_jax.environments.toys:Lake',
  'tools': 'exgrpo_jax.environments.tools:Tools',
  'attempts': 'exgrpo_jax.environments.toys:Attempts',
  'textarena': 'exgrpo_jax.environments.adapters:TextArena',
  'gymnasium': 'exgrpo_jax.environments.adapters:Gymnasium',
}


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """The environment that the policy acts in, and episode limits."""

  name: str = setting(
    '',
    None,
    f"{', '.join(BUILT_IN)}, or your own 'package.module:Class'; '' means single-turn responses, "
    'graded according to `grading`',
  )
  tools: tuple[str, ...] = setting(
    (),
    None,
    "functions that the model may call, as 'package.module:function', such as "
    'exgrpo_jax.environments.expressions:calculate, or classes whose methods it may call, as '
    "'package.module:Class'; requires `environment.name=tools` or your own class that accepts "
    'tools',
  )
  max_turns: int = setting(
    8, '[1, inf)', 'the maximum number of turns; an episode that has not finished by then fails'
  )
  max_turn_tokens: int = setting(
    0, '[0, inf)', "a turn's maximum length, in tokens; 0 means the rest of rollout.max_response"
  )
  discount: float = setting(
    1.0,
    '(0, 1]',
    "the discount for later turns: an episode's reward is the sum over t, from 0, of discount^t "
    'times the reward of turn t',
  )
  workers: int = setting(
    0,
    '[0, inf)',
    'number of environment processes, each answering one turn at a time; 0 means one per core. If '
    'turns wait on something external, use one process per waiting episode',
  )
  time_limit: float = setting(
    5.0, '(0, inf)', 'time limit for answering a turn, in seconds; after that, the episode fails'
  )
  memory_limit: int = setting(1024, '[1, inf)', 'MiB of memory that a worker may use for episodes')
  keep_caches: bool = setting(
    True,
    None,
    'keep the KV caches of episodes that give up their slot while they wait for the environment, '
    "up to one cache per slot. This doubles the slots' memory. An episode whose cache is not kept "
    'recomputes it at each turn',
  )

  @property
  def spec(self) -> str:
    """Return the environment's class as 'package.module:Class'."""
    return BUILT_IN.get(self.name, self.name)

  @property
  def keeps_caches(self) -> bool:
    """Return True if there is an environment and caches are kept between turns."""
    return bool(self.name) and self.keep_caches


def check(config: EnvironmentConfig) -> None:
  """Raise InputError if the environment is unknown, or if its tools are missing or unsupported."""
  if config.name and ':' not in config.name:
    check_known(config.name, (*BUILT_IN, 'package.module:Class'), 'config.environment.name')
  if (config.name == 'tools') > bool(config.tools):
    raise InputError(
      "config.environment.tools=(): config.environment.name='tools' requires functions for the "
      'model to call. List at least one, such as '
      "('exgrpo_jax.environments.expressions:calculate',)."
    )
  if config.tools and config.name != 'tools' and ':' not in config.name:
    raise InputError(
      f'config.environment.tools={config.tools}: config.environment.name={config.name!r} does not '
      "accept tools. Set the name to 'tools' or to your own class that accepts tools."
    )
