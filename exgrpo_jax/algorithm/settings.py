"""Algorithm settings: replay and loss."""

import dataclasses

from exgrpo_jax.algorithm import advantages, losses, question_rules, trajectory_rules
from exgrpo_jax.config import AUTHORS, OURS, PAPER, setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """Replay settings: which responses to store and which to replay."""

  ratio: float = setting(
    0.5, '[0, 1)', "fraction of each step's questions drawn from the buffer; 0 is plain GRPO", PAPER
  )
  include_trajectory: bool = setting(
    True,
    None,
    'for each drawn question, train on a stored success and K - 1 fresh responses; if off, train '
    'on K fresh responses',
    PAPER,
  )
  start_pass_rate: float = setting(
    0.35, '[0, 1]', "replay starts once a step's pass rate exceeds this value", PAPER
  )
  sigma: float = setting(
    1.0, '(0, inf)', 'standard deviation of the bucket weights, in successes per group', PAPER
  )
  question_selection: str = setting(
    'gaussian',
    question_rules.ALL,
    'the weights for drawing replayed questions. For bucket k: '
    'exp(-(k - K/2)^2 / (2 sigma^2)) (gaussian), k/K (linear), min(k/K, 1/2) (linear_clip) or '
    'sqrt(k/K) (square_root). uniform: equal for all questions. hardest: bucket 1 first, then '
    "bucket 2 and so on. advantage: 1 minus the question's correctness, which is the advantage of "
    'a success in its latest group. headroom_drift: the questions with the least probable '
    'successes first, excluding successes that have drifted by more than max_drift '
    '(arXiv:2609.03941)',
    PAPER,
  )
  # Configurable because drift grows with the learning rate: the paper's 1e-3 suits a rate of 1e-6.
  max_drift: float = setting(
    1e-3,
    '(0, inf]',
    'for headroom_drift: a success may be replayed only if the mean squared change in its '
    'log-probabilities is at most this value; episodes may need 0.01',
    'arXiv:2609.03941',
  )
  trajectory_selection: str = setting(
    'lowest_entropy',
    trajectory_rules.RULES,
    "the rule that picks one of a question's stored successes to replay",
    PAPER,
  )
  store: str = setting(
    'successes',
    ('successes', 'all'),
    "the responses to store: only a group's successes, or all graded responses, even if none "
    'succeeded',
    PAPER,
  )
  max_age: float = setting(
    float('inf'),
    '[1, inf]',
    'the maximum age of a replayed success, in steps; questions with only older successes are not '
    'drawn',
    PAPER,
  )
  age_decay: float = setting(
    float('inf'),
    '(0, inf]',
    'weight otherwise equal questions by exp(-age / age_decay), where age is the number of steps '
    'since their newest success',
    PAPER,
  )
  bucket_by: str = setting(
    'correctness',
    ('correctness', 'question_length', 'response_length'),
    'the measure that sorts questions into difficulty buckets',
    PAPER,
  )
  difficulty: str = setting(
    'all',
    ('all', 'easy', 'medium', 'hard'),
    'the questions to train on, by their latest correctness: easy is 0.75 or more, hard is 0.25 '
    'or less, and medium is in between',
  )
  count_replayed: bool = setting(
    True, None, "count the replayed row in its group's correctness", AUTHORS
  )
  correctness_range: tuple[float, ...] = setting(
    (0.0, 1.0),
    None,
    'record a group with successes if its correctness is above the first number and at most the '
    'second; a fully solved question retires regardless of this range',
    AUTHORS,
  )
  max_trajectories: int = setting(
    8,
    '[0, inf)',
    'the number of most recent successes to keep per question; keeping 8 takes about 6 GB of host '
    'memory for 46,000 questions and 2,000 tokens per success; 0 means no limit',
    f"{OURS}; authors' code, 0",
  )
  retire: str = setting(
    'with_replay',
    ('with_replay', 'always', 'never'),
    'when to drop a fully solved question from the buffer and the question stream: with_replay '
    'drops it only if ratio > 0, so that plain GRPO keeps training on it',
    PAPER,
  )
  on_all_failed: str = setting(
    'stay',
    ('stay', 'bucket_0'),
    'what happens to a question in the buffer if all responses in its group fail: it stays in its '
    "bucket, as in the authors' code, or moves to bucket 0, which is rarely drawn",
    AUTHORS,
  )

  def __post_init__(self) -> None:
    bounds = self.correctness_range
    if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= 1:
      raise InputError(
        f'config.replay.correctness_range={bounds}: the value must be two numbers from 0 to 1, '
        'with the first less than the second. (0.0, 1.0) records every group with at least one '
        'success.'
      )


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """Loss settings: token terms, ratio bounds and normalization."""

  clip_schedule: str = setting(
    'until_replay',
    ('until_replay', 'always', 'never'),
    'when fresh ratios are clipped: in steps before replay starts (until_replay), in all steps '
    '(always), or never',
    AUTHORS,
  )
  clip_epsilon: float = setting(
    0.2, '(0, 1)', 'fresh ratios are clipped to at least 1 - clip_epsilon', AUTHORS
  )
  clip_epsilon_high: float = setting(
    0.2,
    '(0, inf)',
    'fresh ratios are clipped to at most 1 + clip_epsilon_high; a value above clip_epsilon is '
    'clip-higher',
    AUTHORS,
  )
  dual_clip: float = setting(
    float('inf'),
    '(1, inf]',
    'while ratios are clipped, the term of a fresh token with negative advantage A is at least '
    'dual_clip times A; inf turns this off',
  )
  policy_loss: str = setting(
    'ppo',
    losses.POLICY_LOSSES,
    "a fresh token's term: its clipped ratio times A (ppo), "
    'or its log-probability times A times the clipped ratio, without a gradient through the ratio '
    '(cispo)',
    PAPER,
  )
  importance_level: str = setting(
    'token',
    ('token', 'sequence', 'product'),
    "a fresh token's ratio: the token's own ratio (token), or the geometric mean (sequence) or the "
    "product (product) of its row's ratios",
    PAPER,
  )
  tis_limit: float = setting(
    0.0,
    '[0, inf)',
    "weight fresh terms by the trainer's probability divided by the sampler's, capped at "
    'tis_limit; 0 turns this off',
  )
  shaping: str = setting(
    'policy_shaping',
    losses.SHAPINGS,
    "a replayed token's term for ratio w, before it is multiplied by A: w / (w + beta) "
    '(policy_shaping), w / (w + beta) scaled to slope 1 at w = 1 (unit_slope), w (none), '
    'w ** shaping_exponent (power), shaping_weight x log pi (log), or w + shaping_weight x log pi '
    '(ratio_plus_log)',
    PAPER,
  )
  beta: float = setting(
    0.1,
    '(0, inf)',
    "beta in w / (w + beta) for the shapings 'policy_shaping' and 'unit_slope'",
    PAPER,
  )
  shaping_exponent: float = setting(
    0.5, '(0, inf)', "the exponent of the shaping 'power'; 0.5 is the square root", AUTHORS
  )
  shaping_weight: float = setting(
    0.1, '(0, inf)', "the weight of log pi in the shapings 'log' and 'ratio_plus_log'", AUTHORS
  )
  importance_correction: bool = setting(
    True,
    None,
    'compute the ratio w relative to the policy that sampled the replayed row; if off, relative to '
    'the policy at the start of the step, as if this step had sampled the row',
    PAPER,
  )
  baseline: str = setting(
    'group',
    advantages.BASELINES,
    "the baseline of a fresh row's advantage: the mean reward of its group (group), of the "
    "group's fresh rows only (fresh), or of the question's fresh rows in all steps (history, "
    'arXiv:2603.18444). With history, each visit halves the weight of all earlier visits, and '
    'replayed rows use the same baseline',
    PAPER,
  )
  replay_advantage: str = setting(
    'group',
    ('group', 'zero', 'balanced'),
    "a replayed row's advantage: its reward minus the group's mean (group), 0 (zero), or its "
    'reward minus a mean that weights replayed rows by the slope of their shaping at w = 1 '
    '(balanced); this mean is then also the baseline of fresh rows',
    PAPER,
  )
  m2po_threshold: float = setting(
    float('inf'),
    '(0, inf]',
    "limit on the mean of (log w)^2 over the step's replayed tokens whose ratio has moved in the "
    'direction of their advantage; the tokens with the largest (log w)^2 are dropped until the '
    'mean is within the limit (M2PO uses 0.04)',
    PAPER,
  )
  normalize_std: str = setting(
    'off',
    ('off', 'population', 'sample'),
    'divide advantages by the standard deviation of rewards: in their group, averaged over K '
    "(population) or K - 1 (sample), or in the question's history with the baseline 'history'",
    PAPER,
  )
  aggregation: str = setting(
    'constant',
    ('constant', 'token_mean', 'sequence_mean'),
    "the weight of a token's term: 1 / (rows x max_response) (constant), 1 / (tokens in the "
    'minibatch) (token_mean), or 1 / (rows x tokens in its row) (sequence_mean)',
    AUTHORS,
  )
  mask_truncated: bool = setting(
    False,
    None,
    'leave truncated responses out of the loss, and do not store them for replay (DAPO, '
    'arXiv:2503.14476). Their rewards still affect the mean and standard deviation of their group',
  )
  entropy_bonus: float = setting(
    1e-4,
    '[0, inf)',
    'the coefficient of the mean token entropy, in nats',
    f'{AUTHORS}, 1e-3 times a mean over each microbatch of 5 to 10 rows',
  )
  balance_coefficient: float = setting(
    0.0,
    '[0, inf)',
    'mixture-of-experts models: the weight of the load-balancing loss, which is computed per row '
    'and layer, averaged over tokens, and equal to 1 for an even load (arXiv:2412.19437)',
  )
  kl_coefficient: float = setting(
    0.0, '[0, inf)', 'the coefficient of KL(policy, reference), estimated with k3', AUTHORS
  )
  old_logprobs: str = setting(
    'rollout',
    ('rollout', 'recompute'),
    "the source of a fresh row's old log-probabilities: the sampler (rollout), or another forward "
    'pass by the trainer (recompute)',
  )

  def __post_init__(self) -> None:
    if self.replay_advantage == 'balanced' and self.baseline != 'group':
      raise InputError(
        "config.objective.replay_advantage='balanced' and "
        f'config.objective.baseline={self.baseline!r} both set the baseline of fresh rows. Set '
        "config.objective.baseline='group'."
      )
    if self.tis_limit > 0 and self.old_logprobs != 'recompute':
      raise InputError(
        f"config.objective.tis_limit={self.tis_limit} needs the trainer's log-probabilities to "
        "compare with the sampler's. Set config.objective.old_logprobs='recompute'."
      )
    if self.dual_clip < float('inf') and self.policy_loss == 'cispo':
      raise InputError(
        f'config.objective.dual_clip={self.dual_clip} needs '
        "config.objective.policy_loss='ppo', because cispo already bounds every ratio."
      )
