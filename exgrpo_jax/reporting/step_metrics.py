"""Metrics of one training step, and warnings about steps that went wrong."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from exgrpo_jax.algorithm import loss_sums, replay
from exgrpo_jax.datatypes import FAILURES, Experience, Plan, Response, Trajectory, Verdict
from exgrpo_jax.grading import verifier
from exgrpo_jax.reporting.record_writer import Rows
from exgrpo_jax.rollout import partial

OUTCOMES = (*verifier.OUTCOMES, *FAILURES)  # every way in which the grading of a response can end
ALARM_STEPS = 10  # warn each time that this many more steps in a row had no learning signal


def measure(
  experience: Experience,
  after: replay.Bucketed,
  rows: Rows,
  sums: Mapping[str, ArrayLike],
) -> dict[str, float]:
  """All metrics of a step but its times.

  Args:
    experience: what the step collected.
    after: the buffer after the step.
    rows: of the step's records.
    sums: of the update, as `training.learn` returns them, on the host.
  """
  totals = {name: float(np.asarray(value)) for name, value in sums.items()}
  num_rollouts = len(experience.batch.advantage_B) // len(experience.plan.questions)
  return {
    **experience.sampling,
    **partial.metrics(experience.plan.step, experience.responses, experience.left),
    **experience.parity,
    **experience.alignment,
    **rollout_metrics(
      experience.plan, experience.responses, experience.replays, experience.verdicts
    ),
    **record_metrics(rows, num_rollouts),
    **buffer_metrics(after, num_rollouts),
    **loss_sums.metrics(totals),
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

  'reward_std' is over all fresh responses; 'reward_std_within' is the mean over groups of each
  group's own, the replayed reward included: what advantages are made of. 'zero_variance' is the
  share of groups in which all rewards, the replayed one included, are equal: their advantages are
  0, so they give no learning signal. 'rewards/…' are the means of the reward's components, each
  before its weight, over the responses that have one. 'grading/…' are the shares of each outcome;
  what timed out is what the clock decided, and may end otherwise in a run of the same seed.
  Lengths are in tokens, ages in steps.

  Args:
    plan: which questions the step worked on.
    responses: the fresh responses, by group.
    replays: the replayed trajectory of each group; None in a group of a fresh question.
    verdicts: of `responses`, in the same order.
  """
  fresh = [verdict for group in verdicts for verdict in group]
  lengths = [len(response.tokens) for group in responses for response in group]
  rewards = [
    [verdict.reward for verdict in group] + ([replayed.reward] if replayed else [])
    for group, replayed in zip(verdicts, replays)
  ]
  metrics: dict[str, float] = {
    'reward': _mean([verdict.reward for verdict in fresh]),
    'pass_rate/all': _mean([verdict.correct for verdict in fresh]),
    'reward_std': float(np.std([verdict.reward for verdict in fresh])),
    'reward_std_within': _mean([float(np.std(group)) for group in rewards]),
    'zero_variance': _mean([len(set(group)) == 1 for group in rewards]),
    'length/mean': _mean(lengths),
    'length/max': max(lengths),
    'length/total': sum(lengths),
    'length/truncated': _mean([response.truncated for group in responses for response in group]),
    'epoch': plan.epoch,
    'replay/rows': int(sum(plan.is_replay_Q)),
  }
  components = [verdict.components for verdict in fresh if verdict.components]
  for name in components[0] if components else ():
    metrics[f'rewards/{name}'] = _mean([of_response[name] for of_response in components])
  for outcome in OUTCOMES:
    share = _mean([verdict.outcome == outcome for verdict in fresh])
    metrics[f'grading/{outcome.replace(" ", "_")}'] = share
  for name, of_replay in (('fresh', False), ('replay', True)):
    correct = [
      verdict.correct
      for group, is_replay in zip(verdicts, plan.is_replay_Q)
      if is_replay == of_replay
      for verdict in group
    ]
    if correct:
      metrics[f'pass_rate/{name}'] = _mean(correct)
  ages = [plan.step - trajectory.step for trajectory in replays if trajectory]
  if ages:
    metrics |= {'replay/age_mean': _mean(ages), 'replay/age_max': max(ages)}
  return metrics


def record_metrics(rows: Rows, num_rollouts: int) -> dict[str, float]:
  """What the rows of a step's records add up to; step_records.py says what each column means.

  'groups/…' are shares of groups, in whose correctness the replayed row counts as
  `replay.count_replayed` says. All others but the last are means over responses, each with the
  same weight: fresh ones, of which those in 'entropy/incorrect' are all that are not correct, or
  replayed ones. 'valid_steps/correct' is of the fresh correct ones whose steps can be checked.
  'replay/bucket_…' counts the replayed questions by their bucket before the step. What there is
  none of is left out.
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
  return {
    'buffer/questions': len(buffer.entries),
    'buffer/retired': len(buffer.retired_epoch),
    'buffer/trajectories': sum(len(entry.trajectories) for entry in buffer.entries.values()),
    'buffer/started': buffer.started,
    **{f'buffer/bucket_{k}': int(count) for k, count in enumerate(count_K)},
  }


def training_alarm(
  step: int, metrics: Mapping[str, float], silent_steps: int, max_response: int
) -> str:
  """A warning if the step could not teach anything; '' if all is well.

  Args:
    step: the step.
    metrics: its `rollout_metrics`.
    silent_steps: how many steps in a row, this one included, had zero variance of rewards in
      every group.
    max_response: the length limit of a response, in tokens.
  """
  if metrics['length/truncated'] == 1:
    return (
      f'step {step}: every response was truncated at config.rollout.max_response='
      f'{max_response} tokens. Raise the limit, or check that the model ever emits its end token.'
    )
  if silent_steps and silent_steps % ALARM_STEPS == 0:
    return (
      f'step {step}: for {silent_steps} steps in a row the rewards within every group were equal '
      f'(pass rate {metrics["pass_rate/all"]:.3f}), so there was no learning signal. The questions '
      'are too hard or too easy for this model, or the verifier cannot read its answers: see '
      'samples/.'
    )
  return ''


def grading_alarm(step: int, verdicts: Sequence[Sequence[Verdict]], max_failures: float) -> str:
  """A warning if grading failed for more than a share `max_failures` of the responses, else ''."""
  graded = [verdict for group in verdicts for verdict in group]
  failed = [verdict for verdict in graded if verdict.outcome in FAILURES]
  if len(failed) <= max_failures * len(graded):
    return ''
  counts = ' and '.join(
    f'{sum(verdict.outcome == outcome for verdict in failed)} {outcome}' for outcome in FAILURES
  )
  return (
    f'step {step}: of {len(graded)} gradings {counts}, more than config.grading.max_failures='
    f'{max_failures:g} allows; these responses count as wrong, with reward 0. The first reason: '
    f'{failed[0].reason}.'
  )


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values))
