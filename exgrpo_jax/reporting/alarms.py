"""Warnings about a step, or about the last ones, each with a remedy.

All follow from counting: responses cut off, groups of equal rewards, failed gradings, questions
left in the pool. Those that look at several steps come at most once in `PAUSE` steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.reporting.metrics import Run

WINDOW = 20  # steps that are judged together
PAUSE = 100  # steps between two warnings of a kind
SILENT_STEPS = 10  # warn each time that this many more steps in a row had no learning signal
_SHARES = ('zero_variance', 'groups/solved_by_all', 'groups/solved_by_none')


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
  silent = past.silent_steps + 1 if record.get('zero_variance') == 1 else 0
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
    'keep only those that are solved sometimes (prefilter), or raise config.rollout.samples.'
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
