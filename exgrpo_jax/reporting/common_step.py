"""The step at which runs of different lengths can be compared."""

from collections.abc import Collection, Sequence


def last_common_step(evaluated: Sequence[Collection[int]]) -> int | None:
  """The last step after 0 that all runs have; None where they share none.

  Step 0 is the policy before training, which says nothing about a run.

  Args:
    evaluated: of each run the steps of its evaluations.
  """
  common = set.intersection(*map(set, evaluated)) if evaluated else set()
  return max((step for step in common if step > 0), default=None)
