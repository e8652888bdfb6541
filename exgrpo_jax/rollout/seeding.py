"""Seeding a new run's replay buffer with traces from another model or run.

docs/data.md lists the columns of a trace file (jsonl or parquet).

Seeded responses must be like stored trajectories: correct according to the run's verifier, encoded
with its tokenizer, within its limits, and with log-probabilities.
"""

import collections
import dataclasses
import functools
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.config import setting
from exgrpo_jax.data import records, row_files
from exgrpo_jax.data.prompt import last_user_message
from exgrpo_jax.data.tokenizer import Tokenizer, response_tokens, up_to_end
from exgrpo_jax.datatypes import QuestionSet, Trajectory, Verdict
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import pool
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import scoring, stages
from exgrpo_jax.rollout.stages import RolloutSetup
from exgrpo_jax.runtime import hosts

UNKNOWN_CORRECTNESS = 0.5  # the middle bucket, until the policy has tried the question itself

_QUESTION, _RESPONSE = ('question', 'prompt'), ('response', 'target')  # reads the first one present
_TOKENS, _LOGP, _CORRECTNESS = 'tokens', 'logp', 'correctness'
_COLUMNS = (*_QUESTION, *_RESPONSE, _TOKENS, _LOGP, _CORRECTNESS)
_NEEDED = (_QUESTION, (*_RESPONSE, _TOKENS))  # at least one column from each tuple


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
  """Settings for filling a new run's replay buffer with responses from another model or run."""

  path: str = setting(
    '',
    None,
    "a .jsonl or .parquet file of responses, or another run's workdir to load its buffer; '' "
    'starts with an empty buffer',
  )
  missing_logprobs: str = setting(
    'current',
    ('current', 'zero'),
    'log-probabilities for responses that lack them: current computes them under the initial '
    'policy, so importance ratios start at 1; zero sets them to 0, so each ratio is the '
    "token's probability, as in LUFFY",
  )

  @property
  def is_file(self) -> bool:
    """Return True if `path` names a file rather than a workdir."""
    return self.path.endswith(row_files.LINES_OR_PARQUET)


@dataclasses.dataclass(frozen=True)
class Trace:
  """A response to a question, from a file or another run."""

  place: str  # file and line, for error messages
  question: str  # see `last_user_message`
  response: str | None  # None if there are only tokens
  tokens: np.ndarray | None  # [T], any integer dtype; None if the response must be tokenized
  logp: np.ndarray | None  # [T] float32, nats; None if unknown
  correctness: float | None  # of the question, in (0, 1]; None if unknown
  row: int | None = None  # the question's row if a run stored it; tells equal questions apart


# ---- Reading ----


def check_columns(path: str) -> None:
  """Raise InputError if the file is missing or empty, or if it lacks a required column.

  Reads only a few rows.
  """
  if next(_rows(path), None) is None:
    raise InputError(f'{path}: the file contains no traces. Add at least one trace.')


def read(path: str) -> Iterator[Trace]:
  """Yield the traces in a jsonl or parquet file; raise InputError if a trace is unusable."""
  for place, values in _rows(path):
    tokens = _numbers(values.get(_TOKENS), _TOKENS, place)
    if tokens is not None and not np.issubdtype(tokens.dtype, np.integer):
      raise InputError(f'{place}: {_TOKENS} contains non-integer values. Use integer token ids.')
    logp = _numbers(values.get(_LOGP), _LOGP, place)
    lowest = np.finfo(np.float32).min
    if logp is not None and not np.all(is_valid := (logp <= 0) & (logp >= lowest)):  # nor NaN
      raise InputError(
        f'{place}: {_LOGP} contains {logp[~is_valid][0]}. Log-probabilities must be finite, in '
        'nats, and at most 0.'
      )
    correctness = values.get(_CORRECTNESS)
    is_number = isinstance(correctness, (int, float)) and not isinstance(correctness, bool)
    if correctness is not None and not (is_number and 0 < correctness < 1):
      raise InputError(
        f'{place}: {_CORRECTNESS}={reprlib.repr(correctness)}: the value must be in (0, 1). Use '
        'the fraction of correct attempts at the question. Questions that are never or always '
        'solved are not replayed.'
      )
    yield Trace(
      place=place,
      question=_text(values, _QUESTION, 'user', place),
      response=_text(values, _RESPONSE, 'assistant', place) if tokens is None else None,
      tokens=tokens,
      logp=None if logp is None else logp.astype(np.float32),
      correctness=correctness,
    )


def _rows(path: str) -> row_files.Rows:
  if not epath.Path(path).expanduser().is_file():
    raise InputError(
      f'config.experience.path={path}: there is no such file. Pass a .jsonl or .parquet file of '
      'responses, or the workdir of another run.'
    )
  file, unread_columns = row_files.opened(path, keep_spelling=False), []
  if path.endswith('.parquet'):  # every row has the same columns
    _check_names(path, file.columns())
    unread_columns = set(file.columns()) - {*_COLUMNS}
  for place, values in file.rows(unread_columns):
    _check_names(place, list(values))
    yield place, values


def _check_names(place: str, names: Sequence[str]) -> None:
  for choices in _NEEDED:
    if not set(choices) & set(names):
      raise InputError(
        f'{place}: no field {" or ".join(map(repr, choices))} '
        f'(has: {", ".join(map(repr, names))}). A trace needs a question and a response. '
        'Add the missing field.'
      )


# ---- One row of a file ----


def _text(values: Mapping[str, Any], names: Sequence[str], role: str, place: str) -> str:
  """Return the text of the first available column.

  If the column contains a chat, return the text of the last message from `role`.
  """
  name = next((name for name in names if values.get(name) is not None), names[0])
  value = content = values.get(name)
  if isinstance(value, list):
    contents = [
      turn.get('content') for turn in value if isinstance(turn, dict) and turn.get('role') == role
    ]
    content = contents[-1] if contents else None
    content = records.content_text(content, place) if isinstance(content, list) else content
  if not isinstance(content, str) or not content.strip():
    raise InputError(
      f'{place}: {name}={reprlib.repr(value)}: no text found. Use a string, or chat '
      f"messages in which the last '{role}' message contains text."
    )
  text = records.storable(content, name, place)
  return text.strip() if role == 'user' else text


def _numbers(value: Any, name: str, place: str) -> np.ndarray | None:
  if value is None:
    return None
  try:
    array = np.array(value if isinstance(value, list) else None)
  except ValueError:  # nested lists of different lengths
    array = np.array(None)
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iuf':
    raise InputError(
      f'{place}: {name}={reprlib.repr(value)}: this is not a list of numbers. Use one number per '
      'token.'
    )
  return array


# ---- From traces to successes ----


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A trace matched to a training question."""

  row: int  # the question's row
  tokens: np.ndarray  # [T] int32
  logp: np.ndarray | None  # [T] float32, nats; None if unknown
  correctness: float | None  # of the question; None if unknown
  reward: float = 0.0  # set by grading


_COUNTS = 'traces', 'without a matching question', 'too long', 'repeated'


def candidates(
  source: str,
  traces: Iterable[Trace],
  data: QuestionSet,
  tokenizer: Tokenizer,
  limit: int,
  overlong: str,
) -> tuple[list[Candidate], dict[str, int]]:
  """Match traces to training questions by question text, and tokenize the traces.

  Duplicate questions get the same traces. Duplicate candidates are dropped. `source` is for error
  messages, `limit` is the maximum response length in tokens, and `overlong` is the setting
  `config.data.on_overlong`. Returns the candidates in trace order, and the number of traces by
  outcome. Raises InputError if a trace cannot be used or if none matches a training question.
  """
  rows_of: dict[str, list[int]] = collections.defaultdict(list)
  for question in data.questions:
    rows_of[last_user_message(question.messages)].append(question.row)
  counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
  matches: dict[tuple[int, bytes], Candidate] = {}
  for trace in traces:
    counts['traces'] += 1
    rows = rows_of.get(trace.question, [])
    counts['without a matching question'] += not rows
    for row in [trace.row] if trace.row in rows else rows:
      tokens = _tokens(trace, data.prompts[row], tokenizer)
      if len(tokens) > limit and overlong == 'refuse':
        raise InputError(
          f'{trace.place}: the response has {len(tokens)} tokens, more than '
          f'config.rollout.max_response={limit}. '
          "Raise the limit, or set config.data.on_overlong='drop'."
        )
      if len(tokens) > limit:
        counts['too long'] += 1
      elif (key := (row, tokens.tobytes())) in matches:
        counts['repeated'] += 1
      else:
        logp = None if trace.logp is None else trace.logp[: len(tokens)]
        matches[key] = Candidate(row, tokens, logp, trace.correctness)
  if counts['without a matching question'] == counts['traces']:
    raise InputError(
      f'{source}: the experience contains {counted(counts["traces"], "trace")}, but none of them '
      f'matches a question in {data.spec}. Questions are matched by the text of their last user '
      'message. Make sure this text is the same in both.'
    )
  if not matches:
    raise InputError(
      f'{source}: every trace that matches a question in {data.spec} has more than '
      f'config.rollout.max_response={limit} tokens. Raise the limit.'
    )
  hosts.check_same(source, 'the traces', lambda: b''.join(map(_content, matches.values())))
  return list(matches.values()), counts


def _content(candidate: Candidate) -> bytes:
  arrays = b''.join(x_T.tobytes() for x_T in (candidate.tokens, candidate.logp) if x_T is not None)
  return repr((candidate.row, candidate.correctness)).encode() + arrays


def _tokens(trace: Trace, prompt: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Return the trace's tokens, or its tokenized text, up to the first end token: int32 [T]."""
  if trace.tokens is not None:
    min_id, max_id = trace.tokens.min(), trace.tokens.max()
    if min_id < 0 or max_id >= tokenizer.vocab_size:
      raise InputError(
        f"{trace.place}: tokens contains ids from {min_id} to {max_id}, but the run's tokenizer "
        f"has ids from 0 to {tokenizer.vocab_size - 1}. Use tokens from the run's tokenizer."
      )
    tokens = trace.tokens.astype(np.int32)
  else:
    (tokens,) = response_tokens(tokenizer, [prompt], [trace.response or ''])
  if trace.logp is not None and len(trace.logp) != len(tokens):
    raise InputError(
      f'{trace.place}: logp has {len(trace.logp)} numbers, but the response has {len(tokens)} '
      "tokens, including the end token. Add a 'tokens' field with these tokens, or leave out logp."
    )
  return up_to_end(tokens, tokenizer)


def successes(
  source: str,
  candidates: Sequence[Candidate],
  data: QuestionSet,
  tokenizer: Tokenizer,
  limit: int,
  grader: pool.Grader,
) -> list[Candidate]:
  """Grade the candidates with the run's verifier and return the correct ones, with rewards.

  All hosts must call this. `limit` is the maximum response length, in tokens. Raises InputError if
  no candidate is correct.
  """
  questions = data.questions.read([candidate.row for candidate in candidates])
  verdicts: list[Verdict] = grader.grade(
    [tokenizer.decode(candidate.tokens) for candidate in candidates],
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
      for question, candidate in zip(questions, candidates)
    ],
  )
  pool.refuse_all_failed(source, verdicts)
  correct_candidates = [
    dataclasses.replace(candidate, reward=verdict.reward)
    for candidate, verdict in zip(candidates, verdicts)
    if verdict.correct
  ]
  if not correct_candidates:
    outcomes = collections.Counter(verdict.outcome for verdict in verdicts)
    raise InputError(
      f'{source}: the experience contains {counted(len(candidates), "response")} to questions in '
      f'{data.spec}, but none of them is correct ('
      + ', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())
      + '). Only correct responses are replayed. Make sure that the responses have the format that '
      'config.verifier expects.'
    )
  return correct_candidates


def seeded(
  rollout: RolloutSetup, params: Params, successes: Sequence[Candidate], missing_logprobs: str
) -> Buffer:
  """Return a buffer with the newest `max_trajectories` successes of each question.

  `successes` are sorted from oldest to newest. Missing log-probabilities are computed under
  `params`, the initial policy's parameters, unless `missing_logprobs` is 'zero'; see
  `ExperienceConfig`.
  """
  groups: dict[int, list[Candidate]] = collections.defaultdict(list)
  correctness: dict[int, float] = {}
  for candidate in successes:
    groups[candidate.row].append(candidate)
    if candidate.correctness is not None:
      correctness[candidate.row] = candidate.correctness
  kept = [c for group in groups.values() for c in group[-rollout.replay_config.max_trajectories :]]
  without_logp = [c for c in kept if c.logp is None]
  if missing_logprobs == 'zero':
    logps = (np.zeros(len(c.tokens), np.float32) for c in without_logp)
  else:
    rows = [(rollout.data.prompts[c.row], c.tokens) for c in without_logp]
    logps = iter(scoring.score(rollout.score_spec, params, rows)[0])
  stored: dict[int, list[Trajectory]] = collections.defaultdict(list)
  for c in kept:
    logp = next(logps) if c.logp is None else c.logp
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
