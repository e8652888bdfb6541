"""Settings of grading: the workers and their limits, the verifier and the rewards."""

import dataclasses

from exgrpo_jax.config import PAPER, check_known, setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reward_functions, rewards, verifier

_LARGEST_WEIGHT = 1e5
MAX_AUTO_WORKERS = 16  # if the number of cores decides; more gain nothing


@dataclasses.dataclass(frozen=True)
class GradingConfig:
  """The grading processes, their limits for one response, the verifier and the rewards."""

  workers: int = setting(
    0, '[0, inf)', f'worker processes; 0 means one per core, {MAX_AUTO_WORKERS} at most'
  )
  time_limit: float = setting(
    5.0, '(0, inf)', 'seconds to judge a response; then its worker is killed'
  )
  memory_limit: int = setting(
    1024, '[1, inf)', 'MiB of memory that a worker may use to judge responses'
  )
  max_length: int = setting(
    200_000,
    '[1, inf)',
    'the maximum characters of a response to judge; a longer one loses the start of its thought, '
    "and has no answer if the text after its last '</think>' is too long as well",
  )
  max_failures: float = setting(
    0.01, '[0, 1]', "share of a step's responses that may time out or crash before a warning"
  )
  verifier: str = setting(
    'built_in',
    None,
    "the verifier, which decides if a response is right: built_in, math_verify (the authors' "
    "choice, which evaluates what a model wrote), or one of yours, 'package.module:Class'",
  )
  rewards: tuple[str, ...] = setting(
    ('correctness',),
    None,
    'reward functions, whose weighted sum is the reward of a response: '
    f"{', '.join(rewards.BUILT_IN)}, or one of yours, 'package.module:function'; 'correctness' is "
    '1 for a correct response, else 0',
    PAPER,
  )
  weights: tuple[float, ...] = setting(
    (), None, 'the weight of each reward, in order; () weighs each by 1'
  )
  batched: tuple[str, ...] = setting(
    (),
    None,
    'the `grading.rewards` that take a batch of responses at once and run in a separate process, '
    'such as a small model or a service',
  )
  batch_size: int = setting(64, '[1, 2048]', 'responses in a batch')
  batch_timeout: float = setting(
    60.0,
    '(0, inf)',
    'seconds for the rewards of a batch; then the process is killed and a new one gets the batch',
  )
  overlong_buffer: int = setting(
    0,
    '[0, inf)',
    "the last tokens before rollout.max_response, over which the reward 'overlong' falls from 0 to "
    '-1; 0 means a fifth of rollout.max_response',
  )

  @property
  def weight_of(self) -> dict[str, float]:
    """Return the weight of each reward by its name, in the order of the config."""
    names = map(reward_functions.name_of, self.rewards)
    return dict(zip(names, self.weights or (1.0,) * len(self.rewards)))

  @property
  def correctness_alone(self) -> 'GradingConfig':
    """Return a copy whose only reward is the verifier's 1 or 0, as in evaluation."""
    return dataclasses.replace(self, rewards=('correctness',), weights=(), batched=())


def check_rewards(config: GradingConfig, max_response: int) -> None:
  """Raise InputError if the rewards do not fit each other or the longest response in tokens."""
  if ':' not in config.verifier:
    known = (*verifier.NAMES, 'package.module:Class')
    check_known(config.verifier, known, 'config.grading.verifier')
  names = [reward_functions.name_of(spec) for spec in config.rewards]
  if not names:
    raise InputError("config.grading.rewards=(): name at least one reward, such as 'correctness'.")
  for spec in config.rewards:
    if ':' not in spec:
      check_known(spec, (*rewards.BUILT_IN, 'package.module:function'), 'config.grading.rewards')
  for name in names:
    if names.count(name) > 1:
      raise InputError(
        f'config.grading.rewards={config.rewards} has {names.count(name)} functions named '
        f"'{name}'. Rewards are logged by name, so rename or remove one."
      )
  _check_weights(config)
  for spec in config.batched:
    check_known(spec, config.rewards, 'config.grading.batched: config.grading.rewards')
    if spec in rewards.BUILT_IN:
      raise InputError(
        f"config.grading.batched={config.batched} has '{spec}', which takes one response at a "
        'time. Leave it out; only your own functions can take a batch.'
      )
  if config.overlong_buffer > max_response:
    raise InputError(
      f'config.grading.overlong_buffer={config.overlong_buffer} exceeds '
      f'config.rollout.max_response={max_response}, but it is the last part of a response. Lower '
      'it.'
    )


def _check_weights(config: GradingConfig) -> None:
  if config.weights and len(config.weights) != len(config.rewards):
    raise InputError(
      f'config.grading.weights={config.weights} has {len(config.weights)} numbers, but '
      f'config.grading.rewards={config.rewards} has {len(config.rewards)} functions. Give one '
      'weight for each, or () to weigh each by 1.'
    )
  if not all(abs(weight) <= _LARGEST_WEIGHT for weight in config.weights):  # nor NaN
    raise InputError(
      f'config.grading.weights={config.weights} must be numbers from -{_LARGEST_WEIGHT:g} to '
      f'{_LARGEST_WEIGHT:g}, because advantages are computed in float32.'
    )
