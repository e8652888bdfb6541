"""Grading settings: the workers and their limits, the verifier and the rewards."""

import dataclasses

from exgrpo_jax.config import PAPER, check_known, setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reward_functions, rewards, verifier

_LARGEST_WEIGHT = 1e5
MAX_AUTO_WORKERS = 16  # limit if workers=0; more workers would not help


@dataclasses.dataclass(frozen=True)
class GradingConfig:
  """Grading processes, their limits per response, the verifier and the rewards."""

  workers: int = setting(
    0, '[0, inf)', f'number of worker processes; 0 means one per core, up to {MAX_AUTO_WORKERS}'
  )
  time_limit: float = setting(
    5.0, '(0, inf)', 'seconds allowed for judging a response; after that, its worker is killed'
  )
  memory_limit: int = setting(
    1024, '[1, inf)', 'MiB of memory that a worker may use to judge responses'
  )
  max_length: int = setting(
    200_000,
    '[1, inf)',
    'the maximum number of characters to judge; a longer response is judged without the start of '
    "its reasoning, or counts as unanswered if the text after its last '</think>' is also too long",
  )
  verifier: str = setting(
    'built_in',
    None,
    'the verifier, which decides whether a response is correct: built_in, math_verify (the '
    "authors' choice, which evaluates text from a model), or your own as 'package.module:Class'",
  )
  rewards: tuple[str, ...] = setting(
    ('correctness',),
    None,
    "reward functions, whose weighted sum is a response's reward: "
    f"{', '.join(rewards.BUILT_IN)}, or your own as 'package.module:function'; 'correctness' is 1 "
    'for a correct response, else 0',
    PAPER,
  )
  weights: tuple[float, ...] = setting(
    (), None, "the rewards' weights, in order; () means weight 1 for each"
  )
  batched: tuple[str, ...] = setting(
    (),
    None,
    'the functions in `grading.rewards` that score a batch of responses at once, for example with '
    'a small model or a service; they run in a separate process',
  )
  batch_size: int = setting(64, '[1, 2048]', 'responses per batch')
  batch_timeout: float = setting(
    60.0,
    '(0, inf)',
    'time limit for computing the rewards of a batch, in seconds; after that, the process is '
    'killed, and a new process retries the batch',
  )
  overlong_buffer: int = setting(
    0,
    '[0, inf)',
    "the number of tokens before rollout.max_response over which the reward 'overlong' falls from "
    '0 to -1; 0 means a fifth of rollout.max_response',
  )

  @property
  def weight_of(self) -> dict[str, float]:
    """Return the rewards' weights by name, in the config's order."""
    names = map(reward_functions.name_of, self.rewards)
    return dict(zip(names, self.weights or (1.0,) * len(self.rewards)))

  @property
  def correctness_alone(self) -> 'GradingConfig':
    """Return a copy whose only reward is correctness, as in evaluation."""
    return dataclasses.replace(self, rewards=('correctness',), weights=(), batched=())


def check_rewards(config: GradingConfig, max_response: int) -> None:
  """Raise InputError if the verifier, a reward, a weight or the overlong buffer is invalid.

  `max_response` is the maximum length of a response, in tokens; overlong_buffer must not exceed it.
  """
  if ':' not in config.verifier:
    choices = (*verifier.NAMES, 'package.module:Class')
    check_known(config.verifier, choices, 'config.grading.verifier')
  names = [reward_functions.name_of(spec) for spec in config.rewards]
  if not names:
    raise InputError(
      "config.grading.rewards=(): the list is empty. Add a reward, such as 'correctness'."
    )
  for spec in config.rewards:
    if ':' not in spec:
      check_known(spec, (*rewards.BUILT_IN, 'package.module:function'), 'config.grading.rewards')
  for name in names:
    if names.count(name) > 1:
      raise InputError(
        f'config.grading.rewards={config.rewards}: {names.count(name)} functions are named '
        f"'{name}'. Rewards are logged by name, so rename or remove one."
      )
  _check_weights(config)
  for spec in config.batched:
    check_known(spec, config.rewards, 'config.grading.batched: config.grading.rewards')
    if spec in rewards.BUILT_IN:
      raise InputError(
        f"config.grading.batched={config.batched}: the built-in '{spec}' takes one "
        'response at a time. Remove it from this setting, because only your own functions can take '
        'a batch.'
      )
  if config.overlong_buffer > max_response:
    raise InputError(
      f'config.grading.overlong_buffer={config.overlong_buffer} exceeds '
      f'config.rollout.max_response={max_response}, but the buffer is the last part of a response. '
      'Lower config.grading.overlong_buffer.'
    )


def _check_weights(config: GradingConfig) -> None:
  if config.weights and len(config.weights) != len(config.rewards):
    raise InputError(
      f'config.grading.weights={config.weights}: the number of weights must equal the number of '
      f'functions in config.grading.rewards={config.rewards}. Set one weight per function, or () '
      'to give every function weight 1.'
    )
  if not all(abs(weight) <= _LARGEST_WEIGHT for weight in config.weights):  # also rejects NaN
    raise InputError(
      f'config.grading.weights={config.weights}: each weight must be a number from '
      f'-{_LARGEST_WEIGHT:g} to {_LARGEST_WEIGHT:g}, because advantages are computed in float32.'
    )
