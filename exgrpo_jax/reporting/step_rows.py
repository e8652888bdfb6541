"""A step's experience as rows for records/ (see step_records.py), as samples and as metrics."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.algorithm.replay import Bucketed
from exgrpo_jax.data.tasks.catalogue import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import (
  FAILURES,
  Experience,
  Plan,
  Question,
  ReplayScores,
  Response,
  Trajectory,
  Verdict,
  at_own,
  turn_places,
)
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.rewards import has_code_block
from exgrpo_jax.reporting.step_records import SCHEMAS, Rows
from exgrpo_jax.rollout import partial
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

_Row = dict[str, Any]


def recorded_groups(plan: Plan, count: int, seed: int) -> list[int]:
  """Choose at most `count` groups of a step to record token by token; return sorted indices.

  A question's priority depends only on the seed and its row. So a question that was recorded once
  is likely to be recorded at every later visit, which gives a complete history.
  """
  row_Q = np.array([question.row for question in plan.questions])
  rank_Q = randomness.ranks(seed, Purpose.RECORDED_GROUPS, row_Q)
  return sorted(np.argsort(rank_Q)[:count].tolist())


def rows(
  config: replay.ReplayConfig,
  tokenizer: Tokenizer,
  experience: Experience,
  before: Bucketed,
  after: Bucketed,
  with_tokens: Collection[int],
) -> Rows:
  """Return the step's rows for every table. Token rows are limited to groups in `with_tokens`.

  Except in partial rollouts, the policy at the start of the step generated the fresh responses and
  scored the replayed ones. So entropies, probabilities and ratios match the values in the first
  minibatch's loss, up to rounding. `before` is the buffer when the step was planned; `after` is the
  buffer after the step.
  """
  tables = {
    'responses': list(_responses(tokenizer, experience)),
    'questions': list(_questions(config, experience, before, after)),
    'tokens': list(_tokens(experience, with_tokens)),
  }
  return {
    name: {column: [row.get(column) for row in table] for column in SCHEMAS[name].names}
    for name, table in tables.items()
  }


def _responses(tokenizer: Tokenizer, experience: Experience) -> Iterator[_Row]:
  plan, batch = experience.plan, experience.batch
  groups = zip(
    plan.questions,
    experience.responses,
    experience.verdicts,
    experience.replays,
    experience.scores,
    strict=True,
  )
  for group, (question, responses, verdicts, trajectory, scores) in enumerate(groups):
    members = list(map(_fresh_row, responses, verdicts))
    if trajectory and scores:
      members.append(_replayed_row(tokenizer, question, trajectory, scores))
    samples = len(members)  # K in every group
    for sample, member in enumerate(members):
      row = group * samples + sample
      # Dropped groups have no rows in the batch.
      is_trained = group < experience.num_trained
      yield {
        'step': plan.step,
        'question': question.row,
        'group': group,
        'sample': sample,
        'advantage': float(batch.advantage_B[row]) if is_trained else 0.0,
        'policy_step': int(batch.policy_step_B[row])
        if is_trained
        else responses[sample].first_step(plan.step),
        **member,
      }


def _fresh_row(response: Response, verdict: Verdict) -> _Row:
  return {
    'is_replay': False,
    'reward': verdict.reward,
    'components': verdict.components,
    'outcome': verdict.outcome,
    'reason': _escape(verdict.reason) if verdict.reason else None,
    'answer': None if verdict.answer is None else _escape(verdict.answer),
    'length': response.num_own,
    'truncated': response.truncated,
    'entropy': float(np.mean(response.entropy[response.own])),
    'probability': response.probability,
    'has_code_block': verdict.has_code_block,
    'valid_steps': verdict.valid_steps,
  }


def _escape(text: str) -> str:
  """Escape lone surrogates, which Arrow rejects."""
  return text.encode(errors='backslashreplace').decode()


def _replayed_row(
  tokenizer: Tokenizer, question: Question, trajectory: Trajectory, scores: ReplayScores
) -> _Row:
  text, check_steps = tokenizer.decode(trajectory.tokens), step_checker(question)
  turns = [tokenizer.decode(trajectory.tokens[span]) for span, _ in turn_places(trajectory.turns)]
  with np.errstate(over='ignore'):  # a past probability near 0 gives an infinite ratio
    ratio = np.exp(scores.logp - trajectory.logp[trajectory.own])
  # NumPy's variance is NaN if a ratio is infinite. The square of a large float32 is infinite too.
  variance = math.inf if np.isinf(ratio).any() else float(np.var(ratio, dtype=np.float64))
  return {
    'is_replay': True,
    'reward': trajectory.reward,
    'outcome': _outcome(trajectory),
    'length': trajectory.num_own,
    'truncated': _is_truncated(tokenizer, trajectory),
    'entropy': float(np.mean(scores.entropy)),
    'probability': float(np.mean(np.exp(scores.logp))),
    'has_code_block': any(map(has_code_block, turns or [text])),
    'valid_steps': check_steps(text) if check_steps and not turns else None,
    'candidate_entropies': scores.candidate_entropies,
    'ratio_mean': float(np.mean(ratio)),
    'ratio_max': float(np.max(ratio)),
    'ratio_variance': variance,
    'shaped_mean': float(np.mean(scores.shaped)),
    'shaped_variance': float(np.var(scores.shaped)),
    'times_replayed': trajectory.times_replayed + 1,
  }


def _is_truncated(tokenizer: Tokenizer, trajectory: Trajectory) -> bool:
  """Return True if a stored trajectory was cut off at the limit.

  Imported trajectories and those stored by earlier versions lack the flag, but a single turn
  without an end token was always cut off. For an episode, the last token does not show this.
  """
  return trajectory.truncated or not (
    trajectory.turns or int(trajectory.tokens[-1]) in tokenizer.eos_ids
  )


def _outcome(trajectory: Trajectory) -> str:
  # The buffer does not record whether a wrong response had an answer.
  return 'correct' if trajectory.correct else 'wrong'


def _questions(
  config: replay.ReplayConfig, experience: Experience, before: Bucketed, after: Bucketed
) -> Iterator[_Row]:
  plan = experience.plan
  visits = zip(plan.questions, experience.replays, experience.verdicts)
  for group, (question, trajectory, verdicts) in enumerate(visits):
    row = question.row
    text = '\n\n'.join(turn.content for turn in question.messages if turn.role == 'user')
    retires = row in after.buffer.retired_epoch and row not in before.buffer.retired_epoch
    yield {
      'step': plan.step,
      'question': row,
      'group': group,
      'text': _escape(text),
      'answer': _escape(question.answer),
      'is_replay': trajectory is not None,
      'correctness': replay.group_correctness(config, verdicts, trajectory),
      'bucket_before': before.bucket_of.get(row),
      'bucket_after': after.bucket_of.get(row),
      'retired_step': plan.step if retires else None,
    }


def _tokens(experience: Experience, groups: Collection[int]) -> Iterator[_Row]:
  plan = experience.plan
  for group in groups:
    responses = experience.responses[group]
    members: list[tuple] = [
      (response, response.logp, response.entropy, None) for response in responses
    ]
    trajectory, scores = experience.replays[group], experience.scores[group]
    if trajectory and scores:
      current_values = (at_own(trajectory, values) for values in (scores.logp, scores.entropy))
      members.append((trajectory, *current_values, trajectory.logp))
    for sample, (response, logp, entropy, past_logp) in enumerate(members):
      yield {
        'step': plan.step,
        'question': plan.questions[group].row,
        'group': group,
        'sample': sample,
        # Arrays, not lists: converting them may be slow, so the writer's thread does it.
        'tokens': response.tokens,
        'logp': logp,
        'entropy': entropy,
        'past_logp': past_logp,
        'turns': [turn._asdict() for turn in response.turns] or None,
      }


# ---- Samples ----


def sample_rows(tokenizer: Tokenizer, experience: Experience, count: int, seed: int) -> list[_Row]:
  """Draw up to `count` rows from random groups.

  Each group contributes a fresh response and, if it has one, its replayed response. Prompts and
  responses include special tokens, so that you can check the chat template. The draw depends only
  on the seed and the step.
  """
  plan = experience.plan
  rows: list[_Row] = []
  rng = randomness.generator(seed, Purpose.SAMPLES, plan.step)
  for group in rng.permutation(len(plan.questions)):
    if len(rows) >= count:
      break
    question, responses = plan.questions[group], experience.responses[group]
    question_columns = {
      'row': question.row,
      'question': tokenizer.decode(plan.prompts[group], special=True),
      'answer': question.answer,
    }
    index, trajectory = rng.integers(len(responses)), experience.replays[group]
    response, verdict = responses[index], experience.verdicts[group][index]
    origin = {'truncated': response.truncated, 'replayed': False}
    samples = [(response, verdict, verdict.outcome, origin)]
    if trajectory:
      is_cut = _is_truncated(tokenizer, trajectory)
      origin = {'truncated': is_cut, 'replayed': True, 'written_in_step': trajectory.step}
      samples.append((trajectory, trajectory, _outcome(trajectory), origin))
    for sample, result, outcome, origin in samples:
      row = {
        'response': tokenizer.decode(sample.tokens, special=True),
        'reward': result.reward,
        'correct': result.correct,
        'outcome': outcome,
      }
      rows.append(question_columns | row | origin)
  return rows[:count]


# ---- Metrics of a step ----


OUTCOMES = (*verifier.OUTCOMES, *FAILURES)  # all possible results of grading a response
_PER_EPOCH = 'policy/', 'replay/ratio'  # prefixes of metrics that are also reported per epoch
_PER_UPDATE = ('loss', 'gradient_norm', 'learning_rate')  # means over the step's updates


def measure_step(
  experience: Experience, after: Bucketed, rows: Rows, sums: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, float]:
  """Compute all of a step's metrics except times.

  `after` is the buffer after the step, and `rows` are the step's records. `sums` are the sums that
  `loop.learn` returned for each epoch, copied to the host. With several epochs, a metric whose name
  ends in '/epoch_1', … describes only that epoch; there is none for an epoch that `max_kl` skipped.
  """
  arrays = objective.merge_epochs(sums)
  totals = _scalars(arrays)
  by_epoch = {
    f'{name}/epoch_{number}': value
    for number, epoch_sums in enumerate(sums, 1)
    for name, value in objective.loss_metrics(_scalars(epoch_sums)).items()
    if len(sums) > 1 and epoch_sums['updates'] and name.startswith(_PER_EPOCH)
  }
  Q = experience.num_trained
  num_rollouts = len(experience.batch.advantage_B) // Q
  return {
    **experience.sampling,
    **partial.metrics(experience.plan.step, experience.responses[:Q], experience.partial_groups),
    **experience.mismatch,
    **rollout_metrics(experience),
    **record_metrics(rows, num_rollouts),
    **buffer_metrics(after, num_rollouts),
    **objective.loss_metrics(totals),
    **by_epoch,
    **(objective.expert_metrics(arrays['choices_LE']) if 'choices_LE' in arrays else {}),
    **{name: totals[name] / totals['updates'] for name in _PER_UPDATE},
    'optimizer/skipped': totals['skipped'],
    **({'optimizer/skipped_by_kl': totals['skipped_by_kl']} if 'skipped_by_kl' in totals else {}),
  }


def _scalars(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
  return {name: float(value) for name, value in sums.items() if not np.ndim(value)}


def rollout_metrics(experience: Experience) -> dict[str, float]:
  """Compute rewards, pass rates and lengths of fresh responses, and ages of replayed trajectories.

  'reward_std' covers all fresh responses. 'reward_std_within' is the mean standard deviation within
  a group; it includes the replayed reward, because the advantages include it too.
  'groups/zero_advantage' is the share of groups without a learning signal: all rewards, including
  the replayed one, are equal in float32, and all advantages are 0. The last two metrics leave out
  the groups that dynamic sampling drops. 'rewards/…' are the means of the unweighted reward
  components over the responses that have them. 'grading/…' are the shares of responses with each
  outcome; they may differ between runs with the same seed, because timeouts depend on the clock.
  Lengths are in tokens, and ages are in steps.
  """
  plan, replays, verdicts = experience.plan, experience.replays, experience.verdicts
  all_verdicts = [verdict for group in verdicts for verdict in group]
  responses = [response for group in experience.responses for response in group]
  lengths = [response.num_own for response in responses]
  rewards = [
    [verdict.reward for verdict in group] + ([trajectory.reward] if trajectory else [])
    for group, trajectory in zip(verdicts[: experience.num_trained], replays)
  ]
  fresh_rewards = [verdict.reward for verdict in all_verdicts]
  advantage_QK = np.reshape(experience.batch.advantage_B, (len(rewards), -1))
  metrics: dict[str, float] = {
    'reward': _mean(fresh_rewards),
    'pass_rate/all': _mean([verdict.correct for verdict in all_verdicts]),
    'reward_std': float(np.std(fresh_rewards)),
    'reward_std_within': _mean([float(np.std(group)) for group in rewards]),
    'groups/zero_advantage': _mean(
      [
        len(set(map(np.float32, group_rewards))) == 1 and not advantage_K.any()
        for group_rewards, advantage_K in zip(rewards, advantage_QK)
      ]
    ),
    'length/mean': _mean(lengths),
    'length/max': max(lengths),
    'length/total': sum(lengths),
    'length/truncated': _mean([response.truncated for response in responses]),
    'epoch': plan.epoch,
    'replay/questions': sum(plan.is_drawn),
    'replay/rows': int(sum(plan.is_replay_Q)),
  }
  components = [verdict.components for verdict in all_verdicts if verdict.components]
  for name in components[0] if components else ():
    metrics[f'rewards/{name}'] = _mean([values[name] for values in components])
  for outcome in OUTCOMES:
    share = _mean([verdict.outcome == outcome for verdict in all_verdicts])
    metrics[f'grading/{outcome.replace(" ", "_")}'] = share
  for name, is_replay in (('fresh', False), ('replay', True)):
    groups = [group for group, is_drawn in zip(verdicts, plan.is_drawn) if is_drawn == is_replay]
    if groups:
      metrics[f'pass_rate/{name}'] = _mean(
        [verdict.correct for group in groups for verdict in group]
      )
  ages = [plan.step - trajectory.step for trajectory in replays if trajectory]
  if ages:
    metrics |= {'replay/age_mean': _mean(ages), 'replay/age_max': max(ages)}
  return metrics


def record_metrics(rows: Rows, num_rollouts: int) -> dict[str, float]:
  """Compute the metrics derived from a step's rows; step_records.py describes the columns.

  'groups/…' are shares of groups; `replay.count_replayed` determines whether the replayed row
  counts toward a group's correctness. 'replay/bucket_…' counts the replayed questions by their
  bucket before the step. Except for 'replay/times_max', all other metrics are unweighted means over
  fresh or replayed responses. For 'entropy/incorrect', these are fresh responses that are not
  correct; for 'valid_steps/correct', they are fresh, correct responses whose steps can be checked.
  Metrics without data are left out.
  """
  responses, questions = rows['responses'], rows['questions']

  def values_of(name: str, mask: Sequence[bool]) -> list[float]:
    return [
      value
      for value, is_selected in zip(responses[name], mask)
      if is_selected and value is not None
    ]

  replayed = responses['is_replay']
  fresh = [not is_replay for is_replay in replayed]
  correct = [
    is_fresh and outcome == 'correct' for is_fresh, outcome in zip(fresh, responses['outcome'])
  ]
  incorrect = [
    is_fresh and outcome != 'correct' for is_fresh, outcome in zip(fresh, responses['outcome'])
  ]
  times_replayed = values_of('times_replayed', replayed)
  values = {
    'groups/solved_by_all': [share == 1 for share in questions['correctness']],
    'groups/solved_by_none': [share == 0 for share in questions['correctness']],
    'entropy/correct': values_of('entropy', correct),
    'entropy/incorrect': values_of('entropy', incorrect),
    'length/replayed': values_of('length', replayed),
    'probability/fresh': values_of('probability', fresh),
    'probability/replayed': values_of('probability', replayed),
    'code_blocks/fresh': values_of('has_code_block', fresh),
    'code_blocks/replayed': values_of('has_code_block', replayed),
    'valid_steps/correct': values_of('valid_steps', correct),
    'replay/times_mean': times_replayed,
  }
  metrics = {name: _mean(members) for name, members in values.items() if members}
  if times_replayed:
    buckets = zip(questions['bucket_before'], questions['is_replay'])
    count_K = np.bincount(
      [bucket for bucket, is_replay in buckets if is_replay], minlength=num_rollouts
    )
    metrics['replay/times_max'] = max(times_replayed)
    metrics |= {f'replay/bucket_{k}': int(count) for k, count in enumerate(count_K)}
  return metrics


def buffer_metrics(bucketed: Bucketed, num_rollouts: int) -> dict[str, float]:
  """Return buffer metrics, including the number of questions in each of `num_rollouts` buckets."""
  buffer = bucketed.buffer
  count_K = np.bincount(list(bucketed.bucket_of.values()), minlength=num_rollouts)
  trajectories = (
    trajectory for entry in buffer.entries.values() for trajectory in entry.trajectories
  )
  route_bytes = [
    trajectory.routes.nbytes for trajectory in trajectories if trajectory.routes is not None
  ]
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
