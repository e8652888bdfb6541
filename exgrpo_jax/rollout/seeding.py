"""Traces from elsewhere, made into successes that the replay buffer of a new run begins with.

They have to be what replay's own trajectories are: successes by the run's verifier, in the run's
tokens, within its limits, and with log-probabilities.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.data import traces
from exgrpo_jax.data.prompt import THINK
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.data.traces import Trace
from exgrpo_jax.datatypes import QuestionSet, Trajectory, Verdict
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import pool
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import stages
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import hosts

UNKNOWN_CORRECTNESS = 0.5  # the middle bucket, until the policy has tried the question itself


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A trace as a response to one of the training questions."""

  row: int  # of the question
  tokens: np.ndarray  # [T] int32
  logp: np.ndarray | None  # [T] float32, nats; None where unknown
  correctness: float | None  # of the question; None where unknown
  reward: float = 0.0  # once graded


def candidates(
  source: str,
  found: Iterable[Trace],
  data: QuestionSet,
  tokenizer: Tokenizer,
  limit: int,
  overlong: str,
) -> tuple[list[Candidate], dict[str, int]]:
  """Traces matched to the training questions by what they ask, and tokenised.

  Copies of a question get the same traces. No two candidates are equal.

  Args:
    source: where the traces come from, for error messages.
    found: the traces.
    data: the training questions.
    tokenizer: of the run.
    limit: the longest response, in tokens.
    overlong: what to do with longer ones, see questions.Config.

  Returns the candidates in the order of the traces, and how many traces there were of each fate.
  Raises InputError where a trace cannot be used, or none asks a training question.
  """
  rows_of: dict[str, list[int]] = collections.defaultdict(list)
  for question in data.questions:
    rows_of[traces.asked(question.messages)].append(question.row)
  counts: dict[str, int] = dict.fromkeys(
    ('traces', 'ask no training question', 'too long', 'repeated'), 0
  )
  kept: dict[tuple[int, bytes], Candidate] = {}
  for trace in found:
    counts['traces'] += 1
    rows = rows_of.get(trace.question, [])
    counts['ask no training question'] += not rows
    for row in [trace.row] if trace.row in rows else rows:
      tokens = _tokens(trace, data.prompts[row], tokenizer)
      if len(tokens) > limit and overlong == 'refuse':
        raise InputError(
          f'{trace.place}: the response has {len(tokens)} tokens, over '
          f"config.rollout.max_response={limit}; raise it, or set config.data.overlong='drop'."
        )
      if len(tokens) > limit:
        counts['too long'] += 1
      elif (key := (row, tokens.tobytes())) in kept:
        counts['repeated'] += 1
      else:
        kept[key] = Candidate(row, tokens, trace.logp, trace.correctness)
  if counts['ask no training question'] == counts['traces']:
    raise InputError(
      f'{source}: {counted(counts["traces"], "trace")}, and none asks a question of {data.spec}; '
      'questions are found by the text of their last user message, which must be the same.'
    )
  if not kept:
    raise InputError(
      f'{source}: every trace that asks a question of {data.spec} has more than '
      f'config.rollout.max_response={limit} tokens; raise it.'
    )
  hosts.check_same(source, 'the traces', lambda: b''.join(key[1] for key in kept))
  return list(kept.values()), counts


def _tokens(trace: Trace, prompt: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """[T] int32: the trace's own tokens, else its text's and an end token; checks them and `logp`."""
  if trace.tokens is not None:
    least, most = trace.tokens.min(), trace.tokens.max()
    if least < 0 or most >= tokenizer.vocab_size:
      raise InputError(
        f"{trace.place}: tokens has {least} to {most}, and the run's tokenizer has the ids 0 to "
        f'{tokenizer.vocab_size - 1}; they must be of the same tokenizer.'
      )
    tokens = trace.tokens.astype(np.int32)
  else:
    text = trace.response or ''
    if text.startswith(THINK) and tokenizer.decode(prompt, special=True).endswith(THINK):
      text = text.removeprefix(THINK)  # the prompt has begun it
    ids = tokenizer.encode(text)
    ends = bool(ids) and ids[-1] in tokenizer.eos_ids
    tokens = np.array(ids if ends else [*ids, tokenizer.eos_ids[0]], np.int32)
  if trace.logp is not None and len(trace.logp) != len(tokens):
    raise InputError(
      f'{trace.place}: logp has {len(trace.logp)} numbers, and the response has {len(tokens)} '
      'tokens, the end token included; there must be one for each. Give the tokens beside them, or '
      'leave logp out.'
    )
  return tokens


def successes(
  source: str,
  proposed: Sequence[Candidate],
  data: QuestionSet,
  tokenizer: Tokenizer,
  limit: int,
  grader: pool.Grader,
) -> list[Candidate]:
  """The candidates that the run's verifier finds right, with their rewards; all hosts call it.

  `limit` is the longest response, in tokens. Raises InputError where none is right.
  """
  questions = data.questions.read([candidate.row for candidate in proposed])
  verdicts: list[Verdict] = grader.grade(
    [tokenizer.decode(candidate.tokens) for candidate in proposed],
    [question.answer for question in questions],
    [question.kind for question in questions],
    [
      functools.partial(
        stages.response_facts,
        question,
        candidate.tokens,
        int(candidate.tokens[-1]) not in tokenizer.eos_ids,
        limit,
      )
      for question, candidate in zip(questions, proposed)
    ],
  )
  pool.refuse_all_failed(source, verdicts)
  right = [
    dataclasses.replace(candidate, reward=verdict.reward)
    for candidate, verdict in zip(proposed, verdicts)
    if verdict.correct
  ]
  if not right:
    outcomes = collections.Counter(verdict.outcome for verdict in verdicts)
    raise InputError(
      f'{source}: {counted(len(proposed), "response")} to questions of {data.spec}, none is right ('
      + ', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())
      + '), and only successes are replayed; config.verifier says what a response must have.'
    )
  return right


def seeded(
  rollout: Rollout, params: Params, right: Sequence[Candidate], missing_logprobs: str
) -> Buffer:
  """The buffer of these successes, the newest `max_trajectories` of each question.

  Args:
    rollout: of the run.
    params: its policy at the start, for log-probabilities that are missing.
    right: successes, the newest last.
    missing_logprobs: see traces.Config.
  """
  groups: dict[int, list[Candidate]] = collections.defaultdict(list)
  correctness: dict[int, float] = {}
  for candidate in right:
    groups[candidate.row].append(candidate)
    if candidate.correctness is not None:
      correctness[candidate.row] = candidate.correctness
  kept = [c for group in groups.values() for c in group[-rollout.replay.max_trajectories :]]
  unknown = [c for c in kept if c.logp is None]
  if missing_logprobs == 'zero':
    made = [np.zeros(len(c.tokens), np.float32) for c in unknown]
  else:
    made, _ = rollout.score(params, [(rollout.data.prompts[c.row], c.tokens) for c in unknown])
  next_made = iter(made)
  stored: dict[int, list[Trajectory]] = collections.defaultdict(list)
  for c in kept:
    logp = next(next_made) if c.logp is None else c.logp
    stored[c.row].append(Trajectory(tokens=c.tokens, logp=logp, reward=c.reward, step=0))
  entries = {
    row: Entry(
      correctness=correctness.get(row, UNKNOWN_CORRECTNESS),
      prompt_length=len(rollout.data.prompts[row]),
      trajectories=tuple(trajectories),
    )
    for row, trajectories in stored.items()
  }
  return Buffer(entries=entries)
