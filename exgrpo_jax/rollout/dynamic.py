"""Dynamic sampling (`rollout.dynamic_sampling`), as in DAPO (arXiv:2503.14476).

A fresh group whose rewards are all equal produces no gradient. A step drops such groups and draws
more questions until it has Q groups that are replayed or have unequal rewards. Questions are drawn
in rounds, because each round's verdicts show how many groups are still missing. Once a step has
finished `dynamic_sampling` times as many fresh groups as it needs, dropped groups fill the
remaining places.

Surplus groups wait for the next step, as in partial rollouts (partial.py).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.algorithm import question_stream, replay
from exgrpo_jax.datatypes import GradedGroups, Plan, Verdict
from exgrpo_jax.environments.environment import METRICS
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import partial, stages
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.rollout.stages import Responses, RolloutSetup


def fresh_finished(plan: Plan, responses: Responses) -> int:
  """Count the fresh groups that have finished."""
  complete = map(partial.are_complete, responses)
  return sum(is_complete and not is_drawn for is_complete, is_drawn in zip(complete, plan.is_drawn))


def most_finished(config: RolloutConfig, plan: Plan) -> int:
  """Return how many fresh groups a step may finish before it stops drawing questions."""
  groups = zip(plan.is_drawn, partial.drawn_in(plan))
  num_replayed = sum(is_drawn and step == plan.step for is_drawn, step in groups)
  num_fresh = max(0, config.questions - num_replayed)
  return math.floor(config.dynamic_sampling * num_fresh + replay.ROUNDING)


def next_round(
  config: RolloutConfig, graded: GradedGroups, dropped: Sequence[int], num_waiting: int
) -> partial.Round | None:
  """Plan the next round, or return None if the step can train.

  A round finishes at most Q groups. Its target is the number of missing groups divided by the
  fraction of the step's finished groups that are informative. Without partial rollouts, this leaves
  fewer than Q surplus groups. With partial rollouts, new questions replace dropped groups.
  `dropped` lists the dropped groups, and `num_waiting` counts the fresh groups that had finished
  before the step.
  """
  plan, responses = graded.plan, graded.responses
  if partial.ready(config, responses, plan.step, dropped) is not None:
    return None
  num_finished = fresh_finished(plan, responses) - num_waiting
  remaining = most_finished(config, plan) - num_finished
  if remaining <= 0:
    groups = partial.ready(config, responses, plan.step, dropped, len(dropped))
    return None if groups else partial.Round(dropped=dropped, fillers=len(dropped))
  num_missing = max(0, config.questions + len(dropped) - sum(map(partial.are_complete, responses)))
  share = max(1, num_finished - len(dropped)) / max(1, num_finished)
  finish = min(remaining, config.questions, math.ceil(num_missing / share))
  room = config.groups_in_flight + len(dropped) - len(responses) if config.partial else finish
  return partial.Round(max(0, room), finish, dropped, max(0, num_missing - finish))


def sample(
  rollout: RolloutSetup, params: Params, plan: Plan, grader: Grader
) -> tuple[Plan, Responses, dict[str, float]]:
  """Generate the step's responses and submit them to `grader`; see `stages.generate`.

  With dynamic sampling, also collects verdicts and draws questions until the step can train; the
  returned plan includes the new questions, and its partial groups contain all verdicts.
  """
  config = rollout.config
  if not config.is_dynamic:
    return plan, *stages.generate(rollout, params, plan, grader.submit)
  responses: Responses = [group.responses for group in plan.partial_groups]
  num_waiting, num_tokens = fresh_finished(plan, responses), _count_tokens(responses)
  rounds, verdicts, aim = [], dict[Any, Verdict](), partial.WHOLE_STEP
  while aim is not None:
    plan = with_more_questions(rollout, plan, aim.draw)
    responses, metrics = stages.generate(rollout, params, plan, grader.submit, aim)
    graded, new_verdicts = stages.graded(plan, responses, grader)
    verdicts |= new_verdicts
    tokens_before, num_tokens = num_tokens, _count_tokens(responses)
    rounds.append((num_tokens - tokens_before, metrics))
    groups = partial.in_flight(graded, range(len(responses)))
    plan = dataclasses.replace(plan, partial_groups=groups)
    aim = next_round(config, graded, stages.dropped(rollout, graded), num_waiting)
  pool.refuse_all_failed(f'step {plan.step}', [verdicts[place] for place in sorted(verdicts)])
  num_drawn = sum(group.drawn == plan.step and not group.is_drawn for group in plan.partial_groups)
  return plan, responses, {**merged(rounds), 'groups/drawn': num_drawn}


def _count_tokens(responses: Responses) -> int:
  return sum(len(response.tokens) for group in responses for response in group)


def with_more_questions(rollout: RolloutSetup, plan: Plan, count: int) -> Plan:
  """Append `count` fresh questions to the plan."""
  data = rollout.data
  rows, cursor = question_stream.take(
    plan.cursor,
    count,
    len(data.questions),
    rollout.seed,
    plan.retired_epoch,
    taken=[question.row for question in plan.questions],
    at_once=rollout.config.questions_at_once,
  )
  return dataclasses.replace(
    plan,
    cursor=cursor,
    questions=(*plan.questions, *data.questions.read(rows)),
    prompts=(*plan.prompts, *(data.prompts[row] for row in rows)),
    candidates=(*plan.candidates, *[()] * count),
    is_drawn=(*plan.is_drawn, *[False] * count),
  )


def metrics(rollout: RolloutSetup, trained: GradedGroups) -> dict[str, float]:
  """Count a step's dropped groups, their tokens, and the groups kept only to fill the step."""
  if not rollout.config.is_dynamic:
    return {}
  Q = len(trained.plan.questions) - trained.num_dropped
  tokens = sum(response.num_own for group in trained.responses[Q:] for response in group)
  return {
    'groups/dropped': trained.num_dropped,
    'groups/filled': len(stages.dropped(rollout, trained)) - trained.num_dropped,
    'length/dropped': tokens,
  }


def merged(rounds: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
  """Merge the sampler's metrics from several rounds, given as (tokens generated, metrics).

  Takes the maximum of '*_max' metrics, adds up environment times and counts (regardless of
  their names), and averages all other metrics, weighted by tokens.
  """
  step_metrics = dict[str, float]()
  for name in dict.fromkeys(name for _, metrics in rounds for name in metrics):
    weights, values = zip(
      *((tokens, metrics[name]) for tokens, metrics in rounds if name in metrics)
    )
    kind, _, rest = name.partition('/')
    if kind == 'environment' and (rest not in METRICS or rest.endswith('seconds')):
      step_metrics[name] = sum(values)
    elif name.endswith('_max'):
      step_metrics[name] = max(values)
    else:
      step_metrics[name] = float(np.average(values, weights=weights if sum(weights) else None))
  return step_metrics
