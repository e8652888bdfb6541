"""Which groups a step trains, where responses may span steps (`stages.Config.carry`). Pure.

A group is in flight from the step that draws it to the step that trains it. It trains once all of
its responses are complete, and at the latest `max_age` steps after the one in which its first
token was written.
"""

from collections.abc import Sequence


def trained(
  begun: Sequence[int], complete: Sequence[bool], step: int, questions: int, max_age: int
) -> list[int] | None:
  """The groups that `step` trains, the oldest complete ones; None while it has to go on.

  It goes on until so many are complete and, of the others, none is so old that it could not train
  in time: the i-th oldest of those trains `1 + i // questions` steps later, if each step trains the
  oldest. So no group is ever too old where at most `questions * (max_age + 1)` are in flight.

  Args:
    begun: by group in flight, the step in which its first token was written; for one without
      tokens, this step.
    complete: by group, whether all its responses are.
    step: the present one.
    questions: how many groups a step trains (Q).
    max_age: in steps.
  """
  by_age = sorted(range(len(begun)), key=lambda group: begun[group])  # stable: else as drawn
  chosen = [group for group in by_age if complete[group]][:questions]
  if len(chosen) < questions:
    return None
  left = [group for group in by_age if group not in chosen]
  if any(begun[group] + max_age <= step + place // questions for place, group in enumerate(left)):
    return None
  return sorted(chosen)
