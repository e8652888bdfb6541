"""Whether a run ends before its last step, because its evaluations no longer improve."""

from collections.abc import Iterable, Mapping

SCORE = 'validation/score'  # see evaluation.score_all


def scores(records: Iterable[Mapping[str, float]]) -> dict[int, float]:
  """Step -> validation score, of a run's metrics."""
  return {int(record['step']): record[SCORE] for record in records if SCORE in record}


def last_step(score_by_step: Mapping[int, float], num_steps: int, patience: int) -> int:
  """The step after which the run ends: `num_steps`, or an earlier one.

  Args:
    score_by_step: validation scores up to now, by step, the earliest first.
    num_steps: of the run.
    patience: evaluations in a row, none of them better than the best before, after which it ends;
      0 is never.
  """
  best, since = float('-inf'), 0
  for step, score in score_by_step.items():
    best, since = (score, 0) if score > best else (best, since + 1)
    if patience and since == patience:
      return min(step, num_steps)
  return num_steps
