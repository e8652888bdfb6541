"""ExGRPO's experience management (arXiv:2510.02245, section 3): filling and sampling the buffer.

Pure NumPy functions on the host. The buffer stores each question's past successes and its latest
correctness, which determines its bucket. A question retires once all responses in its latest group
are correct: it leaves the buffer for good.

Deliberate departures from the authors' code (numbered as in docs/authors.md):
  3. Replayed questions are drawn first, and the rest are read from the stream; their code draws a
     whole batch of fresh questions and discards part of it.
  4. Each question keeps at most `max_trajectories` successes; their code keeps all of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chex
import numpy as np

from exgrpo_jax.algorithm import question_rules
from exgrpo_jax.algorithm.advantages import PRIOR, discounted_counts
from exgrpo_jax.algorithm.settings import ReplayConfig
from exgrpo_jax.config import check_numbers
from exgrpo_jax.datatypes import FAILURES, Plan, Response, Trajectory, Verdict

ROUNDING = 1e-9  # 0.29 * 100 is 28.999…, which must count as 29 questions


@dataclasses.dataclass(frozen=True)
class Entry:
  """The buffer's record of one question."""

  correctness: float  # pass rate of its latest group; 1 only if solved questions do not retire
  prompt_length: int  # tokens
  trajectories: tuple[Trajectory, ...]  # at least one, oldest first, no two with equal tokens


@dataclasses.dataclass(frozen=True)
class Buffer:
  """The replay buffer. No question is in both `entries` and `retired_epoch`."""

  entries: Mapping[int, Entry] = dataclasses.field(default_factory=dict)  # by question row
  retired_epoch: Mapping[int, int] = dataclasses.field(default_factory=dict)  # by question row
  started: bool = False  # True once replay has started
  # Question row -> `advantages.discounted_counts`; only with `objective.baseline='history'`.
  history: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)


def bucket(correctness: float, num_rollouts: int) -> int:
  """Return bucket 0 for a correctness of 0, otherwise the nearest bucket from 1 to K - 1.

  >>> bucket(0.0, 8), bucket(0.02, 8), bucket(3 / 8, 8), bucket(1.0, 8)
  (0, 1, 3, 7)
  """
  if correctness == 0:
    return 0
  return min(num_rollouts - 1, max(1, round(num_rollouts * correctness)))


class Bucketed(NamedTuple):
  """A buffer and its `buckets`, which are computed only once because a buffer can be large."""

  buffer: Buffer
  bucket_of: Mapping[int, int]  # question row -> bucket


def buckets(config: ReplayConfig, buffer: Buffer, num_rollouts: int) -> dict[int, int]:
  """Map each question row of the buffer to its bucket in 0 … K - 1.

  If `bucket_by` names a length, the questions are sorted by length, then by row, and divided into K
  equal buckets.
  """
  row_N, bucket_N, _ = _assign_buckets(config, buffer, num_rollouts)
  return dict(zip(row_N.tolist(), bucket_N.tolist()))


def _assign_buckets(
  config: ReplayConfig, buffer: Buffer, num_rollouts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return (row_N in ascending order, bucket_N, trains_N) for the buffer's N questions."""
  entries, size = buffer.entries, len(buffer.entries)
  row_N = np.fromiter(entries, np.int64, size)
  order_N = np.argsort(row_N)
  row_N = row_N[order_N]
  # Computed per distinct correctness: tens of thousands of questions share a few values.
  correctness_N = np.fromiter((entry.correctness for entry in entries.values()), float, size)
  correctness_C, index_N = np.unique(correctness_N[order_N], return_inverse=True)
  trains_N = np.array([trains(config, c) for c in correctness_C.tolist()], bool)[index_N]
  if config.bucket_by == 'correctness':
    bucket_C = [bucket(c, num_rollouts) for c in correctness_C.tolist()]
    return row_N, np.array(bucket_C, np.int64)[index_N], trains_N
  if config.bucket_by == 'question_length':
    lengths = (entry.prompt_length for entry in entries.values())
  else:
    trajectory_lists = (entry.trajectories for entry in entries.values())
    lengths = (
      sum(trajectory.num_own for trajectory in trajectories) / len(trajectories)
      for trajectories in trajectory_lists
    )
  length_N = np.fromiter(lengths, float, size)[order_N]
  bucket_N = np.empty(size, np.int64)
  bucket_N[np.lexsort((row_N, length_N))] = np.arange(size) * num_rollouts // max(1, size)
  return row_N, bucket_N, trains_N


def retires(config: ReplayConfig) -> bool:
  """Return True if fully solved questions retire (`config.retire`)."""
  return config.retire == 'always' or (config.retire == 'with_replay' and config.ratio > 0)


def trains(config: ReplayConfig, correctness: float) -> bool:
  """Return True if questions with this correctness are used for training (`config.difficulty`).

  >>> [trains(ReplayConfig(difficulty='hard'), correctness) for correctness in (0.25, 0.5)]
  [True, False]
  """
  return {
    'all': True,
    'easy': correctness >= 0.75,
    'hard': correctness <= 0.25,
    'medium': 0.25 < correctness < 0.75,
  }[config.difficulty]


def is_recorded(config: ReplayConfig, correctness: float) -> bool:
  """Return True if a group with this correctness updates its question's entry in the buffer.

  Applies only to questions that do not retire.

  >>> [is_recorded(ReplayConfig(correctness_range=(0, 0.5)), share) for share in (0, 0.5, 0.75)]
  [False, True, False]
  """
  if correctness == 0:
    return config.on_all_failed == 'bucket_0' or config.store == 'all'
  low, high = config.correctness_range
  return low < correctness <= high


def bucket_log_weights(config: ReplayConfig, num_buckets: int) -> np.ndarray:
  """Compute the log of each bucket's unnormalized probability: [K]. See BUCKET_RULES."""
  rule = question_rules.BUCKET_RULES[config.question_selection]
  with np.errstate(divide='ignore'):
    return np.asarray(rule(np.arange(num_buckets), num_buckets, config), float)


def bucket_probabilities(config: ReplayConfig, is_open_K: np.ndarray) -> np.ndarray:
  """Compute the probability of each open bucket, regardless of its size: bool [K] -> [K].

  At least one open bucket must have positive weight.

  >>> bucket_probabilities(ReplayConfig(sigma=1.0), np.array([False, True, True, True])).round(2)
  array([0.  , 0.27, 0.45, 0.27])
  """
  chex.assert_rank(is_open_K, 1)
  num_buckets = len(is_open_K)
  log_weight_K = bucket_log_weights(config, num_buckets)
  # Scale the largest open weight to 1; otherwise the outer weights underflow with many rollouts.
  weight_K = np.exp(
    log_weight_K - log_weight_K[is_open_K].max(), where=is_open_K, out=np.zeros(num_buckets)
  )
  return weight_K / weight_K.sum()


def most_replayed(config: ReplayConfig, num_questions: int) -> int:
  """Return floor(ratio Q): the number of questions that a step replays if enough are eligible.

  >>> most_replayed(ReplayConfig(ratio=0.29), 100)
  29
  """
  return math.floor(config.ratio * num_questions + ROUNDING)


def draw_questions(
  config: ReplayConfig,
  buffer: Buffer,
  num_questions: int,
  num_rollouts: int,
  step: int,
  rng: np.random.Generator,
  in_flight: Sequence[int] = (),
) -> list[int]:
  """Draw the rows of the questions that `step` replays: min(eligible, floor(ratio Q)) questions.

  Returns [] before replay starts. A question is eligible if it is not `in_flight`, has the right
  difficulty (`trains`), has a recent enough trajectory (`candidates`) and, if the rule uses
  buckets, is in a bucket with positive weight.
  """
  if not (buffer.started and buffer.entries):
    return []
  row_N, bucket_N, eligible_N = _assign_buckets(config, buffer, num_rollouts)
  eligible_N &= ~np.isin(row_N, in_flight)
  has_buckets = config.question_selection in question_rules.BUCKET_RULES
  if has_buckets:
    eligible_N &= np.isfinite(bucket_log_weights(config, num_rollouts))[bucket_N]
  log_weight_N = _question_log_weights(config, buffer, row_N, step)
  if log_weight_N is not None:
    eligible_N &= np.isfinite(log_weight_N)
    log_weight_N = log_weight_N[eligible_N]
  row_N, bucket_N = row_N[eligible_N], bucket_N[eligible_N]
  total = min(len(row_N), most_replayed(config, num_questions))
  if not has_buckets:
    return _draw(row_N, log_weight_N, total, rng)
  size_K = np.bincount(bucket_N, minlength=num_rollouts)
  count_K = np.zeros_like(size_K)
  # Multinomial counts; draws beyond a bucket's size are redrawn among buckets with room.
  while (num_remaining := total - count_K.sum()) > 0:
    probability_K = bucket_probabilities(config, count_K < size_K)
    count_K = np.minimum(count_K + rng.multinomial(num_remaining, probability_K), size_K)
  rows = []
  for k in np.flatnonzero(count_K):
    index_M = np.flatnonzero(bucket_N == k)
    log_weight_M = None if log_weight_N is None else log_weight_N[index_M]
    rows += _draw(row_N[index_M], log_weight_M, count_K[k], rng)
  return rows


def candidates(config: ReplayConfig, entry: Entry, step: int) -> tuple[Trajectory, ...]:
  """Return a question's stored trajectories that `step` may replay, oldest first."""
  return tuple(
    trajectory for trajectory in entry.trajectories if step - trajectory.step <= config.max_age
  )


def drift(log_ratio_T: np.ndarray) -> float:
  """Compute how far the policy has moved from the policy that sampled a trajectory.

  Policy Drift (arXiv:2609.03941, eq. 16): the mean over tokens of the squared log-ratio between the
  two policies, in nats squared. Unlike the terms of a KL estimate, squares cannot cancel.

  >>> drift(np.array([0.5, -0.5]))
  0.25
  """
  return float(np.mean(np.square(log_ratio_T)))


def _question_log_weights(
  config: ReplayConfig, buffer: Buffer, row_N: np.ndarray, step: int
) -> np.ndarray | None:
  """Compute the log of each question's unnormalized probability within its bucket: [N].

  Ineligible questions get -inf. Returns None if all weights are equal.
  """
  rule = question_rules.RULES.get(config.question_selection)
  if rule is None and config.max_age == config.age_decay == math.inf:
    return None  # avoids a pass over tens of thousands of questions
  entries = [buffer.entries[row] for row in row_N]
  age_N = np.array([step - entry.trajectories[-1].step for entry in entries], float)  # newest last
  log_weight_N = np.where(age_N > config.max_age, -np.inf, -age_N / config.age_decay)
  if rule:
    correctness_N = np.array([entry.correctness for entry in entries])
    trajectories = [entry.trajectories for entry in entries]
    questions = question_rules.Questions(row_N.copy(), correctness_N, age_N, trajectories)
    with np.errstate(divide='ignore'):
      rule_N = rule(questions)
    name = config.question_selection
    check_numbers('replay.question_selection', name, rule_N, age_N.shape, lowest=-np.inf)
    log_weight_N += rule_N
  return log_weight_N if log_weight_N.any() else None


def _draw(
  row_N: np.ndarray, log_weight_N: np.ndarray | None, count: int, rng: np.random.Generator
) -> list[int]:
  """Draw `count` rows by weight, without replacement."""
  if log_weight_N is None:
    return rng.choice(row_N, count, replace=False).tolist()
  # The Gumbel top-k trick: small weights do not underflow (Vieira 2014).
  return row_N[np.argsort(-log_weight_N - rng.gumbel(size=len(row_N)))[:count]].tolist()


def record_step(
  config: ReplayConfig,
  buffer: Buffer,
  plan: Plan,
  replays: Sequence[Trajectory | None],
  responses: Sequence[Sequence[Response]],
  verdicts: Sequence[Sequence[Verdict]],
  store_truncated: bool = True,
) -> Buffer:
  """Return the buffer after a step.

  `buffer` is the buffer that the step was planned with. For each of the plan's Q groups, `replays`
  contains the replayed trajectory or None, `responses` contains the fresh responses (K, or K - 1 if
  a trajectory is replayed), and `verdicts` contains their verdicts. A replayed trajectory
  contributes its stored verdict, which is always a success unless `store` is 'all'. Truncated
  responses count toward their group's correctness even if `store_truncated` is False.
  """
  entries, retired_epoch = _drop_drifted(config, buffer, plan), dict(buffer.retired_epoch)
  groups = zip(plan.questions, plan.prompts, replays, responses, verdicts)
  for question, prompt, replay, group_responses, group_verdicts in groups:
    row = question.row
    if replay:  # matched by its tokens, because its logp may have been replaced
      trajectories = tuple(
        dataclasses.replace(trajectory, times_replayed=trajectory.times_replayed + 1)
        if np.array_equal(trajectory.tokens, replay.tokens)
        else trajectory
        for trajectory in entries[row].trajectories
      )
      entries[row] = dataclasses.replace(entries[row], trajectories=trajectories)
    correctness = group_correctness(config, group_verdicts, replay)
    if correctness == 1 and retires(config):
      entries.pop(row, None)
      retired_epoch.setdefault(row, plan.epoch)
    elif buffer.started and row not in retired_epoch and is_recorded(config, correctness):
      old_trajectories = entries[row].trajectories if row in entries else ()
      pairs = [
        pair
        for pair in zip(group_responses, group_verdicts)
        if store_truncated or not pair[0].truncated
      ]
      trajectories = _add_successes(config, old_trajectories, pairs, plan.step)
      if trajectories:
        entries[row] = Entry(correctness, len(prompt), trajectories)
  fresh_correct = [verdict.correct for group_verdicts in verdicts for verdict in group_verdicts]
  started = buffer.started or (
    config.ratio > 0 and bool(np.mean(fresh_correct) > config.start_pass_rate)
  )
  return dataclasses.replace(buffer, entries=entries, retired_epoch=retired_epoch, started=started)


def _drop_drifted(config: ReplayConfig, buffer: Buffer, plan: Plan) -> dict[int, Entry]:
  """Return the entries without the trajectories that `stages.admit` removed from the plan.

  Otherwise, every step would draw and then reject the question with the most headroom.
  """
  entries = dict(buffer.entries)
  if config.question_selection == 'headroom_drift' and config.include_trajectory:
    for question, trajectories, is_drawn in zip(plan.questions, plan.candidates, plan.is_drawn):
      if is_drawn:
        entry = entries.pop(question.row)
        if trajectories:
          entries[question.row] = dataclasses.replace(entry, trajectories=trajectories)
  return entries


def counts_after(
  plan: Plan, verdicts: Sequence[Sequence[Verdict]]
) -> dict[int, tuple[float, float]]:
  """Map each question's row to its `discounted_counts` after the step, in the plan's order.

  Only fresh responses count. For `verdicts`, see `record_step`.
  """
  return {
    question.row: discounted_counts(
      plan.history.get(question.row, PRIOR), [verdict.reward for verdict in group_verdicts]
    )
    for question, group_verdicts in zip(plan.questions, verdicts)
  }


def with_history(buffer: Buffer, plan: Plan, verdicts: Sequence[Sequence[Verdict]]) -> Buffer:
  """Return the buffer with its history updated by `counts_after`."""
  return dataclasses.replace(buffer, history={**buffer.history, **counts_after(plan, verdicts)})


def group_correctness(
  config: ReplayConfig, verdicts: Sequence[Verdict], replay: Trajectory | None
) -> float:
  """Return a group's pass rate, including the replayed row if `count_replayed` is set."""
  successes = [verdict.correct for verdict in verdicts]
  if replay and config.count_replayed:
    successes.append(replay.correct)
  return sum(successes) / len(successes)


def _add_successes(
  config: ReplayConfig,
  trajectories: Sequence[Trajectory],
  pairs: Sequence[tuple[Response, Verdict]],
  step: int,
) -> tuple[Trajectory, ...]:
  """Add the group's new successes to the stored trajectories, then keep only the newest ones.

  If `store` is 'all', every response that could be graded is added. A trajectory's `step` is the
  step that sampled its first token; the argument `step` is the step that trains on the group.
  """
  known_tokens = {trajectory.tokens.tobytes() for trajectory in trajectories}
  all_trajectories = list(trajectories)
  for response, verdict in pairs:
    is_kept = verdict.correct or (config.store == 'all' and verdict.outcome not in FAILURES)
    if is_kept and response.tokens.tobytes() not in known_tokens:
      known_tokens.add(response.tokens.tobytes())
      values = {'reward': verdict.reward, 'correct': verdict.correct, **response.features}
      values |= {'truncated': response.truncated, 'step': response.first_step(step)}
      all_trajectories.append(Trajectory(response.tokens, response.logp, **values))
  all_trajectories.sort(key=lambda trajectory: trajectory.step)
  return tuple(all_trajectories[-config.max_trajectories :])  # 0 keeps all of them
