"""Settings of rollouts: the size of a step, and how responses are generated."""

import dataclasses
import math

from jax.sharding import Mesh

from exgrpo_jax.config import AUTHORS, PAPER, setting
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy.model import ShapeConfig
from exgrpo_jax.rollout import drafts
from exgrpo_jax.rollout.decode_loop import DecodeSpec
from exgrpo_jax.rollout.scoring import ScoreSpec
from exgrpo_jax.rollout.token_sampling import Distribution

# Groups that are begun for each `group_size` slots. Most slots hold the longest responses of groups
# whose others are complete. With lognormal lengths and a 99th percentile of 8 medians, 2.5 keep 95%
# of the slots busy. More than 2.75 change nothing because they wait.
_GROUPS_PER_SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Settings of rollouts: how many questions and responses a step has, and how it samples them."""

  questions: int = setting(128, '[1, inf)', 'questions in a step (Q)', PAPER)
  group_size: int = setting(
    8, '[2, inf)', 'rollouts per question (K); an advantage compares at least two', PAPER
  )
  max_prompt: int = setting(1024, '[1, inf)', 'longest prompt, in tokens', AUTHORS)
  max_response: int = setting(8192, '[1, inf)', 'longest response, in tokens', PAPER)
  temperature: float = setting(
    1.0,
    '(0, inf)',
    'of sampling, which draws from the whole softmax, and of all log-probabilities in training',
    PAPER,
  )
  slots: int = setting(256, '[1, inf)', 'responses decoded together')
  drafts: str = setting(
    '0',
    drafts.CHOICES,
    'tokens drafted per row and decode pass, from other responses to the question; they make '
    'sampling faster and change no response except by rounding; auto chooses by the number of '
    'slots and the platform',
  )
  partial: bool = setting(
    False,
    None,
    'partial rollouts: a step ends when enough groups are complete, and the next step continues '
    'the unfinished responses; otherwise a step waits for its longest response',
  )
  max_groups_in_flight: int = setting(
    0,
    '[0, inf)',
    'partial rollouts: groups in flight when a step begins, including the ones it will train; '
    'fewer make responses less stale and leave more slots idle; 0 chooses as many as keep the '
    'slots busy',
  )
  max_staleness: int = setting(
    8,
    '[1, inf)',
    'partial rollouts: largest staleness, in steps from the first token of a group to the step '
    'that trains it; a step waits for groups that would be too old in the next one',
  )
  router_replay: bool = setting(
    False,
    None,
    'models with experts: training uses the experts that the sampler chose for each token, also '
    'in replayed responses (arXiv:2510.11370)',
  )
  logit_chunk: int = setting(
    16384, '[1, inf)', 'tokens whose logits exist at once in training, on each part of the rows'
  )

  def __post_init__(self) -> None:
    most = self.questions * (self.max_staleness + 1)
    if (
      self.partial
      and self.max_groups_in_flight
      and not self.questions <= self.max_groups_in_flight <= most
    ):
      raise InputError(
        f'config.rollout.max_groups_in_flight={self.max_groups_in_flight}: the number must be from '
        f'config.rollout.questions={self.questions} to {most}, which is questions * '
        f'(config.rollout.max_staleness={self.max_staleness} + 1). A step trains {self.questions} '
        'groups, and no group may wait for longer. Choose a number in this range, or 0.'
      )

  @property
  def groups_in_flight(self) -> int:
    """Return the groups in flight when a step begins; without partial rollouts, the step's own."""
    if not self.partial:
      return self.questions
    enough = self.questions + _GROUPS_PER_SAMPLES * math.ceil(self.slots / self.group_size)
    return self.max_groups_in_flight or min(enough, self.questions * (self.max_staleness + 1))

  @property
  def longest_row(self) -> int:
    """Return the tokens of the longest prompt plus the longest response."""
    return self.max_prompt + self.max_response

  @property
  def prompts(self) -> int:
    """Return how many prompts are kept prefilled: a step's, but at most one per slot."""
    return min(self.questions, self.slots)

  def decode_spec(
    self, tokenizer: Tokenizer, distribution: Distribution | None = None
  ) -> DecodeSpec:
    """Return how to sample, by default from the softmax at the training temperature."""
    return DecodeSpec(
      distribution=distribution or Distribution(self.temperature),
      slots=self.slots,
      prompts=self.prompts,
      max_prompt=self.max_prompt,
      max_response=self.max_response,
      eos_ids=tokenizer.eos_ids,
      pad_id=tokenizer.pad_id,
      keeps_routes=self.router_replay,
      drafts=self.drafts,
    )

  def score_spec(self, shape: ShapeConfig, mesh: Mesh, tokens_per_pass: int) -> ScoreSpec:
    """Return how to score rows of prompts and responses; for the arguments see `ScoreSpec`."""
    return ScoreSpec(
      model=shape,
      mesh=mesh,
      limit=self.longest_row,
      tokens_per_pass=tokens_per_pass,
      temperature=self.temperature,
      logit_chunk=self.logit_chunk,
      keeps_routes=self.router_replay,
    )


@dataclasses.dataclass(frozen=True)
class LogprobCheckConfig:
  """Sampler–trainer mismatch: how much their log-probabilities may differ."""

  every: int = setting(50, '[1, inf)', 'steps between comparisons; the first step always has one')
  rows: int = setting(64, '[1, inf)', 'responses compared each time')
  max: float = setting(
    1.0,
    '(0, inf)',
    'largest allowed difference of a token, in nats; a larger one stops the run; 1 suits '
    'bfloat16, and float32 stays within 1e-4',
  )
