"""Settings of the algorithm: what is replayed, and which loss."""

import dataclasses

from exgrpo_jax.algorithm import losses, trajectory_rules
from exgrpo_jax.config import AUTHORS, OURS, PAPER, setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """Settings of replay: what is kept and what is replayed."""

  ratio: float = setting(
    0.5,
    '[0, 1)',
    "share of each step's questions that is drawn from the buffer; 0 is plain GRPO",
    PAPER,
  )
  include_trajectory: bool = setting(
    True,
    None,
    'whether a question drawn has a stored success beside K - 1 fresh responses; otherwise it is '
    'only revisited, with K fresh ones',
    PAPER,
  )
  start_pass_rate: float = setting(
    0.35, '[0, 1]', 'replay starts once the pass rate of a step exceeds it', PAPER
  )
  sigma: float = setting(
    1.0, '(0, inf)', 'standard deviation of the bucket weights, in successes of a group', PAPER
  )
  question_selection: str = setting(
    'gaussian',
    ('gaussian', 'linear', 'linear_clip', 'square_root', 'uniform', 'hardest', 'advantage'),
    'how replayed questions are drawn: bucket k by exp(-(k - K/2)^2 / (2 sigma^2)), k/K, '
    'min(k/K, 1/2) or sqrt(k/K), or any question alike, or from bucket 1 upwards, or each question '
    'by 1 - k/n, the advantage of a success in its latest group of n',
    PAPER,
  )
  trajectory_selection: str = setting(
    'lowest_entropy',
    trajectory_rules.RULES,
    'which stored success of a question is replayed',
    PAPER,
  )
  store: str = setting(
    'successes',
    ('successes', 'all'),
    'what is stored of a group: its successes, or all responses, also of groups without any',
    PAPER,
  )
  max_age: float = setting(
    float('inf'),
    '[1, inf]',
    'the oldest that is replayed, in steps; a question with nothing younger is not drawn',
    PAPER,
  )
  age_decay: float = setting(
    float('inf'),
    '(0, inf]',
    'questions that are alike otherwise are drawn by exp(-age / this), the age in steps being that '
    'of the newest success',
    PAPER,
  )
  bucket_by: str = setting(
    'correctness',
    ('correctness', 'question_length', 'response_length'),
    'how questions are put into buckets of difficulty',
    PAPER,
  )
  difficulty: str = setting(
    'all',
    ('all', 'easy', 'medium', 'hard'),
    'which questions train, by their latest correctness: easy is 0.75 or more, hard 0.25 or less',
  )
  count_replayed: bool = setting(
    True, None, "whether the replayed row counts in its group's correctness", AUTHORS
  )
  lower_bound: float = setting(
    0.0, '[0, 1)', 'a group with successes is recorded where its correctness is above this', AUTHORS
  )
  upper_bound: float = setting(
    1.0,
    '(0, 1]',
    'a group with successes is recorded where its correctness is at most this; one solved in full '
    'retires whatever the bounds',
    AUTHORS,
  )
  max_trajectories: int = setting(
    8,
    '[0, inf)',
    'successes kept for a question, the newest; 8 take about 6 GB of host memory for 46,000 '
    'questions and 2,000 tokens each; 0 is no limit',
    f"{OURS}; authors' code, 0",
  )
  retire: str = setting(
    'with_replay',
    ('with_replay', 'always', 'never'),
    'whether a question solved in full leaves buffer and stream: with_replay is only where '
    'ratio > 0, so that plain GRPO reads on',
    PAPER,
  )
  on_all_failed: str = setting(
    'stay',
    ('stay', 'bucket_0'),
    "where a question of the buffer goes when all of a group fails: stay, as in the authors' "
    'code, or bucket 0, which is next to never drawn',
    AUTHORS,
  )

  def __post_init__(self) -> None:
    if self.lower_bound >= self.upper_bound:
      raise InputError(
        f'config.replay.lower_bound={self.lower_bound} must be below '
        f'config.replay.upper_bound={self.upper_bound}: groups whose correctness lies between them '
        'are recorded.'
      )


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """Settings of the loss: what a token adds, how ratios are bounded, how the sum is normalised."""

  clip_schedule: str = setting(
    'until_replay',
    ('until_replay', 'always', 'never'),
    "when fresh rows' ratios are clipped",
    AUTHORS,
  )
  clip_epsilon: float = setting(
    0.2, '(0, 1)', 'fresh ratios are clipped to at least 1 - this', AUTHORS
  )
  clip_epsilon_high: float = setting(
    0.2,
    '(0, inf)',
    'fresh ratios are clipped to at most 1 + this; above clip_epsilon it is clip-higher',
    AUTHORS,
  )
  dual_clip: float = setting(
    float('inf'),
    '(1, inf]',
    'while clipping, a fresh token of negative advantage A adds at least this times A; inf is off',
  )
  policy_loss: str = setting(
    'ppo',
    losses.POLICY_LOSSES,
    'what a fresh token adds: its clipped ratio times A, '
    'or its log-probability times A times the clipped ratio as a constant',
    PAPER,
  )
  importance_level: str = setting(
    'token',
    ('token', 'sequence', 'product'),
    "a fresh token's ratio: its own, or the geometric mean or the product of its row's",
    PAPER,
  )
  tis_limit: float = setting(
    0.0,
    '[0, inf)',
    "fresh terms are weighted by the trainer's probability "
    "over the sampler's, at most this; 0 is off",
  )
  shaping: str = setting(
    'policy_shaping',
    losses.SHAPINGS,
    'what a replayed token of ratio w adds, times A: w / (w + beta), the same with slope 1 at '
    'w = 1, w, w ** shaping_exponent, shaping_weight x log pi, or w + shaping_weight x log pi',
    PAPER,
  )
  beta: float = setting(
    0.1,
    '(0, inf)',
    "the constant of the shaping 'policy_shaping', w / (w + beta), and of 'unit_slope'",
    PAPER,
  )
  shaping_exponent: float = setting(
    0.5, '(0, inf)', "of the shaping 'power'; 0.5 is the square root", AUTHORS
  )
  shaping_weight: float = setting(
    0.1, '(0, inf)', "of log pi in 'log' and 'ratio_plus_log'", AUTHORS
  )
  importance_correction: bool = setting(
    True,
    None,
    'whether w refers to the policy that wrote the replayed row; otherwise to the one at the start '
    'of the step, as if the step had written it',
    PAPER,
  )
  baseline: str = setting(
    'group',
    ('group', 'fresh'),
    "a fresh row's advantage: against its group's mean, or its fresh rows' mean",
    PAPER,
  )
  replay_advantage: str = setting(
    'group',
    ('group', 'zero', 'balanced'),
    "a replayed row's advantage: against its group's mean, or 0, or against the mean in which it "
    'weighs the slope of its shaping at w = 1, which is then the baseline of the fresh rows too',
    PAPER,
  )
  m2po_threshold: float = setting(
    float('inf'),
    '(0, inf]',
    'leaves out replayed tokens whose ratio has moved furthest to where their advantage pushes it, '
    'until the mean of (log w)^2 over the others of the step is at most this (M2PO: 0.04)',
    PAPER,
  )
  normalize_std: str = setting(
    'off',
    ('off', 'population', 'sample'),
    'divide advantages by the standard deviation of their group, over K or K - 1 rollouts',
    PAPER,
  )
  aggregation: str = setting(
    'constant',
    ('constant', 'token_mean', 'sequence_mean'),
    'how the sum over tokens is normalised',
    AUTHORS,
  )
  entropy_bonus: float = setting(
    1e-4,
    '[0, inf)',
    'coefficient of the mean token entropy, in nats',
    f'{AUTHORS}, 1e-3 of a mean over each microbatch of 5 to 10 rows',
  )
  balance_coefficient: float = setting(
    0.0,
    '[0, inf)',
    'models with experts: weight of the load-balancing loss, the mean over tokens and layers of '
    'that of their rows, which is 1 where the load is even (arXiv:2412.19437)',
  )
  kl_coefficient: float = setting(
    0.0, '[0, inf)', 'coefficient of KL(policy, reference), k3 estimator', AUTHORS
  )
  old_logprobs: str = setting(
    'rollout',
    ('rollout', 'recompute'),
    'who gives the log-probabilities of the policy that wrote a row',
  )

  def __post_init__(self) -> None:
    if self.replay_advantage == 'balanced' and self.baseline != 'group':
      raise InputError(
        "config.objective.replay_advantage='balanced' needs config.objective.baseline='group', "
        f'got {self.baseline!r}: both say what a fresh row is measured against.'
      )
    if self.replay_advantage == 'balanced' and self.shaping not in losses.SLOPES:
      raise InputError(
        "config.objective.replay_advantage='balanced' weighs a replayed row by the slope of its "
        f'shaping at w = 1, and losses.SLOPES has none for {self.shaping!r}.'
      )
    if self.tis_limit > 0 and self.old_logprobs != 'recompute':
      raise InputError(
        f'config.objective.tis_limit={self.tis_limit} needs '
        "config.objective.old_logprobs='recompute': it weighs the trainer's "
        "log-probabilities against the sampler's."
      )
    if self.dual_clip < float('inf') and self.policy_loss == 'cispo':
      raise InputError(
        f'config.objective.dual_clip={self.dual_clip} needs '
        "config.objective.policy_loss='ppo': cispo bounds every ratio already."
      )
