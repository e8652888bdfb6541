"""Rollout settings: the size of a step, and how responses are generated."""

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

# Groups to begin per `group_size` slots. Most slots contain the longest response of a group whose
# other responses are complete. With lognormal lengths and a 99th percentile of 8 times the median,
# 2.5 groups keep 95% of the slots busy. Beyond 2.75, additional groups only wait.
_GROUPS_PER_SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Settings for the size of a step and the sampling of responses."""

  questions: int = setting(128, '[1, inf)', 'questions per step (Q)', PAPER)
  group_size: int = setting(
    8, '[2, inf)', 'rollouts per question (K); an advantage compares at least two of them', PAPER
  )
  max_prompt: int = setting(1024, '[1, inf)', 'maximum prompt length, in tokens', AUTHORS)
  max_response: int = setting(8192, '[1, inf)', 'maximum response length, in tokens', PAPER)
  temperature: float = setting(
    1.0,
    '(0, inf)',
    'temperature for sampling from the full softmax and for all log-probabilities in training',
    PAPER,
  )
  slots: int = setting(256, '[1, inf)', 'responses decoded together')
  drafts: str = setting(
    '0',
    drafts.CHOICES,
    'tokens drafted per row per decoding pass, copied from the row itself or from other responses '
    'to the question. Drafts speed up sampling and affect responses only through rounding; auto '
    'chooses a number that suits the number of slots and the platform',
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
    'partial rollouts: groups in flight when a step begins, including the groups that it will '
    'train on; fewer groups make responses less stale but leave more slots idle; 0 chooses enough '
    'to keep the slots busy',
  )
  max_staleness: int = setting(
    8,
    '[1, inf)',
    "partial rollouts: maximum staleness, in steps from a group's first token to the step that "
    'trains on it; a step waits for groups that would be too old in the next step',
  )
  dynamic_sampling: float = setting(
    1.0,
    '[1, inf)',
    'dynamic sampling (DAPO): a step draws questions until enough fresh groups have unequal '
    'rewards, but at most this multiple of the fresh groups that it trains on; 1 turns it off',
  )
  router_replay: bool = setting(
    False,
    None,
    'mixture-of-experts models: training uses the experts that the sampler chose for each token, '
    'including in replayed responses (arXiv:2510.11370)',
  )
  logit_chunk: int = setting(
    16384, '[1, inf)', 'tokens whose logits are in memory at once in training, per data shard'
  )

  def __post_init__(self) -> None:
    max_groups = self.questions * (self.max_staleness + 1)
    if not self.questions <= self.groups_in_flight <= max_groups:
      raise InputError(
        f'config.rollout.max_groups_in_flight={self.max_groups_in_flight}: the value must be '
        f'between config.rollout.questions={self.questions} and {max_groups}, which is questions * '
        f'(config.rollout.max_staleness={self.max_staleness} + 1). A step trains on '
        f'{self.questions} groups, and no group may wait for more than config.rollout.max_staleness'
        ' steps. Choose a number in this range, or 0.'
      )

  @property
  def groups_in_flight(self) -> int:
    """Return the number of groups in flight when a step begins (Q without partial rollouts)."""
    if not self.partial:
      return self.questions
    num_groups = self.questions + _GROUPS_PER_SAMPLES * math.ceil(self.slots / self.group_size)
    return self.max_groups_in_flight or min(num_groups, self.questions * (self.max_staleness + 1))

  @property
  def is_dynamic(self) -> bool:
    """Return True if dynamic sampling is on."""
    return self.dynamic_sampling > 1

  @property
  def keeps_groups(self) -> bool:
    """Return True if a step may leave groups for the next step."""
    return self.partial or self.is_dynamic

  @property
  def questions_at_once(self) -> int:
    """Return the maximum number of distinct questions that a step works on."""
    extra_questions = math.floor(self.dynamic_sampling * self.questions) if self.is_dynamic else 0
    return self.groups_in_flight + extra_questions

  @property
  def longest_row(self) -> int:
    """Return the maximum number of tokens in a prompt plus its response."""
    return self.max_prompt + self.max_response

  @property
  def prompts(self) -> int:
    """Return how many prompts are kept prefilled: one per question, but at most one per slot."""
    return min(self.questions, self.slots)

  def decode_spec(
    self, tokenizer: Tokenizer, distribution: Distribution | None = None
  ) -> DecodeSpec:
    """Return the decode settings. `distribution` defaults to the full softmax at `temperature`."""
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
    """Return the settings for scoring rows. For the arguments, see `ScoreSpec`."""
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
  """Settings for checking that the log-probabilities of sampler and trainer agree."""

  every: int = setting(50, '[1, inf)', 'steps between comparisons, starting with step 1')
  max: float = setting(
    1.0,
    '(0, inf)',
    'largest difference allowed for any token, in nats; a larger difference stops the run. 1 suits '
    'bfloat16; in float32, differences stay within 1e-4',
  )
