"""Partial rollouts (`rollout.partial`): responses may span several steps.

A step ends once enough groups are complete for it to train, and the next step continues the rest. A
group is in flight from the step that draws it to the step that trains it. It is trained once all of
its responses are complete, at most `max_age` steps after the step that wrote its first token.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.datatypes import GradedGroups, PartialGroup, Plan, Response, Span
from exgrpo_jax.rollout.settings import RolloutConfig


def drawn_in(plan: Plan) -> list[int]:
  """Return the step that drew each group."""
  drawn = [group.drawn for group in plan.partial_groups]
  return drawn + [plan.step] * (len(plan.questions) - len(drawn))


def trained(
  begun: Sequence[int], complete: Sequence[bool], step: int, questions: int, max_age: int
) -> list[int] | None:
  """Choose the oldest complete groups to train in `step`, or None if it must keep generating.

  A step keeps generating until enough groups are complete and every remaining group can still train
  in time. If each step trains the oldest groups, the i-th oldest remaining group trains
  `1 + i // questions` steps later. So no group gets too old as long as at most
  `questions * (max_age + 1)` are in flight.

  Args:
    begun: for each group in flight, the step that wrote its first token, or `step` if the group has
      no tokens yet.
    complete: for each group, whether all of its responses are complete.
    step: the current step.
    questions: the number of groups that a step trains (Q).
    max_age: the maximum number of steps between a group's first token and its training.
  """
  by_age = sorted(range(len(begun)), key=lambda group: begun[group])  # stable: ties keep draw order
  chosen = [group for group in by_age if complete[group]][:questions]
  if len(chosen) < questions:
    return None
  left = [group for group in by_age if group not in chosen]
  if any(begun[group] + max_age <= step + place // questions for place, group in enumerate(left)):
    return None
  return sorted(chosen)


def ready(
  config: RolloutConfig, responses: Sequence[Sequence[Response]], step: int
) -> list[int] | None:
  """Choose the groups to train from their responses; see `trained`."""
  begun = [min(one.first_step(step) for one in own) for own in responses]
  complete = [all(one.is_complete for one in own) for own in responses]
  return trained(begun, complete, step, config.questions, config.max_staleness)


def continued(before: Response, now: Response, step: int) -> Response:
  """Return `now` with a span for the tokens that `step` added to `before`.

  The weights for truncated importance sampling still cover only the tokens from earlier steps.
  """
  written = len(now.tokens) - len(before.tokens)
  spans = (*before.spans, Span(step, written)) if written else before.spans
  return dataclasses.replace(now, tis_weight=before.tis_weight, spans=spans)


def split(graded: GradedGroups, order: Sequence[int]) -> GradedGroups:
  """Return the groups in `order` for training, and leave the rest for the next step."""
  plan, responses, verdicts, _ = graded
  drawn = drawn_in(plan)
  left = tuple(
    PartialGroup(
      question_row=plan.questions[group].row,
      drawn=drawn[group],
      is_drawn=plan.is_drawn[group],
      responses=tuple(responses[group]),
      verdicts=tuple(verdicts[group]),
    )
    for group in range(len(plan.questions))
    if group not in order
  )
  trained = dataclasses.replace(
    plan,
    questions=tuple(plan.questions[group] for group in order),
    prompts=tuple(plan.prompts[group] for group in order),
    candidates=tuple(plan.candidates[group] for group in order),
    is_drawn=tuple(plan.is_drawn[group] for group in order),
    partial_groups=(),
  )
  own = [responses[group] for group in order], [verdicts[group] for group in order]
  return GradedGroups(trained, *own, left)


def metrics(
  step: int, responses: Sequence[Sequence[Response]], left: Sequence[PartialGroup]
) -> dict[str, float]:
  """Compute the staleness (in steps) of a step's fresh tokens, and count the groups left over.

  `responses` are the trained groups' responses. Returns {} without partial rollouts.
  """
  spans = [span for group in responses for response in group for span in response.spans]
  if not spans:
    return {}
  ages, tokens = [step - span.step for span in spans], [span.tokens for span in spans]
  return {
    'staleness/mean': float(np.average(ages, weights=tokens)),
    'staleness/max': max(ages),
    'staleness/groups_left': len(left),
  }
