"""What a step looked like, as named numbers, and when to raise an alarm about it."""

from collections.abc import Mapping, Sequence

import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import FAILURES, Plan, Response, Trajectory, Verdict
from exgrpo_jax.grading import verifier

OUTCOMES = (*verifier.OUTCOMES, *FAILURES)  # of a response that is graded
ALARM_STEPS = 10  # steps without any signal after which it is said, and again after as many


def rollout_metrics(
  plan: Plan,
  responses: Sequence[Sequence[Response]],
  replays: Sequence[Trajectory | None],
  verdicts: Sequence[Sequence[Verdict]],
) -> dict[str, float]:
  """Rewards, pass rates and lengths of the fresh responses, ages of the replayed ones.

  'zero_variance' is the share of groups whose rewards, the replayed one included,
  are all equal and so teach nothing; 'grading/…' are the shares of each outcome.
  """
  fresh = [verdict for group in verdicts for verdict in group]
  lengths = [len(response.tokens) for group in responses for response in group]
  rewards = [
    [v.reward for v in group] + ([old.reward] if old else [])
    for group, old in zip(verdicts, replays)
  ]
  found = {
    'reward': np.mean([verdict.reward for verdict in fresh]),
    'pass_rate/all': np.mean([verdict.correct for verdict in fresh]),
    'zero_variance': np.mean([len(set(group)) == 1 for group in rewards]),
    'length/mean': np.mean(lengths),
    'length/max': max(lengths),
    'length/total': sum(lengths),
    'length/truncated': np.mean([r.truncated for group in responses for r in group]),
    'epoch': plan.epoch,
    'replay/rows': sum(plan.is_replay_Q),
  }
  for outcome in OUTCOMES:
    found[f'grading/{outcome.replace(" ", "_")}'] = np.mean([v.outcome == outcome for v in fresh])
  for name, wanted in (('fresh', False), ('replay', True)):
    correct = [
      v.correct
      for group, is_replay in zip(verdicts, plan.is_replay_Q)
      if is_replay == wanted
      for v in group
    ]
    if correct:
      found[f'pass_rate/{name}'] = np.mean(correct)
  ages = [plan.step - trajectory.step for trajectory in replays if trajectory]
  if ages:
    found |= {'replay/age_mean': np.mean(ages), 'replay/age_max': max(ages)}
  return found


def buffer_metrics(
  config: replay.Config, buffer: replay.Buffer, num_rollouts: int
) -> dict[str, float]:
  """Sizes of the buffer and how many questions each bucket holds."""
  count_K = np.bincount(
    list(replay.buckets(config, buffer, num_rollouts).values()), minlength=num_rollouts
  )
  return {
    'buffer/questions': len(buffer.entries),
    'buffer/retired': len(buffer.retired_epoch),
    'buffer/trajectories': sum(len(e.trajectories) for e in buffer.entries.values()),
    'buffer/started': buffer.started,
    **{f'buffer/bucket_{k}': count for k, count in enumerate(count_K)},
  }


def training_alarm(
  step: int, found: Mapping[str, float], silent_steps: int, max_response: int
) -> str:
  """What must be said loudly about a step; '' where all is well.

  `silent_steps`: how many steps in a row, this one included, had no group with a
  difference in reward.
  """
  if found['length/truncated'] == 1:
    return (
      f'step {step}: every response was cut off at config.rollout.max_response='
      f'{max_response} tokens. Raise it, or check that the model ever writes its end token.'
    )
  if silent_steps and silent_steps % ALARM_STEPS == 0:
    return (
      f'step {step}: for {silent_steps} steps every group had equal rewards (pass rate '
      f'{found["pass_rate/all"]:.3f}), so nothing was learnt. The questions are too hard or '
      'too easy for this model, or the verifier does not read its answers: see samples/.'
    )
  return ''


def grading_alarm(step: int, verdicts: Sequence[Sequence[Verdict]], max_failures: float) -> str:
  """What must be said loudly about a step's grading; '' where at most that share of it failed."""
  fresh = [verdict for group in verdicts for verdict in group]
  failed = [verdict for verdict in fresh if verdict.outcome in FAILURES]
  if len(failed) <= max_failures * len(fresh):
    return ''
  counts = ' and '.join(
    f'{sum(v.outcome == outcome for v in failed)} {outcome}' for outcome in FAILURES
  )
  return (
    f'step {step}: of {len(fresh)} gradings {counts}, over config.grading.max_failures='
    f'{max_failures:g}; they count as wrong, with reward 0. One of them: {failed[0].reason}.'
  )
