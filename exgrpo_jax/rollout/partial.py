"""Partial rollouts (`rollout.partial`): responses may span steps.

A step ends once as many groups are complete as it trains. The next step goes on with the others. A
group is in flight from the step that draws it to the step that trains it. It trains once all of its
responses are complete, at the latest `max_age` steps after the step that wrote its first token.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.datatypes import GradedGroups, PartialGroup, Plan, Response, Span
from exgrpo_jax.rollout.settings import RolloutConfig


def drawn_in(plan: Plan) -> list[int]:
  """Return, by group, the step whose plan first had it."""
  drawn = [group.drawn for group in plan.left]
  return drawn + [plan.step] * (len(plan.questions) - len(drawn))


def trained(
  begun: Sequence[int], complete: Sequence[bool], step: int, questions: int, max_age: int
) -> list[int] | None:
  """Choose the groups that `step` trains: the oldest complete ones. None while it has to go on.

  It goes on until enough groups are complete and no other group is so old that it could not train
  in time. The i-th oldest of the others trains `1 + i // questions` steps later if each step trains
  the oldest. So no group ever gets too old if at most `questions * (max_age + 1)` are in flight.

  Args:
    begun: by group in flight, the step that wrote its first token; this step if it has no tokens.
    complete: by group, whether all its responses are complete.
    step: the present one.
    questions: how many groups a step trains (Q).
    max_age: in steps.
  """
  by_age = sorted(range(len(begun)), key=lambda group: begun[group])  # stable: ties stay as drawn
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
  """Apply `trained` to groups with these responses."""
  begun = [min(one.first_step(step) for one in own) for own in responses]
  complete = [all(one.is_complete for one in own) for own in responses]
  return trained(begun, complete, step, config.questions, config.max_staleness)


def continued(before: Response, now: Response, step: int) -> Response:
  """Return `now` with its spans: `step` wrote the tokens that `before` lacks.

  Its weights of truncated importance sampling only cover the tokens of earlier steps.
  """
  written = len(now.tokens) - len(before.tokens)
  spans = (*before.spans, Span(step, written)) if written else before.spans
  return dataclasses.replace(now, tis_weight=before.tis_weight, spans=spans)


def split(graded: GradedGroups, order: Sequence[int]) -> GradedGroups:
  """Return the groups in `order` for training, and leave the others to the next step."""
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
    left=(),
  )
  own = [responses[group] for group in order], [verdicts[group] for group in order]
  return GradedGroups(trained, *own, left)


def metrics(
  step: int, responses: Sequence[Sequence[Response]], left: Sequence[PartialGroup]
) -> dict[str, float]:
  """Compute the staleness of the fresh tokens that a step trains, and count the groups it leaves.

  Staleness is in steps. `responses` are from the groups that it trains. Empty without partial
  rollouts.
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
