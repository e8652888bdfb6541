"""What a step collected as rows: those of records/ (see step_records.py), and samples to read."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.algorithm.replay import Bucketed
from exgrpo_jax.data.tasks.catalogue import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import (
  Experience,
  Plan,
  Question,
  ReplayScores,
  Response,
  Trajectory,
  Verdict,
  at_own,
)
from exgrpo_jax.grading.rewards import has_code_block
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.record_writer import Columns, Rows
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

_Row = dict[str, Any]


def recorded_groups(plan: Plan, count: int, seed: int) -> list[int]:
  """The groups of a step whose responses are recorded token by token, ascending; at most `count`.

  A question's priority depends on seed and row alone, so one that was recorded once is likely to be
  recorded at each later visit too, and its story is complete.
  """
  row_Q = np.array([question.row for question in plan.questions])
  rank_Q = randomness.ranks(seed, Purpose.RECORDED_GROUPS, row_Q)
  return sorted(np.argsort(rank_Q)[:count].tolist())


def rows(
  config: replay.Config,
  tokenizer: Tokenizer,
  experience: Experience,
  before: Bucketed,
  after: Bucketed,
  with_tokens: Collection[int],
) -> Rows:
  """The step's rows of all tables; of tokens those of the groups `with_tokens`.

  The policy as the step begins wrote the fresh responses and scored what is replayed, so entropies,
  probabilities and ratios are those of the first minibatch's loss, up to rounding. `before` is the
  buffer from which the step was planned, `after` has what the step found.
  """
  return {
    'responses': _columns('responses', _responses(tokenizer, experience)),
    'questions': _columns('questions', _questions(config, experience, before, after)),
    'tokens': _columns('tokens', _tokens(experience, with_tokens)),
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
  return {
    'is_replay': False,
    'reward': verdict.reward,
    'components': verdict.components,
    'outcome': verdict.outcome,
    'reason': _escaped(verdict.reason) if verdict.reason else None,
    'answer': None if verdict.answer is None else _escaped(verdict.answer),
    'length': response.num_own,
    'truncated': response.truncated,
    'entropy': float(np.mean(response.entropy[response.own])),
    'probability': float(np.mean(np.exp(response.logp[response.own]))),
    'has_code_block': verdict.has_code_block,
    'valid_steps': verdict.valid_steps,
  }


def _escaped(text: str) -> str:
  """Text without lone surrogates, which Arrow refuses."""
  return text.encode(errors='backslashreplace').decode()


def _replayed(
  tokenizer: Tokenizer, question: Question, replayed: Trajectory, scores: ReplayScores
) -> _Row:
  text, check_steps = tokenizer.decode(replayed.tokens), step_checker(question)
  with np.errstate(over='ignore'):  # what the past policy found absurd has an infinite ratio
    ratio = np.exp(scores.logp - replayed.logp[replayed.own])
  return {
    'is_replay': True,
    'reward': replayed.reward,
    # Whether a stored failure had an answer is not known.
    'outcome': 'correct' if replayed.correct else 'wrong',
    'length': replayed.num_own,
    'truncated': int(replayed.tokens[-1]) not in tokenizer.eos_ids,
    'entropy': float(np.mean(scores.entropy)),
    'probability': float(np.mean(np.exp(scores.logp))),
    'has_code_block': has_code_block(text),
    'valid_steps': check_steps(text) if check_steps else None,
    'candidate_entropies': scores.candidate_entropies,
    'ratio_mean': float(np.mean(ratio)),
    'ratio_max': float(np.max(ratio)),
    'ratio_variance': _variance(ratio),
    'shaped_mean': float(np.mean(scores.weight)),
    'shaped_variance': float(np.var(scores.weight)),
    'times_replayed': replayed.times_replayed + 1,
  }


def _variance(ratio: np.ndarray) -> float:
  """Infinite as soon as one ratio is, where NumPy would say NaN."""
  # float64: the square of a large float32 is infinite.
  return math.inf if np.isinf(ratio).any() else float(np.var(ratio, dtype=np.float64))


def _questions(
  config: replay.Config, experience: Experience, before: Bucketed, after: Bucketed
) -> Iterator[_Row]:
  plan = experience.plan
  visits = zip(plan.questions, experience.replays, experience.verdicts)
  for group, (question, replayed, verdicts) in enumerate(visits):
    row = question.row
    asked = '\n\n'.join(turn.content for turn in question.messages if turn.role == 'user')
    retires = row in after.buffer.retired_epoch and row not in before.buffer.retired_epoch
    yield {
      'step': plan.step,
      'question': row,
      'group': group,
      'text': _escaped(asked),
      'answer': _escaped(question.answer),
      'is_replay': replayed is not None,
      'correctness': replay.group_correctness(config, verdicts, replayed),
      'bucket_before': before.bucket_of.get(row),
      'bucket_after': after.bucket_of.get(row),
      'retired_step': plan.step if retires else None,
    }


def _tokens(experience: Experience, groups: Collection[int]) -> Iterator[_Row]:
  plan = experience.plan
  for group in groups:
    # The arrays as they are: the writer's thread turns them into lists, which may be long.
    members: list[_Row] = [
      {
        'tokens': response.tokens,
        'logp': response.logp,
        'entropy': response.entropy,
        'turns': _turns(response),
      }
      for response in experience.responses[group]
    ]
    replayed, scores = experience.replays[group], experience.scores[group]
    if replayed and scores:
      members.append(
        {
          'tokens': replayed.tokens,
          'logp': at_own(replayed, scores.logp),
          'entropy': at_own(replayed, scores.entropy),
          'past_logp': replayed.logp,
          'turns': _turns(replayed),
        }
      )
    for sample, member in enumerate(members):
      yield {
        'step': plan.step,
        'question': plan.questions[group].row,
        'group': group,
        'sample': sample,
        **member,
      }


def _turns(written: Response | Trajectory) -> list[_Row] | None:
  return [turn._asdict() for turn in written.turns] or None


# ---- Samples ----


def sample_rows(tokenizer: Tokenizer, experience: Experience, count: int, seed: int) -> list[_Row]:
  """At most `count` rows: a random response of random groups, and what each of these replays.

  Prompts and responses have their special tokens, so that a chat template can be checked. The draw
  depends on seed and step alone.
  """
  plan = experience.plan
  rows: list[_Row] = []
  rng = randomness.generator(seed, Purpose.SAMPLES, plan.step)
  for group in rng.permutation(len(plan.questions)):
    if len(rows) >= count:
      break
    question, responses = plan.questions[group], experience.responses[group]
    shared = {
      'row': question.row,
      'question': tokenizer.decode(plan.prompts[group], special=True),
      'answer': question.answer,
    }
    chosen = rng.integers(len(responses))
    verdict = experience.verdicts[group][chosen]
    rows.append(
      shared
      | _written(tokenizer, responses[chosen].tokens)
      | {
        'reward': verdict.reward,
        'correct': verdict.correct,
        'outcome': verdict.outcome,
        'replayed': False,
      }
    )
    if replayed := experience.replays[group]:
      rows.append(
        shared
        | _written(tokenizer, replayed.tokens)
        | {
          'reward': replayed.reward,
          'correct': True,  # only successes are stored
          'outcome': 'correct',
          'replayed': True,
          'written_in_step': replayed.step,
        }
      )
  return rows[:count]


def _written(tokenizer: Tokenizer, tokens: np.ndarray) -> _Row:
  """A response's text, and whether it was cut at the limit and lacks an end token."""
  return {
    'response': tokenizer.decode(tokens, special=True),
    'truncated': int(tokens[-1]) not in tokenizer.eos_ids,
  }
