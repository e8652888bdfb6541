"""Whether the pass rate stopped rising for want of groups that teach anything."""

import math
import statistics
from typing import NamedTuple

from exgrpo_jax.reporting.records import Run

# In four runs of configs/chains.py, over ten steps: .13 to .24 up to step 20, where held-out pass@1
# rose from .44 to .84; .32 to .44 up to step 30; .38 to .57 later, as it stayed near .91.
MAX_SILENT = 0.4
_MIN_JUDGED = 20  # steps
_MARGIN = 2  # standard errors, by which a pass rate that rises is above what it was


class Plateau(NamedTuple):
  """A plateau of a run."""

  step: int  # after which it was seen last
  text: str  # of the warning


def num_judged(num_steps: int) -> int:
  """Steps that are judged together: a fifth of the run, for a longer one rises more slowly."""
  return max(_MIN_JUDGED, num_steps // 5)


def explain(steps: Run) -> str:
  """Why the pass rate did not rise in these steps, if that is for want of variance; else ''.

  In a group of equal rewards all advantages are 0, so it teaches nothing. The rule: in the second
  half of the steps more than `MAX_SILENT` of the groups had equal rewards, and the mean pass rate
  of fresh questions was there not above that of the first half by more than two standard errors.
  Where the pass rate is flat and the groups still differ, the cause is another one.

  Args:
    steps: the metrics of steps that follow each other, oldest first.
  """
  names = ('zero_variance', 'groups/solved_by_all', 'groups/solved_by_none', 'pass_rate/fresh')
  half = len(steps) // 2
  if half < 2 or not all(name in record for record in steps for name in names):
    return ''
  share, all_, none = (statistics.mean(row[name] for row in steps[half:]) for name in names[:3])
  parts = [[row[names[3]] for row in part] for part in (steps[:half], steps[half:])]
  before, after = map(statistics.mean, parts)
  error = math.hypot(*(statistics.stdev(part) / math.sqrt(len(part)) for part in parts))
  if share <= MAX_SILENT or after - before > _MARGIN * error:
    return ''
  first, middle, last = (steps[place]['step'] for place in (0, half, -1))
  return (
    f'the pass rate of fresh questions has stopped rising ({before:.2f} in steps {first:.0f} to '
    f'{middle - 1:.0f}, {after:.2f} in {middle:.0f} to {last:.0f}), and {share:.0%} of the groups '
    f'since step {middle:.0f} had equal rewards and taught nothing: {all_:.0%} were solved by all '
    f'responses, {none:.0%} by none. {_remedies(all_ > none)}'
  )


def _remedies(are_easy: bool) -> str:
  """What to change, where most groups are solved by all responses or by none."""
  kind = 'harder' if are_easy else 'easier'
  return (
    f'Give {kind} questions in config.data.train, keep only those that are solved sometimes '
    '(exgrpo data prefilter --checkpoint=WORKDIR), or raise config.rollout.samples.'
  )


def latest(run: Run, num_steps: int) -> Plateau | None:
  """The plateau in which a run is, as one sees it after the latest of its last steps."""
  taken = [record for record in run if record['step'] > 0]
  judged = num_judged(num_steps)
  for end in range(len(taken), max(judged, len(taken) - judged + 1) - 1, -1):
    if text := explain(taken[end - judged : end]):
      return Plateau(int(taken[end - 1]['step']), text)
  return None
