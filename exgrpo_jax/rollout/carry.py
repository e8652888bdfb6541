"""Which groups a step trains, where responses may span steps (`settings.Config.carry`). Pure.

A group is in flight from the step that draws it to the step that trains it. It trains once all of
its responses are complete, and at the latest `max_age` steps after the one in which its first
token was written.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.datatypes import Carried, Plan, Response, Span, Verdict

UNBEGUN = Response(
  tokens=np.zeros(0, np.int32),
  logp=np.zeros(0, np.float32),
  entropy=np.zeros(0, np.float32),
  truncated=False,
  is_complete=False,
)


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


def ready(
  responses: Sequence[Sequence[Response]], step: int, questions: int, max_age: int
) -> list[int] | None:
  """`trained` of groups with these responses."""
  begun = [min(one.first_step(step) for one in own) for own in responses]
  complete = [all(one.is_complete for one in own) for own in responses]
  return trained(begun, complete, step, questions, max_age)


def carried_tokens(response: Response, step: int) -> int:
  """How many of its tokens, the first ones, steps before `step` wrote."""
  return sum(span.tokens for span in response.spans if span.step < step)


def is_carried(response: Response, step: int) -> np.ndarray:
  """Bool [T]: which of its tokens these are."""
  return np.arange(len(response.tokens)) < carried_tokens(response, step)


def continued(before: Response, now: Response, step: int) -> Response:
  """What `step` made of a response: `now`, with what else is known of its tokens of earlier steps.

  Importance weights against the sampler are then missing for the tokens of `step`.
  """
  written = len(now.tokens) - len(before.tokens)
  spans = (*before.spans, Span(step, written)) if written else before.spans
  return dataclasses.replace(now, tis_weight=before.tis_weight, spans=spans)


def split(
  plan: Plan,
  responses: Sequence[Sequence[Response]],
  verdicts: Sequence[Sequence[Verdict]],
  order: Sequence[int],
) -> tuple[Plan, list[Sequence[Response]], list[Sequence[Verdict]], list[Carried]]:
  """(plan, responses, verdicts) of the groups in `order`, and what becomes of the others."""
  carried = [
    Carried(
      question_row=question.row,
      drawn=drawn,
      is_replay=bool(candidates),
      responses=tuple(own),
      verdicts=tuple(judged),
    )
    for group, (question, drawn, candidates, own, judged) in enumerate(
      zip(plan.questions, plan.drawn, plan.candidates, responses, verdicts, strict=True)
    )
    if group not in order
  ]
  trained = dataclasses.replace(
    plan,
    questions=tuple(plan.questions[group] for group in order),
    prompts=tuple(plan.prompts[group] for group in order),
    candidates=tuple(plan.candidates[group] for group in order),
    carried=(),
  )
  return (
    trained,
    [responses[group] for group in order],
    [verdicts[group] for group in order],
    carried,
  )


def metrics(
  step: int, responses: Sequence[Sequence[Response]], carried: Sequence[Carried]
) -> dict[str, float]:
  """The ages of the fresh tokens that a step trains, in steps, and how many groups it leaves.

  `responses` are those of the groups that it trains; empty where they have no spans.
  """
  spans = [span for group in responses for response in group for span in response.spans]
  if not spans:
    return {}
  ages, tokens = [step - span.step for span in spans], [span.tokens for span in spans]
  return {
    'carry/age_mean': float(np.average(ages, weights=tokens)),
    'carry/age_max': max(ages),
    'carry/groups_left': len(carried),
  }
