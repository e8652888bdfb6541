"""Warnings about one step or about the latest steps, each with a remedy.

All follow from counting: truncated responses, groups of equal rewards, failed gradings, questions
left in the pool. Warnings about several steps come at most once in `PAUSE` steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting.metrics import Run

WINDOW = 20  # steps that a warning looks at together
PAUSE = 100  # steps between two warnings of the same kind
SILENT_STEPS = 10  # warn each time that this many more steps in a row had no learning signal
_SHARES = ('groups/zero_advantage', 'groups/solved_by_all', 'groups/solved_by_none')


@dataclasses.dataclass(frozen=True)
class Setup:
  """The facts about a run that its warnings need, besides its metrics."""

  num_steps: int
  pool: int  # questions to train on
  questions: int  # that a step works on, Q or those in flight
  max_response: int  # tokens


@dataclasses.dataclass(frozen=True)
class History:
  """The past that the next warnings depend on; a resumed run restores it from metrics.jsonl."""

  recent: Run = ()  # metrics of the last WINDOW steps, oldest first
  silent_steps: int = 0  # latest steps in a row in which all groups had equal rewards
  warned: Mapping[str, float] = dataclasses.field(default_factory=dict)  # kind -> its latest step


def history(setup: Setup, records: Run) -> History:
  """Return the history of a run with these metrics; the evaluation at step 0 is not a step."""
  past = History()
  for record in records:
    if record['step'] > 0:
      past, _ = observe(setup, past, record)
  return past


def observe(
  setup: Setup, past: History, record: Mapping[str, float]
) -> tuple[History, tuple[str, ...]]:
  """Add a step with the metrics `record`; return the new history and the warnings now due."""
  step, recent = record['step'], (*past.recent, record)[-WINDOW:]
  silent = past.silent_steps + 1 if record.get('groups/zero_advantage') == 1 else 0
  seen = {}
  if len(recent) == WINDOW:
    seen = {'pool': empty_pool(setup, recent), 'groups': silent_groups(recent)}
  due = {
    kind: text
    for kind, text in seen.items()
    if text and step - past.warned.get(kind, -math.inf) >= PAUSE
  }
  texts = filter(None, (of_step(setup, record, silent), *due.values()))
  warned = dict(past.warned) | dict.fromkeys(due, step)
  return History(recent, silent, warned), tuple(f'step {step:.0f}: {text}' for text in texts)


def of_step(setup: Setup, metrics: Mapping[str, float], silent_steps: int) -> str:
  """Return why a step gave no learning signal; '' if it gave one.

  `silent_steps` counts the steps in a row, this one included, with equal rewards in every group.
  """
  if metrics.get('length/truncated') == 1:
    return (
      f'every response was truncated at config.rollout.max_response={setup.max_response} tokens. '
      'Raise the limit, or check that the model emits its end token at all.'
    )
  if silent_steps and silent_steps % SILENT_STEPS == 0:
    return (
      f'for {silent_steps} steps in a row the rewards within every group were equal (pass rate '
      f'{metrics["pass_rate/all"]:.3f}), so there was no learning signal. The questions are too '
      'hard or too easy for this model, or the verifier cannot read its answers: see samples/.'
    )
  return ''


def empty_pool(setup: Setup, recent: Run) -> str:
  """Return why retired questions will be read again before the run ends; '' if they will not.

  R of N questions are retired now, and r more retired in each of these steps. At this pace fewer
  than the Q questions of a step are left after (N - R - Q) / r more steps.
  """
  first, last = recent[0], recent[-1]
  retired = last['buffer/retired']
  pace = (retired - first['buffer/retired']) / (last['step'] - first['step'])
  if pace <= 0:
    return ''
  wait = (setup.pool - retired - setup.questions) / pace
  empty = last['step'] + math.floor(wait) + 1
  if max(empty, last['step']) >= setup.num_steps:
    return ''
  since = f'from about step {empty:.0f} of {setup.num_steps} on' if wait >= 0 else 'now'
  return (
    f'{retired:,.0f} of {setup.pool:,} training questions are retired, {pace:.1f} more in each '
    f'of the last {WINDOW} steps: {since} fewer than the {setup.questions} questions of a step '
    'are left, so retired questions are read again. Use a larger config.data.train, fewer steps, '
    'or config.replay.retire=never.'
  )


def silent_groups(recent: Run) -> str:
  """Return a warning if most groups of these steps had equal rewards (advantages 0), else ''."""
  if not recent or not all(name in record for record in recent for name in _SHARES):
    return ''
  equal, by_all, by_none = (statistics.mean(row[name] for row in recent) for name in _SHARES)
  if equal <= 0.5:
    return ''
  return (
    f'{equal:.0%} of the groups in steps {recent[0]["step"]:.0f} to {recent[-1]["step"]:.0f} had '
    f'equal rewards and taught nothing: {by_all:.0%} were solved by all responses, {by_none:.0%} '
    f'by none. Use {"harder" if by_all > by_none else "easier"} questions in config.data.train, '
    'keep only questions that are sometimes solved (prefilter), or raise config.rollout.group_size.'
  )


def grading(step: int, verdicts: Sequence[Sequence[Verdict]], max_failures: float) -> str:
  """Return a warning if grading failed for more than a share `max_failures`, else ''."""
  graded = [verdict for group in verdicts for verdict in group]
  failed = [verdict for verdict in graded if verdict.outcome in FAILURES]
  if len(failed) <= max_failures * len(graded):
    return ''
  counts = ' and '.join(
    f'{sum(verdict.outcome == outcome for verdict in failed)} {outcome}' for outcome in FAILURES
  )
  return (
    f'step {step}: {counts} of {len(graded)} gradings, more than config.grading.max_failures='
    f'{max_failures:g} allows. These responses count as wrong, with reward 0. First reason: '
    f'{failed[0].reason}.'
  )


# ---- When a run stops ----

# A single update whose gradient is not finite or too large is skipped and counted, and the run goes
# on. The run ends if the parameters no longer give finite probabilities, because no later gradient
# would be finite either. It also ends if most updates are skipped, because nothing is learned then.
# Both are decided from a step's metrics, which are the same on all hosts.


SCORE = 'validation/score'  # see evaluation.score_all
BREAKDOWN_WINDOW = 10  # steps
MAX_SKIPPED = 0.5  # of the updates of the last WINDOW steps


# ---- Early stopping ----


def scores_of(records: Iterable[Mapping[str, float]]) -> dict[int, float]:
  """Return step -> validation score."""
  return {int(record['step']): record[SCORE] for record in records if SCORE in record}


def last_step(score_by_step: Mapping[int, float], num_steps: int, patience: int) -> int:
  """Return the step after which the run ends: `num_steps`, or an earlier one.

  It ends after `patience` evaluations in a row without improvement; with 0 it never ends early. The
  scores are all scores so far, earliest first.
  """
  best, since = float('-inf'), 0
  for step, score in score_by_step.items():
    best, since = (score, 0) if score > best else (best, since + 1)
    if patience and since == patience:
      return min(step, num_steps)
  return num_steps


# ---- Breakdown ----


def breakdown(config: optimizer.OptimizerConfig, recent: Run) -> str:
  """Return why the run must stop after the last of these steps; '' if it may go on."""
  return _not_finite(config, recent[-1]) or _skipped(config, recent[-BREAKDOWN_WINDOW:])


def no_probabilities(config: optimizer.OptimizerConfig) -> str:
  """Return why the run must stop after an update that leaves no finite probabilities."""
  return (
    'the policy no longer gives finite probabilities, and no further update can fix that. '
    f'Probably config.optimizer.learning_rate={config.learning_rate:g} is too large. Train in '
    'another --workdir with a smaller one.'
  )


def _not_finite(config: optimizer.OptimizerConfig, record: Mapping[str, float]) -> str:
  if math.isfinite(record['entropy']):
    return ''
  if record['step'] == 1 and record['optimizer/skipped'] == config.minibatches:
    return (
      'the policy that the run began with gives no finite probabilities, so its weights must be '
      'damaged. Replace config.model.path, or the warm start.'
    )
  names = ('entropy', 'loss', 'gradient_norm')
  measured = ', '.join(f'{name.replace("_", " ")} {record[name]:g}' for name in names)
  return f'{measured}: {no_probabilities(config)}'


def _skipped(config: optimizer.OptimizerConfig, recent: Run) -> str:
  updates = BREAKDOWN_WINDOW * config.minibatches
  skipped = sum(record.get('optimizer/skipped', 0) for record in recent)
  if len(recent) < BREAKDOWN_WINDOW or skipped <= MAX_SKIPPED * updates:
    return ''
  return (
    f'{skipped:.0f} of the {updates} updates of the last {BREAKDOWN_WINDOW} steps were skipped '
    'because their gradient norms were not finite or above config.optimizer.skip_above_norm='
    f'{config.skip_above_norm:g} (last step: {recent[-1]["gradient_norm"]:g} on average), so '
    'almost nothing is learned. Train in another --workdir with a smaller '
    f'config.optimizer.learning_rate than {config.learning_rate:g}. If norms of this size are '
    'right, raise config.optimizer.skip_above_norm instead.'
  )
