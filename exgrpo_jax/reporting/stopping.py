"""When a run ends before its last step: early stopping, and training that has broken down.

A single update whose gradient is not finite or too large is skipped and counted, and the run goes
on. It ends where the parameters no longer give finite probabilities, since every later gradient
would not be finite either, and where most updates are skipped, since nothing is learnt then. Both
are read off a step's metrics, which are the same on all hosts.
"""

import math
from collections.abc import Iterable, Mapping

from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting.metrics import Run

SCORE = 'validation/score'  # see evaluation.score_all
WINDOW = 10  # steps
MAX_SKIPPED = 0.5  # of the updates of the last WINDOW steps


# ---- Early stopping ----


def scores(records: Iterable[Mapping[str, float]]) -> dict[int, float]:
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


def breakdown(config: optimizer.Config, recent: Run) -> str:
  """Why the run must stop after the last of these steps; '' where it may go on."""
  return _not_finite(config, recent[-1]) or _skipped(config, recent[-WINDOW:])


def no_probabilities(config: optimizer.Config) -> str:
  """Why the run must stop where the policy after an update gives no finite probabilities."""
  return (
    'the policy no longer gives finite probabilities, and no further update could mend that. '
    f'Probably config.optimizer.learning_rate={config.learning_rate:g} is too large: train in '
    'another --workdir with a smaller one.'
  )


def _not_finite(config: optimizer.Config, record: Mapping[str, float]) -> str:
  if math.isfinite(record['entropy']):
    return ''
  if record['step'] == 1 and record['skipped_updates'] == config.minibatches:
    return (
      'the policy that the run began with gives no finite probabilities: its weights, of '
      'config.model.path or of the warm start, must be damaged.'
    )
  names = ('entropy', 'loss', 'gradient_norm')
  measured = ', '.join(f'{name.replace("_", " ")} {record[name]:g}' for name in names)
  return f'{measured}: {no_probabilities(config)}'


def _skipped(config: optimizer.Config, recent: Run) -> str:
  updates = WINDOW * config.minibatches
  skipped = sum(record.get('skipped_updates', 0) for record in recent)
  if len(recent) < WINDOW or skipped <= MAX_SKIPPED * updates:
    return ''
  return (
    f'{skipped:.0f} of the {updates} updates of the last {WINDOW} steps were skipped, because '
    "their gradients' norms were not finite or above config.optimizer.skip_norm="
    f'{config.skip_norm:g} (last step: {recent[-1]["gradient_norm"]:g} on average), so next to '
    'nothing is learnt. Train in another --workdir with a smaller config.optimizer.learning_rate '
    f'than {config.learning_rate:g} or, if norms of that size are right, with a larger '
    'config.optimizer.skip_norm.'
  )
