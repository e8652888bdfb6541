"""Warnings about a step, or about the last ones, each with a remedy.

All follow from counting: responses cut off, groups of equal rewards, failed gradings, questions
left in the pool. Those that look at several steps come at most once in `PAUSE` steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting.metrics import Run

WINDOW = 20  # steps that are judged together
PAUSE = 100  # steps between two warnings of a kind
SILENT_STEPS = 10  # warn each time that this many more steps in a row had no learning signal
_SHARES = ('groups/zero_advantage', 'groups/solved_by_all', 'groups/solved_by_none')


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the warnings of a run depend on besides its metrics."""

  num_steps: int
  pool: int  # questions to train on
  questions: int  # that a step works on, Q or those in flight
  max_response: int  # tokens


@dataclasses.dataclass(frozen=True)
class History:
  """What the next step is judged by; metrics.jsonl gives it back to a resumed run."""

  recent: Run = ()  # metrics of the last WINDOW steps, oldest first
  silent_steps: int = 0  # in a row, up to now, in which all groups had equal rewards
  warned: Mapping[str, float] = dataclasses.field(default_factory=dict)  # kind -> its latest step


def history(setup: Setup, records: Run) -> History:
  """The history of a run with these metrics; the evaluation at step 0 is not a step."""
  past = History()
  for record in records:
    if record['step'] > 0:
      past, _ = observe(setup, past, record)
  return past


def observe(
  setup: Setup, past: History, record: Mapping[str, float]
) -> tuple[History, tuple[str, ...]]:
  """The history with one more step, whose metrics are `record`, and the warnings due after it."""
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
  """Why a step could not teach anything; '' if all is well.

  `silent_steps` is how many steps in a row, this one included, had equal rewards in every group.
  """
  if metrics.get('length/truncated') == 1:
    return (
      f'every response was truncated at config.rollout.max_response={setup.max_response} tokens. '
      'Raise the limit, or check that the model ever emits its end token.'
    )
  if silent_steps and silent_steps % SILENT_STEPS == 0:
    return (
      f'for {silent_steps} steps in a row the rewards within every group were equal (pass rate '
      f'{metrics["pass_rate/all"]:.3f}), so there was no learning signal. The questions are too '
      'hard or too easy for this model, or the verifier cannot read its answers: see samples/.'
    )
  return ''


def empty_pool(setup: Setup, recent: Run) -> str:
  """Why retired questions will be read again before the end of the run; '' if they will not.

  At the pace r at which questions retired in these steps, fewer than the Q that a step works on
  are left after (N - R - Q) / r more steps, where R of N are retired now.
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
    f'{retired:,.0f} of {setup.pool:,} training questions are retired, and {pace:.1f} more in each '
    f'of the last {WINDOW} steps: {since} fewer than the {setup.questions} that a step works on '
    'are left, so retired ones are read again. Give a larger config.data.train, fewer steps, or '
    'config.replay.retire=never.'
  )


def silent_groups(recent: Run) -> str:
  """Says so if most groups of these steps had equal rewards, so that their advantages were 0."""
  if not recent or not all(name in record for record in recent for name in _SHARES):
    return ''
  equal, by_all, by_none = (statistics.mean(row[name] for row in recent) for name in _SHARES)
  if equal <= 0.5:
    return ''
  return (
    f'{equal:.0%} of the groups in steps {recent[0]["step"]:.0f} to {recent[-1]["step"]:.0f} had '
    f'equal rewards and taught nothing: {by_all:.0%} were solved by all responses, {by_none:.0%} '
    f'by none. Give {"harder" if by_all > by_none else "easier"} questions in config.data.train, '
    'keep only those that are solved sometimes (prefilter), or raise config.rollout.group_size.'
  )


def grading(step: int, verdicts: Sequence[Sequence[Verdict]], max_failures: float) -> str:
  """A warning if grading failed for more than a share `max_failures` of the responses, else ''."""
  graded = [verdict for group in verdicts for verdict in group]
  failed = [verdict for verdict in graded if verdict.outcome in FAILURES]
  if len(failed) <= max_failures * len(graded):
    return ''
  counts = ' and '.join(
    f'{sum(verdict.outcome == outcome for verdict in failed)} {outcome}' for outcome in FAILURES
  )
  return (
    f'step {step}: of {len(graded)} gradings {counts}, more than config.grading.max_failures='
    f'{max_failures:g} allows; these responses count as wrong, with reward 0. The first reason: '
    f'{failed[0].reason}.'
  )


# ---- When a run stops ----

# A single update whose gradient is not finite or too large is skipped and counted, and the run goes
# on. It ends where the parameters no longer give finite probabilities, since every later gradient
# would not be finite either, and where most updates are skipped, since nothing is learnt then. Both
# are read off a step's metrics, which are the same on all hosts.


SCORE = 'validation/score'  # see evaluation.score_all
BREAKDOWN_WINDOW = 10  # steps
MAX_SKIPPED = 0.5  # of the updates of the last WINDOW steps


# ---- Early stopping ----


def scores_of(records: Iterable[Mapping[str, float]]) -> dict[int, float]:
  """Step -> validation score."""
  return {int(record['step']): record[SCORE] for record in records if SCORE in record}


def last_step(score_by_step: Mapping[int, float], num_steps: int, patience: int) -> int:
  """The step after which the run ends: `num_steps`, or an earlier one.

  It ends after `patience` evaluations in a row without improvement; 0 is never. The scores are
  those so far, earliest first.
  """
  best, since = float('-inf'), 0
  for step, score in score_by_step.items():
    best, since = (score, 0) if score > best else (best, since + 1)
    if patience and since == patience:
      return min(step, num_steps)
  return num_steps


# ---- Breakdown ----


def breakdown(config: optimizer.OptimizerConfig, recent: Run) -> str:
  """Why the run must stop after the last of these steps; '' where it may go on."""
  return _not_finite(config, recent[-1]) or _skipped(config, recent[-BREAKDOWN_WINDOW:])


def no_probabilities(config: optimizer.OptimizerConfig) -> str:
  """Why the run must stop where the policy after an update gives no finite probabilities."""
  return (
    'the policy no longer gives finite probabilities, and no further update could mend that. '
    f'Probably config.optimizer.learning_rate={config.learning_rate:g} is too large: train in '
    'another --workdir with a smaller one.'
  )


def _not_finite(config: optimizer.OptimizerConfig, record: Mapping[str, float]) -> str:
  if math.isfinite(record['entropy']):
    return ''
  if record['step'] == 1 and record['optimizer/skipped'] == config.minibatches:
    return (
      'the policy that the run began with gives no finite probabilities: its weights, of '
      'config.model.path or of the warm start, must be damaged.'
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
    f'{skipped:.0f} of the {updates} updates of the last {BREAKDOWN_WINDOW} steps were skipped, '
    "because their gradients' norms were not finite or above config.optimizer.skip_above_norm="
    f'{config.skip_above_norm:g} (last step: {recent[-1]["gradient_norm"]:g} on average), so next '
    'to nothing is learnt. Train in another --workdir with a smaller '
    f'config.optimizer.learning_rate than {config.learning_rate:g} or, if norms of '
    'that size are right, with a larger config.optimizer.skip_above_norm.'
  )
