"""Partial rollouts (`rollout.partial`): responses may span steps, a layer on the stages.

A step ends once as many groups are complete as it trains. The next step goes on with the others. A
group is in flight from the step that draws it to the step that trains it. It trains once all of its
responses are complete, at the latest `max_age` steps after the step that wrote its first token.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.datatypes import Cursor, GradedGroups, PartialGroup, Plan, Response, Span
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout.sampler import UNBEGUN
from exgrpo_jax.rollout.stages import Responses, Rollout, Submit
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose


class PartialRollout(Rollout):
  """The stages when responses span steps. Needs a sampler that resumes."""

  def plan(
    self, buffer: Buffer, cursor: Cursor, step: int, left: Sequence[PartialGroup] = ()
  ) -> Plan:
    """Plan the groups that the last step left, then new questions up to `groups_in_flight`."""
    rows = [group.question_row for group in left]
    entries = {row: entry for row, entry in buffer.entries.items() if row not in rows}
    free, count = dataclasses.replace(buffer, entries=entries), self.config.groups_in_flight
    drawn = self._draw(free, cursor, step, max(0, count - len(left)), taken=rows)
    # Groups of K - 1 responses need a stored one, even if it is too old by now.
    kept = tuple(
      buffer.entries[group.question_row].trajectories
      if group.is_drawn and self.replay.include_trajectory
      else ()
      for group in left
    )
    return dataclasses.replace(
      drawn,
      questions=(*self.data.questions.read(rows), *drawn.questions),
      prompts=(*(self.data.prompts[row] for row in rows), *drawn.prompts),
      candidates=kept + drawn.candidates,
      is_drawn=(*(group.is_drawn for group in left), *drawn.is_drawn),
      left=tuple(left),
    )

  def generate(
    self, params: Params, plan: Plan, submit: Submit
  ) -> tuple[list[list[Response]], dict[str, float]]:
    """Continue the incomplete responses until the step can train; see `trained`.

    Some responses are then incomplete or have not even begun.
    """
    groups = [list(group.responses) for group in plan.left]
    new = plan.is_replay_Q[len(groups) :]
    groups += [[UNBEGUN] * (self.config.group_size - is_replay) for is_replay in new]
    places = [
      (group, sample)
      for group, own in enumerate(groups)
      for sample, response in enumerate(own)
      if not response.is_complete
    ]
    begun, drawn = [groups[group][sample] for group, sample in places], drawn_in(plan)

    def keep(index: int, response: Response) -> None:
      group, sample = places[index]
      groups[group][sample] = continued(begun[index], response, plan.step)

    def finish(index: int, response: Response) -> bool:
      keep(index, response)
      group, sample = places[index]
      self._submit(plan, places[index], groups[group][sample], submit)
      # Checked only when the answer may have changed.
      is_complete = all(one.is_complete for one in groups[group])
      return is_complete and self._trained(plan, groups) is not None

    if self._trained(plan, groups) is not None:
      return groups, {}
    requests = [
      dataclasses.replace(self._request(plan, place, drawn[place[0]]), begun=response)
      for place, response in zip(places, begun)
    ]
    responses, metrics = self.sampler.generate(params, requests, finish)
    for index, response in enumerate(responses):
      keep(index, response)
    return groups, metrics

  def grade(self, plan: Plan, responses: Responses, grader: Grader) -> GradedGroups:
    """Return the groups that the step trains, shuffled, and the groups that it leaves.

    Seed and step decide the order. Shuffling puts old and new groups into each minibatch.
    """
    new = grader.collect()
    by_environment = [one.verdict for own in responses for one in own if one.verdict]
    pool.refuse_all_failed(f'step {plan.step}', [*new.values(), *by_environment])
    earlier = [iter(group.verdicts) for group in plan.left]
    verdicts = [
      [
        response.verdict or new.get((group, sample)) or next(earlier[group])
        for sample, response in enumerate(own)
        if response.is_complete
      ]
      for group, own in enumerate(responses)
    ]
    chosen = self._trained(plan, responses)
    assert chosen is not None, 'generate returns once the step can train'
    rng = randomness.generator(self.seed, Purpose.TRAINED_ORDER, plan.step)
    order = rng.permutation(chosen).tolist()
    return split(GradedGroups(plan, responses, verdicts), order)

  def _trained(self, plan: Plan, responses: Responses) -> list[int] | None:
    return ready(responses, plan.step, self.config.questions, self.config.max_staleness)


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


def ready(responses: Responses, step: int, questions: int, max_age: int) -> list[int] | None:
  """Apply `trained` to groups with these responses."""
  begun = [min(one.first_step(step) for one in own) for own in responses]
  complete = [all(one.is_complete for one in own) for own in responses]
  return trained(begun, complete, step, questions, max_age)


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
