"""Partial rollouts (`rollout.partial`): responses may span several steps.

A step ends once enough groups are complete to train on, and the next step continues the rest. A
group is complete once all of its responses are. It is in flight from the step that draws it to the
step that trains on it. The latter comes at most `rollout.max_staleness` steps after the group's
first token was generated.

Without partial rollouts and dynamic sampling, `continuing`, `continued` and `split` return their
plan, response or groups unchanged.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.algorithm.replay import Buffer, ReplayConfig
from exgrpo_jax.datatypes import (
  GradedGroups,
  PartialGroup,
  Plan,
  QuestionSet,
  Response,
  Span,
  Verdict,
)
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose


def continuing(
  config: ReplayConfig,
  group_size: int,
  plan: Plan,
  groups: Sequence[PartialGroup],
  data: QuestionSet,
  buffer: Buffer,
) -> Plan:
  """Prepend the groups left over from the last step to the plan's new groups."""
  rows = [group.question_row for group in groups]
  # Use the candidates from when the question was drawn, so that a group of K - 1 responses has one.
  candidates = [
    replay.candidates(config, buffer.entries[group.question_row], group.drawn)
    if len(group.responses) < group_size
    else ()
    for group in groups
  ]
  return dataclasses.replace(
    plan,
    questions=(*data.questions.read(rows), *plan.questions),
    prompts=(*(data.prompts[row] for row in rows), *plan.prompts),
    candidates=(*candidates, *plan.candidates),
    is_drawn=(*(group.is_drawn for group in groups), *plan.is_drawn),
    partial_groups=tuple(groups),
  )


def drawn_in(plan: Plan) -> list[int]:
  """Return the step that drew each group."""
  steps = [group.drawn for group in plan.partial_groups]
  return steps + [plan.step] * (len(plan.questions) - len(steps))


def trained(
  first_steps: Sequence[int], complete: Sequence[bool], step: int, questions: int, max_age: int
) -> list[int] | None:
  """Choose the oldest complete groups for training in `step`; return None to keep generating.

  A step keeps generating until enough groups are complete and every remaining group can still be
  trained on in time. If each step trains on the oldest groups, the i-th oldest remaining group is
  due `1 + i // questions` steps later. So no group gets too old as long as at most
  `questions * (max_age + 1)` groups are in flight.

  `first_steps` lists the step of each group's first token, or `step` for groups without tokens.
  `complete` is True for groups whose responses are all complete. A step trains on `questions`
  groups (Q), at most `max_age` steps after their first tokens.
  """
  # The sort is stable, so ties keep draw order.
  by_age = sorted(range(len(first_steps)), key=lambda group: first_steps[group])
  oldest = [group for group in by_age if complete[group]][:questions]
  if len(oldest) < questions:
    return None
  remaining = [group for group in by_age if group not in oldest]
  if any(
    first_steps[group] + max_age <= step + place // questions
    for place, group in enumerate(remaining)
  ):
    return None
  return sorted(oldest)


def ready(
  config: RolloutConfig,
  responses: Sequence[Sequence[Response]],
  step: int,
  dropped: Sequence[int] = (),
  fillers: int = 0,
) -> list[int] | None:
  """Choose which groups to train on, based on their responses; see `trained`.

  Skips groups in `dropped`. But if too few other groups are complete, the missing groups are taken
  from `dropped`, up to `fillers` of them.
  """
  groups = [group for group in range(len(responses)) if group not in dropped]
  first_steps = [
    min(response.first_step(step) for response in responses[group]) for group in groups
  ]
  complete = [are_complete(responses[group]) for group in groups]
  # Add only as many as are missing, because a dropped group cannot wait for the next step.
  filler_groups = dropped[: max(0, min(fillers, config.questions - sum(complete)))]
  groups, first_steps = [*groups, *filler_groups], [*first_steps, *[step] * len(filler_groups)]
  complete += [True] * len(filler_groups)
  places = trained(first_steps, complete, step, config.questions, config.max_staleness)
  return None if places is None else [groups[place] for place in places]


def are_complete(responses: Sequence[Response]) -> bool:
  """Return True if all of a group's responses are complete."""
  return all(response.is_complete for response in responses)


def is_informative(config: ReplayConfig, verdicts: Sequence[Verdict]) -> bool:
  """Return True if a finished fresh group produces a gradient.

  Its rewards must differ in float32, and `replay.difficulty` must not mask it.

  >>> right, wrong = Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')
  >>> [is_informative(ReplayConfig(), group) for group in ([right, right], [right, wrong])]
  [False, True]
  """
  correctness = replay.group_correctness(config, verdicts, None)
  rewards = {np.float32(verdict.reward) for verdict in verdicts}
  return len(rewards) > 1 and replay.trains(config, correctness)


def dropped(config: ReplayConfig, graded: GradedGroups, mask_truncated: bool) -> list[int]:
  """Return the finished fresh groups that dynamic sampling drops.

  These groups are uninformative or, with `mask_truncated`, contain only truncated responses.
  """
  groups = zip(graded.plan.is_drawn, graded.responses, graded.verdicts, strict=True)
  return [
    group
    for group, (is_drawn, responses, verdicts) in enumerate(groups)
    if not is_drawn and are_complete(responses)
    if not is_informative(config, verdicts)
    or (mask_truncated and all(response.truncated for response in responses))
  ]


class Round(NamedTuple):
  """The plan for a round of dynamic sampling (dynamic.py)."""

  draw: int = 0  # questions to draw first
  finish: int = 0  # groups to finish
  dropped: Sequence[int] = ()  # the groups that earlier rounds dropped
  fillers: int = 0  # dropped groups to train on if all other groups turn out to be informative


WHOLE_STEP = Round()


def continued(config: RolloutConfig, before: Response, now: Response, step: int) -> Response:
  """Return `now` with the spans that `before` has for earlier steps, and one span for `step`.

  The span for `step` covers all tokens from this step; without such tokens, it is left out.

  The weights for truncated importance sampling still cover only the tokens from earlier steps.
  Returns `now` unchanged if the config never leaves groups for the next step.
  """
  if not config.keeps_groups:
    return now
  num_new = len(now.tokens) - before.tokens_before(step)
  earlier_spans = (span for span in before.spans if span.step < step)
  spans = (*earlier_spans, Span(step, num_new)) if num_new else before.spans
  return dataclasses.replace(now, tis_weight=before.tis_weight, spans=spans)


def verdicts(plan: Plan) -> dict[tuple[int, int], Verdict]:
  """Return the verdicts from earlier steps, by group and sample."""
  verdicts_by_place = {}
  for number, group in enumerate(plan.partial_groups):
    samples = [sample for sample, response in enumerate(group.responses) if response.is_complete]
    verdicts_by_place |= {
      (number, sample): verdict for sample, verdict in zip(samples, group.verdicts, strict=True)
    }
  return verdicts_by_place


def in_flight(graded: GradedGroups, groups: Sequence[int]) -> tuple[PartialGroup, ...]:
  """Convert the given groups to `PartialGroup`s that the next step or round can continue."""
  plan, draw_steps = graded.plan, drawn_in(graded.plan)
  return tuple(
    PartialGroup(
      question_row=plan.questions[group].row,
      drawn=draw_steps[group],
      is_drawn=plan.is_drawn[group],
      responses=tuple(graded.responses[group]),
      verdicts=tuple(graded.verdicts[group]),
    )
    for group in groups
  )


def split(
  config: RolloutConfig, graded: GradedGroups, seed: int, dropped: Sequence[int] = ()
) -> GradedGroups:
  """Return the groups for training in shuffled order, and leave the rest for the next step.

  Groups in `dropped` come after the groups for training, unless they are needed to fill the step.
  """
  if not config.keeps_groups:
    return graded
  plan, responses, verdicts = graded.plan, graded.responses, graded.verdicts
  groups = ready(config, responses, plan.step, dropped, len(dropped))
  assert groups is not None, 'generate must not return before the step can train'
  rng = randomness.generator(seed, Purpose.TRAINED_ORDER, plan.step)
  order = rng.permutation(groups).tolist()
  untrained = [group for group in dropped if group not in order]
  order += untrained
  remaining = [group for group in range(len(plan.questions)) if group not in order]
  trained_plan = dataclasses.replace(
    plan,
    questions=tuple(plan.questions[group] for group in order),
    prompts=tuple(plan.prompts[group] for group in order),
    candidates=tuple(plan.candidates[group] for group in order),
    is_drawn=tuple(plan.is_drawn[group] for group in order),
    partial_groups=(),
  )
  results = [responses[group] for group in order], [verdicts[group] for group in order]
  return GradedGroups(trained_plan, *results, in_flight(graded, remaining), len(untrained))


def metrics(
  step: int, responses: Sequence[Sequence[Response]], remaining: Sequence[PartialGroup]
) -> dict[str, float]:
  """Compute the staleness (in steps) of a step's fresh tokens, and count the groups left over.

  `responses` are the responses of the groups that the step trains on. Environment tokens are not
  counted. Returns {} without partial rollouts.
  """
  ages = list[np.ndarray]()
  for response in itertools.chain.from_iterable(responses):
    if response.spans:
      steps, tokens = zip(*response.spans)
      ages.append(np.repeat(step - np.array(steps), tokens)[response.own])
  if not ages:
    return {}
  age_N = np.concatenate(ages)
  return {
    'staleness/mean': float(age_N.mean()),
    'staleness/max': int(age_N.max()),
    'staleness/groups_left': len(remaining),
  }
