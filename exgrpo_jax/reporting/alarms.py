"""Warnings about a single step or the latest steps, each with a remedy.

All warnings are based on counts of truncated responses, groups with equal rewards, responses that
could not be graded, or questions left in the pool. Warnings of the same kind are at least `PAUSE`
steps apart, except those about failed grading and about steps without a learning signal.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting.metrics import Run

WINDOW = 20  # steps that a warning covers
PAUSE = 100  # steps between two warnings of the same kind
SILENT_STEPS = 10  # warn after every 10 consecutive steps without a learning signal
# Warn if grading fails for a larger share of the responses. A few timeouts on a busy machine barely
# change the rewards; above 1%, something is usually wrong with a reward function or the limits.
MAX_FAILURES = 0.01
_SHARES = ('groups/zero_advantage', 'groups/solved_by_all', 'groups/solved_by_none')


@dataclasses.dataclass(frozen=True)
class Setup:
  """Facts about a run, other than its metrics, that the warnings depend on."""

  num_steps: int
  pool: int  # number of training questions
  questions: int  # per step: `RolloutConfig.questions_at_once`
  max_response: int  # tokens


@dataclasses.dataclass(frozen=True)
class History:
  """State that later warnings depend on; a resumed run restores it from metrics.jsonl."""

  recent: Run = ()  # metrics of the last WINDOW steps, oldest first
  silent_steps: int = 0  # steps in a row, up to now, with equal rewards in every group
  warning_steps: Mapping[str, float] = dataclasses.field(default_factory=dict)  # kind -> last step


def history(setup: Setup, records: Run) -> History:
  """Rebuild the history from a run's metrics; the evaluation at step 0 is ignored."""
  past = History()
  for record in records:
    if record['step'] > 0:
      past, _ = observe(setup, past, record)
  return past


def observe(
  setup: Setup, past: History, record: Mapping[str, float]
) -> tuple[History, tuple[str, ...]]:
  """Add a step's metrics; return the new history and the warnings that are now due."""
  step, recent = record['step'], (*past.recent, record)[-WINDOW:]
  silent_steps = past.silent_steps + 1 if record.get('groups/zero_advantage') == 1 else 0
  warnings = {'truncated': all_truncated(setup, record)}
  if len(recent) == WINDOW:
    warnings |= {'pool': empty_pool(setup, recent), 'groups': silent_groups(recent)}
  due_warnings = {
    kind: text
    for kind, text in warnings.items()
    if text and step - past.warning_steps.get(kind, -math.inf) >= PAUSE
  }
  texts = filter(None, (no_signal(record, silent_steps), *due_warnings.values()))
  warning_steps = dict(past.warning_steps) | dict.fromkeys(due_warnings, step)
  return History(recent, silent_steps, warning_steps), tuple(
    f'step {step:.0f}: {text}' for text in texts
  )


def all_truncated(setup: Setup, metrics: Mapping[str, float]) -> str:
  """Return a warning if all of a step's responses were truncated, else ''."""
  if metrics.get('length/truncated') != 1:
    return ''
  return (
    f'every response was truncated at config.rollout.max_response={setup.max_response} tokens. '
    'Raise the limit, or check whether the model ever emits its end token.'
  )


def no_signal(metrics: Mapping[str, float], silent_steps: int) -> str:
  """Return a warning after every `SILENT_STEPS` steps without a learning signal, else ''.

  `silent_steps` is the number of consecutive steps, including this one, in which every group had
  equal rewards.
  """
  if not silent_steps or silent_steps % SILENT_STEPS:
    return ''
  return (
    f'for {silent_steps} steps in a row, all rewards within each group were equal (pass rate '
    f'{metrics["pass_rate/all"]:.3f}), so there was no learning signal. The questions are too '
    "hard or too easy for this model, or the verifier cannot parse the model's answers. See "
    'samples/.'
  )


def empty_pool(setup: Setup, recent: Run) -> str:
  """Return a warning if retired questions will be reused before the run ends, else ''.

  Suppose that R of N questions are retired, that r more retire per step, and that each step needs Q
  questions. At this pace, too few questions are left after (N - R - Q) / r more steps.
  """
  first, last = recent[0], recent[-1]
  num_retired = last['buffer/retired']
  pace = (num_retired - first['buffer/retired']) / (last['step'] - first['step'])
  if pace <= 0:
    return ''
  wait = (setup.pool - num_retired - setup.questions) / pace
  empty_step = last['step'] + math.floor(wait) + 1
  if max(empty_step, last['step']) >= setup.num_steps:
    return ''
  forecast = f'From about step {empty_step:.0f} of {setup.num_steps} on, there will be'
  opening = forecast if wait >= 0 else 'There are now'
  return (
    f'{num_retired:,.0f} of {setup.pool:,} training questions are retired, with {pace:.1f} retired '
    f'per step over the last {WINDOW} steps. {opening} fewer unretired questions than the '
    f'{setup.questions} that a step needs. Retired questions are then reused. Use a larger '
    'config.data.train, fewer steps, or config.replay.retire=never.'
  )


def silent_groups(recent: Run) -> str:
  """Return a warning if most groups in these steps gave no learning signal, else ''.

  A group gives no learning signal if its rewards are equal, because all its advantages are then 0.
  """
  if not recent or not all(name in record for record in recent for name in _SHARES):
    return ''
  equal, by_all, by_none = (statistics.mean(row[name] for row in recent) for name in _SHARES)
  if equal <= 0.5:
    return ''
  return (
    f'{equal:.0%} of the groups in steps {recent[0]["step"]:.0f} to {recent[-1]["step"]:.0f} had '
    f'equal rewards, so they gave no learning signal: {by_all:.0%} were solved by all responses, '
    f'and {by_none:.0%} by none. Use {"harder" if by_all > by_none else "easier"} questions in '
    'config.data.train, keep only questions that are sometimes solved (prefilter), or raise '
    'config.rollout.group_size.'
  )


def grading(step: int, verdicts: Sequence[Sequence[Verdict]]) -> str:
  """Return a warning if grading failed for more than MAX_FAILURES of the responses, else ''."""
  all_verdicts = [verdict for group in verdicts for verdict in group]
  failures = [verdict for verdict in all_verdicts if verdict.outcome in FAILURES]
  if len(failures) <= MAX_FAILURES * len(all_verdicts):
    return ''
  counts = ', '.join(
    f'{sum(verdict.outcome == outcome for verdict in failures)} {outcome}' for outcome in FAILURES
  )
  return (
    f'step {step}: grading failed for {len(failures)} of {len(all_verdicts)} responses ({counts}). '
    f'These responses count as wrong, with reward 0. First reason: {failures[0].reason}.'
  )


# ---- When a run stops ----

# A single update whose gradient is too large or not finite is skipped and counted; the run goes on.
# The run ends if the parameters no longer produce finite probabilities, because later gradients
# would not be finite either. It also ends if most updates are skipped, because nothing is learned.
# Both decisions depend only on a step's metrics, which are the same on all hosts.

SCORE = 'validation/score'  # see evaluation.scores.score_all
BREAKDOWN_WINDOW = 10  # steps
MAX_SKIPPED = 0.5  # share of the updates in the last BREAKDOWN_WINDOW steps


def last_step(score_by_step: Mapping[int, float], num_steps: int, patience: int) -> int:
  """Return the step after which the run ends: `num_steps`, or an earlier step.

  The run ends early after `patience` consecutive evaluations without improvement; a patience of 0
  disables early stopping. `score_by_step` contains all scores so far, earliest first.
  """
  best_score, num_since_best = float('-inf'), 0
  for step, score in score_by_step.items():
    best_score, num_since_best = (
      (score, 0) if score > best_score else (best_score, num_since_best + 1)
    )
    if patience and num_since_best == patience:
      return min(step, num_steps)
  return num_steps


def no_probabilities(config: optimizer.OptimizerConfig) -> str:
  """Explain why the run must stop once the policy's probabilities are no longer finite."""
  return (
    'the policy no longer produces finite probabilities, and no further update can fix that. '
    f'config.optimizer.learning_rate={config.learning_rate:g} is probably too large. Train with a '
    'smaller learning rate in a new --workdir.'
  )


def breakdown(config: optimizer.OptimizerConfig, recent: Run) -> str:
  """Return the reason to stop the run after the last of these steps, or '' if it can continue."""
  last = recent[-1]
  if not math.isfinite(last.get('entropy', 0.0)):  # missing if all rows are masked
    if last['step'] == 1 and last['optimizer/skipped'] == config.updates_per_step:
      return (
        'the initial policy does not produce finite probabilities, so its weights must be '
        'damaged. Replace config.model.path or the warm start.'
      )
    names = ('entropy', 'loss', 'gradient_norm')
    values = ', '.join(f'{name.replace("_", " ")} {last[name]:g}' for name in names)
    return f'{values}: {no_probabilities(config)}'
  window, updates = recent[-BREAKDOWN_WINDOW:], BREAKDOWN_WINDOW * config.updates_per_step
  num_skipped = sum(record.get('optimizer/skipped', 0) for record in window)
  if len(window) < BREAKDOWN_WINDOW or num_skipped <= MAX_SKIPPED * updates:
    return ''
  return (
    f'{num_skipped:.0f} of the {updates} updates in the last {BREAKDOWN_WINDOW} steps were skipped '
    'because their gradient norms were not finite or exceeded config.optimizer.skip_above_norm='
    f'{config.skip_above_norm:g} (last step: {last["gradient_norm"]:g} on average), so '
    'the policy is barely learning. Train in a new --workdir with '
    f'config.optimizer.learning_rate below {config.learning_rate:g}. If you expect norms of this '
    'size, raise config.optimizer.skip_above_norm instead.'
  )
