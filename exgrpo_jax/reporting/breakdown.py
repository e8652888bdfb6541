"""When training has broken down and has to stop, and the setting that is probably at fault.

A single update whose gradient is not finite or too large is skipped and counted, and the run goes
on. It stops where the parameters no longer give finite probabilities, for then every later gradient
is not finite either, and where most updates are skipped, for then nothing is learnt. Both are told
from a step's metrics, which are the same on all hosts.
"""

import math
from collections.abc import Mapping

from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting.records import Run

WINDOW = 10  # steps
MAX_SKIPPED = 0.5  # of the updates of the last WINDOW steps


def reason(config: optimizer.Config, recent: Run) -> str:
  """Why the run must stop after the last of these steps; '' where it may go on.

  Args:
    config: the run's.
    recent: metrics of the latest steps, with their 'step', oldest first.
  """
  return _no_probabilities(config, recent[-1]) or _skipped(config, recent[-WINDOW:])


def of_policy(config: optimizer.Config) -> str:
  """Why the run must stop where the policy after an update gives no finite probabilities."""
  return (
    'the policy no longer gives finite probabilities, and no further update could mend that. '
    f'Probably config.optimizer.learning_rate={config.learning_rate:g} is too large: train in '
    'another --workdir with a smaller one.'
  )


def _no_probabilities(config: optimizer.Config, record: Mapping[str, float]) -> str:
  if math.isfinite(record['entropy']):
    return ''
  if record['step'] == 1 and record['skipped_updates'] == config.minibatches:
    return (
      'the policy that the run began with gives no finite probabilities: its weights, of '
      'config.model.path or of the warm start, must be damaged.'
    )
  measured = ', '.join(
    f'{name.replace("_", " ")} {record[name]:g}' for name in ('entropy', 'loss', 'gradient_norm')
  )
  return f'{measured}: {of_policy(config)}'


def _skipped(config: optimizer.Config, recent: Run) -> str:
  updates = WINDOW * config.minibatches
  skipped = sum(record.get('skipped_updates', 0) for record in recent)
  if len(recent) < WINDOW or skipped <= MAX_SKIPPED * updates:
    return ''
  return (
    f'{skipped:.0f} of the {updates} updates of the last {WINDOW} steps were skipped, for their '
    "gradients' norms were not finite or above config.optimizer.skip_norm="
    f'{config.skip_norm:g} (of the last step: {recent[-1]["gradient_norm"]:g} on average), so '
    'next to nothing is learnt. Train in another --workdir with a smaller '
    f'config.optimizer.learning_rate than {config.learning_rate:g} or, where norms of that size '
    'are right, with a larger config.optimizer.skip_norm.'
  )
