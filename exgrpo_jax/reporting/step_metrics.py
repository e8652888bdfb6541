"""Metrics of one training step."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from exgrpo_jax.algorithm import loss_sums, replay
from exgrpo_jax.datatypes import FAILURES, Experience, Plan, Response, Trajectory, Verdict
from exgrpo_jax.grading import verifier
from exgrpo_jax.reporting.record_writer import Rows
from exgrpo_jax.rollout import partial

OUTCOMES = (*verifier.OUTCOMES, *FAILURES)  # every way in which grading a response can end


def measure(
  experience: Experience,
  after: replay.Bucketed,
  rows: Rows,
  sums: Mapping[str, ArrayLike],
) -> dict[str, float]:
  """All metrics of a step except its times.

  Args:
    experience: what the step collected.
    after: the buffer after the step.
    rows: the step's records.
    sums: of the update, as the loop's `learn` returns them, on the host.
  """
  arrays = {name: np.asarray(value) for name, value in sums.items()}
  totals = {name: float(array) for name, array in arrays.items() if not array.ndim}
  num_rollouts = len(experience.batch.advantage_B) // len(experience.plan.questions)
  return {
    **experience.sampling,
    **partial.metrics(experience.plan.step, experience.responses, experience.left),
    **experience.parity,
    **rollout_metrics(
      experience.plan, experience.responses, experience.replays, experience.verdicts
    ),
    **record_metrics(rows, num_rollouts),
    **buffer_metrics(after, num_rollouts),
    **loss_sums.metrics(totals),
    **(loss_sums.expert_metrics(arrays['choices_LE']) if 'choices_LE' in arrays else {}),
    'loss': totals['loss'] / totals['updates'],
    'gradient_norm': totals['gradient_norm'] / totals['updates'],
    'learning_rate': totals['learning_rate'] / totals['updates'],
    'skipped_updates': totals['skipped'],
  }


def rollout_metrics(
  plan: Plan,
  responses: Sequence[Sequence[Response]],
  replays: Sequence[Trajectory | None],
  verdicts: Sequence[Sequence[Verdict]],
) -> dict[str, float]:
  """Rewards, pass rates and lengths of fresh responses; ages of replayed trajectories.

  'reward_std' is over all fresh responses; 'reward_std_within' is the mean over groups of the
  standard deviation within, the replayed reward included, which advantages are made of.
  'zero_variance' is the share of groups with equal rewards in float32, the replayed one included:
  their advantages are 0, so they give no learning signal. 'rewards/…' are the means of the reward's
  components before their weights, over the responses that have one. 'grading/…' are the shares of
  each outcome; the clock decides what timed out, so a run of the same seed may differ there.
  Lengths are in tokens, ages in steps.

  Args:
    plan: which questions the step worked on.
    responses: the fresh responses, by group.
    replays: the replayed trajectory of each group; None in a group of a fresh question.
    verdicts: of `responses`, in the same order.
  """
  fresh = [verdict for group in verdicts for verdict in group]
  lengths = [response.num_own for group in responses for response in group]
  rewards = [
    [verdict.reward for verdict in group] + ([replayed.reward] if replayed else [])
    for group, replayed in zip(verdicts, replays)
  ]
  metrics: dict[str, float] = {
    'reward': _mean([verdict.reward for verdict in fresh]),
    'pass_rate/all': _mean([verdict.correct for verdict in fresh]),
    'reward_std': float(np.std([verdict.reward for verdict in fresh])),
    'reward_std_within': _mean([float(np.std(group)) for group in rewards]),
    'zero_variance': _mean([len(set(map(np.float32, group))) == 1 for group in rewards]),
    'length/mean': _mean(lengths),
    'length/max': max(lengths),
    'length/total': sum(lengths),
    'length/truncated': _mean([response.truncated for group in responses for response in group]),
    'epoch': plan.epoch,
    'replay/questions': sum(plan.is_drawn),
    'replay/rows': int(sum(plan.is_replay_Q)),
  }
  components = [verdict.components for verdict in fresh if verdict.components]
  for name in components[0] if components else ():
    metrics[f'rewards/{name}'] = _mean([of_response[name] for of_response in components])
  for outcome in OUTCOMES:
    share = _mean([verdict.outcome == outcome for verdict in fresh])
    metrics[f'grading/{outcome.replace(" ", "_")}'] = share
  for name, of_replay in (('fresh', False), ('replay', True)):
    groups = [group for group, is_drawn in zip(verdicts, plan.is_drawn) if is_drawn == of_replay]
    if groups:
      metrics[f'pass_rate/{name}'] = _mean([one.correct for group in groups for one in group])
  ages = [plan.step - trajectory.step for trajectory in replays if trajectory]
  if ages:
    metrics |= {'replay/age_mean': _mean(ages), 'replay/age_max': max(ages)}
  return metrics


def record_metrics(rows: Rows, num_rollouts: int) -> dict[str, float]:
  """What the rows of a step's records add up to; step_records.py says what each column means.

  'groups/…' are shares of groups, in whose correctness the replayed row counts as
  `replay.count_replayed` says. 'replay/bucket_…' counts the replayed questions by their bucket
  before the step. The others are means over fresh or replayed responses, each with the same weight:
  'entropy/incorrect' over all fresh ones that are not correct, 'valid_steps/correct' over the fresh
  correct ones whose steps can be checked. A mean over nothing is left out.
  """
  responses, questions = rows['responses'], rows['questions']

  def known(name: str, chosen: Sequence[bool]) -> list[float]:
    return [value for value, yes in zip(responses[name], chosen) if yes and value is not None]

  replayed = responses['is_replay']
  fresh = [not yes for yes in replayed]
  correct = [yes and outcome == 'correct' for yes, outcome in zip(fresh, responses['outcome'])]
  incorrect = [yes and outcome != 'correct' for yes, outcome in zip(fresh, responses['outcome'])]
  times_replayed = known('times_replayed', replayed)
  values = {
    'groups/solved_by_all': [share == 1 for share in questions['correctness']],
    'groups/solved_by_none': [share == 0 for share in questions['correctness']],
    'entropy/correct': known('entropy', correct),
    'entropy/incorrect': known('entropy', incorrect),
    'length/replayed': known('length', replayed),
    'probability/fresh': known('probability', fresh),
    'probability/replayed': known('probability', replayed),
    'code_blocks/fresh': known('has_code_block', fresh),
    'code_blocks/replayed': known('has_code_block', replayed),
    'valid_steps/correct': known('valid_steps', correct),
    'replay/times_mean': times_replayed,
  }
  metrics = {name: _mean(members) for name, members in values.items() if members}
  if times_replayed:
    before = zip(questions['bucket_before'], questions['is_replay'])
    count_K = np.bincount([bucket for bucket, yes in before if yes], minlength=num_rollouts)
    metrics['replay/times_max'] = max(times_replayed)
    metrics |= {f'replay/bucket_{k}': int(count) for k, count in enumerate(count_K)}
  return metrics


def buffer_metrics(bucketed: replay.Bucketed, num_rollouts: int) -> dict[str, float]:
  """Sizes of the replay buffer and of each of its K = `num_rollouts` buckets, in questions."""
  buffer = bucketed.buffer
  count_K = np.bincount(list(bucketed.bucket_of.values()), minlength=num_rollouts)
  stored = (one for entry in buffer.entries.values() for one in entry.trajectories)
  route_bytes = [one.routes.nbytes for one in stored if one.routes is not None]
  return {
    'buffer/questions': len(buffer.entries),
    'buffer/retired': len(buffer.retired_epoch),
    'buffer/trajectories': sum(len(entry.trajectories) for entry in buffer.entries.values()),
    'buffer/started': buffer.started,
    **({'buffer/route_bytes': sum(route_bytes)} if route_bytes else {}),
    **{f'buffer/bucket_{k}': int(count) for k, count in enumerate(count_K)},
  }


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values))
