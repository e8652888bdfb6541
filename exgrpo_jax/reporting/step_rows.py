"""The rows of a step's records, from what it collected; step_records.py says what they mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.algorithm.replay import Bucketed
from exgrpo_jax.data.questions import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Experience, Question, ReplayScores, Response, Trajectory, Verdict
from exgrpo_jax.grading.code_blocks import has_code_block
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.record_writer import Columns, Rows

_Row = Mapping[str, Any]


def rows(
  config: replay.Config,
  tokenizer: Tokenizer,
  experience: Experience,
  before: Bucketed,
  after: Bucketed,
) -> Rows:
  """The step's rows of both tables.

  The policy as the step begins wrote the fresh responses and scored what is replayed, so entropies,
  probabilities and ratios are those of the first minibatch's loss, up to rounding.

  Args:
    config: of the replay buffer.
    tokenizer: that of the run.
    experience: what the step collected.
    before: the buffer from which the step was planned.
    after: the buffer after the step.
  """
  return {
    'responses': _columns('responses', _responses(tokenizer, experience)),
    'questions': _columns('questions', _questions(config, experience, before, after)),
  }


def _columns(name: str, table: Iterator[_Row]) -> Columns:
  whole = list(table)
  return {column: [row.get(column) for row in whole] for column in step_records.SCHEMAS[name].names}


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
  for group, (question, responses, verdicts, replayed, scores) in enumerate(groups):
    members = list(map(_fresh, responses, verdicts))
    if replayed and scores:
      members.append(_replayed(tokenizer, question, replayed, scores))
    samples = len(members)  # K in every group
    for sample, member in enumerate(members):
      row = group * samples + sample
      yield {
        'step': plan.step,
        'question': question.row,
        'group': group,
        'sample': sample,
        'advantage': float(batch.advantage_B[row]),
        'policy_step': int(batch.policy_step_B[row]),
        **member,
      }


def _fresh(response: Response, verdict: Verdict) -> _Row:
  answer = verdict.answer
  return {
    'is_replay': False,
    'reward': verdict.reward,
    'outcome': verdict.outcome,
    # Arrow takes no lone surrogates.
    'answer': answer and answer.encode(errors='backslashreplace').decode(),
    'length': len(response.tokens),
    'truncated': response.truncated,
    'entropy': float(np.mean(response.entropy)),
    'probability': float(np.mean(np.exp(response.logp))),
    'has_code_block': verdict.has_code_block,
    'valid_steps': verdict.valid_steps,
  }


def _replayed(
  tokenizer: Tokenizer, question: Question, replayed: Trajectory, scores: ReplayScores
) -> _Row:
  text, check_steps = tokenizer.decode(replayed.tokens), step_checker(question)
  with np.errstate(over='ignore'):  # what the past policy found absurd has an infinite ratio
    ratio = np.exp(scores.logp - replayed.logp)
  return {
    'is_replay': True,
    'reward': replayed.reward,
    'outcome': 'correct',  # only successes are stored
    'length': len(replayed.tokens),
    'truncated': int(replayed.tokens[-1]) not in tokenizer.eos_ids,
    'entropy': float(np.mean(scores.entropy)),
    'probability': float(np.mean(np.exp(scores.logp))),
    'has_code_block': has_code_block(text),
    'valid_steps': check_steps(text) if check_steps else None,
    'candidate_entropies': scores.candidate_entropies,
    'ratio_mean': float(np.mean(ratio)),
    'ratio_max': float(np.max(ratio)),
    'shaped_mean': float(np.mean(scores.weight)),
    'shaped_variance': float(np.var(scores.weight)),
    'times_replayed': replayed.times_replayed + 1,
  }


def _questions(
  config: replay.Config, experience: Experience, before: Bucketed, after: Bucketed
) -> Iterator[_Row]:
  plan = experience.plan
  visits = zip(plan.questions, plan.is_replay_Q.tolist(), experience.verdicts)
  for group, (question, is_replay, verdicts) in enumerate(visits):
    row = question.row
    retires = row in after.buffer.retired_epoch and row not in before.buffer.retired_epoch
    yield {
      'step': plan.step,
      'question': row,
      'group': group,
      'is_replay': is_replay,
      'correctness': replay.group_correctness(config, verdicts, is_replay),
      'bucket_before': before.bucket_of.get(row),
      'bucket_after': after.bucket_of.get(row),
      'retired_step': plan.step if retires else None,
    }
