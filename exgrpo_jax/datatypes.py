"""The values that travel between the stages of a step.

Shape letters, used in names everywhere:
  Q questions in a step, K rollouts per question, B = Q * K rows, T tokens,
  V vocabulary, D width, N query heads, G key/value heads, H head size, L layers.
"""

import abc
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import numpy as np

# The input of pure functions: NumPy on the host, jax.Array on the device or while tracing.
Array = jax.Array | np.ndarray


class Message(NamedTuple):
  """One turn of a prompt."""

  role: str  # 'system', 'user' or 'assistant'
  content: str


@dataclasses.dataclass(frozen=True)
class Question:
  """A row of a data source. Its identity is the row, not its text."""

  row: int  # in its data source, from 0
  messages: tuple[Message, ...]
  answer: str  # the ground truth, as the verifier reads it
  kind: str  # how answers are compared: one of verifier.KINDS
  solution: str  # a worked solution that ends in the answer; '' if there is none
  source: str  # e.g. 'gsm8k', 'arithmetic', 'aime24': groups rows in evaluation
  # The row of the data set by column, for rewards; JSON values. Empty for embedded tasks.
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  # The messages in the data, if an environment has made `messages` from them.
  original_messages: tuple[Message, ...] = ()


class Questions(Sequence[Question]):
  """A sequence of questions that are read on demand, numbered from 0; a slice is a list."""

  @overload
  def __getitem__(self, row: int) -> Question: ...
  @overload
  def __getitem__(self, row: slice) -> list[Question]: ...
  def __getitem__(self, row: int | slice) -> Question | list[Question]:
    if isinstance(row, slice):
      return self.read(range(len(self))[row])
    row = operator.index(row)
    if not 0 <= row < len(self):
      raise IndexError(f'there are rows 0 to {len(self) - 1}, not {row}.')
    return self.read([row])[0]

  @abc.abstractmethod
  def read(self, rows: Sequence[int]) -> list[Question]:
    """Read several questions at once, which takes little longer than one."""

  @abc.abstractmethod
  def select(self, rows: np.ndarray) -> 'Questions':
    """Select some questions and renumber them from 0; `rows` is int [rows]."""


@dataclasses.dataclass(frozen=True)
class QuestionSet:
  """The questions of one data spec, with their prompts."""

  spec: str  # e.g. 'arithmetic:test[:1000]'
  questions: Questions
  prompts: Sequence[np.ndarray]  # [T] int32 of every question


@dataclasses.dataclass(frozen=True)
class Cursor:
  """A place in the stream of questions: the next position of an epoch's permutation."""

  epoch: int = 0
  position: int = 0


class Span(NamedTuple):
  """A run of consecutive tokens of a response that one policy wrote."""

  step: int
  tokens: int


FAILURES = ('timed out', 'crashed')  # of grading, not of the response


class Verdict(NamedTuple):
  """The grade of one response."""

  reward: float  # the weighted sum of its components; 0 if grading failed
  outcome: str  # one of verifier.OUTCOMES or FAILURES
  reason: str = ''  # why grading failed, in words
  answer: str | None = None  # extracted from the response, its first worker.MAX_ANSWER characters
  has_code_block: bool = False  # see `rewards.has_code_block`
  valid_steps: bool | None = None  # whether each step is right; None if that cannot be checked
  # Value of each function in config.grading.rewards, by its name; None if grading failed.
  components: Mapping[str, float] | None = None

  @property
  def correct(self) -> bool:
    """Return True if the outcome is 'correct'.

    Only this decides storage, buckets and retirement, whatever the reward is.
    """
    return self.outcome == 'correct'


class Turn(NamedTuple):
  """A turn of an episode: the policy's tokens, and the environment's reply."""

  written: int  # tokens of the policy, with the end token if there is one
  observed: int  # tokens of the environment's messages that follow; 0 after the last turn
  reward: float


def turn_places(turns: Sequence[Turn]) -> Iterator[tuple[slice, slice]]:
  """Yield the places of each turn among the tokens: (the policy's, the environment's)."""
  begin = 0
  for turn in turns:
    written = begin + turn.written
    end = written + turn.observed
    yield slice(begin, written), slice(written, end)
    begin = end


def own_tokens(turns: Sequence[Turn], length: int) -> np.ndarray:
  """Return a mask of the tokens that the policy wrote, bool [T] with T = `length`.

  The other tokens are the environment's. Tokens after the last turn are the policy's, and so are
  all tokens if there are no turns.
  """
  own_T = np.ones(length, bool)
  for _, observed in turn_places(turns):
    own_T[observed] = False
  return own_T


@dataclasses.dataclass(frozen=True)
class TokenSequence:
  """The tokens of a policy, possibly with an environment's messages among them.

  A feature adds one keyword-only field, which is empty without the feature. A stored trajectory
  takes these fields over from its response, and files keep all of them (learner/buffer_files.py).
  """

  tokens: np.ndarray  # [T] int32, response only, with the end token if there is one
  logp: np.ndarray  # [T] float32, nats, under the distribution sampled from
  _: dataclasses.KW_ONLY
  # An episode's turns that its environment has answered.
  turns: tuple[Turn, ...] = dataclasses.field(default=(), metadata={'item': Turn})
  routes: np.ndarray | None = None  # [prompt's + T, L, C], see rollout/routes.py; None: not kept

  @property
  def features(self) -> dict[str, Any]:
    """Return the fields that features add, by name."""
    return {field.name: getattr(self, field.name) for field in FEATURES}

  @property
  def own(self) -> np.ndarray:
    """Return a mask of the tokens that the policy wrote, bool [T]."""
    return own_tokens(self.turns, len(self.tokens))

  @property
  def num_own(self) -> int:
    """Count the tokens that the policy wrote."""
    return len(self.tokens) - sum(turn.observed for turn in self.turns)


# Fields of arrays, or of tuples whose items have the type `metadata['item']`.
FEATURES = tuple(field for field in dataclasses.fields(TokenSequence) if field.kw_only)


@dataclasses.dataclass(frozen=True)
class Response(TokenSequence):
  """The response to a prompt; with partial rollouts, several policies may have written it.

  For an episode (rollout/episodes.py) it is everything after the prompt. The tokens of the
  environment's messages are context, with 0 for log-probability and entropy.
  """

  entropy: np.ndarray  # [T] float32, nats, of that distribution
  truncated: bool  # cut at the limit, so without an end token; False while not complete
  tis_weight: np.ndarray | None = None  # [T] float32, see `losses.tis_weight`; None is 1
  is_complete: bool = True  # otherwise the next step continues it
  spans: tuple[Span, ...] = ()  # the step that wrote each part; empty if one step wrote all
  verdict: Verdict | None = None  # the environment's, on a complete episode

  def first_step(self, step: int) -> int:
    """Return the step that wrote its first token; `step` if it has no spans."""
    return self.spans[0].step if self.spans else step

  def observing(self, tokens: np.ndarray) -> 'Response':
    """Append the tokens int32 [N] of an environment's reply."""
    nothing, routes = np.zeros(len(tokens), np.float32), self.routes
    if routes is not None:
      unknown = np.full((len(tokens), *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
      routes = np.concatenate([routes, unknown])
    return dataclasses.replace(
      self,
      tokens=np.concatenate([self.tokens, tokens]),
      logp=np.concatenate([self.logp, nothing]),
      entropy=np.concatenate([self.entropy, nothing]),
      routes=routes,
    )

  def tokens_before(self, step: int) -> int:
    """Count the leading tokens that steps before `step` wrote."""
    return sum(span.tokens for span in self.spans if span.step < step)


@dataclasses.dataclass(frozen=True)
class Trajectory(TokenSequence):
  """A past success, kept for replay; with `replay.store='all'` any past response."""

  reward: float
  step: int  # the step that wrote it, or its first token
  times_replayed: int = 0  # up to now
  correct: bool = True  # `Verdict.correct`


def at_own(written: TokenSequence, x_N: np.ndarray) -> np.ndarray:
  """Scatter values of the policy's own tokens to their places among all; the others get 0."""
  x_T = np.zeros(len(written.tokens), x_N.dtype)
  x_T[written.own] = x_N
  return x_T


@dataclasses.dataclass(frozen=True)
class ReplayScores:
  """The policy's scores of a replayed trajectory's T own tokens, without an environment's."""

  logp: np.ndarray  # [T] float32, nats
  entropy: np.ndarray  # [T] float32, nats
  weight: np.ndarray  # [T] float32, factor of its advantage: `objective.replay_weights`
  log_ratio: np.ndarray  # [T] float32, nats: logp minus logp of the policy that wrote the tokens
  # Mean token entropies of all candidates, oldest first; None if they were not compared.
  candidate_entropies: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class PartialGroup:
  """A group that one step leaves to the next: not complete, or not yet trained."""

  question_row: int
  drawn: int  # the step whose plan first had it
  is_drawn: bool  # from the buffer
  responses: tuple[Response, ...]  # K, or K - 1 with replay; without a token if not begun
  verdicts: tuple[Verdict, ...]  # for the complete responses, in the same order


@dataclasses.dataclass(frozen=True)
class Plan:
  """The questions of a step; groups stand in the order of the batch."""

  step: int
  cursor: Cursor  # place in the stream after this step's fresh questions
  replay_started: bool  # the delayed start's switch, at the time of planning
  questions: tuple[Question, ...]  # Q of them; with partial rollouts, all in flight
  prompts: tuple[np.ndarray, ...]  # Q arrays [T] int32
  # Q; empty for a fresh question, and for all without `replay.include_trajectory`
  candidates: tuple[tuple[Trajectory, ...], ...]
  is_drawn: tuple[bool, ...]  # Q; whether it comes from the buffer, not from the stream
  left: tuple[PartialGroup, ...] = ()  # the first groups, as the previous step left them

  @property
  def epoch(self) -> int:
    """Return the stream's epoch after this step's fresh questions."""
    return self.cursor.epoch

  @property
  def is_replay_Q(self) -> np.ndarray:
    """Return a mask of the questions with a stored success in their group, bool [Q]."""
    return np.array([bool(c) for c in self.candidates])


class GradedGroups(NamedTuple):
  """The groups that a step trains, with fresh responses and their verdicts."""

  plan: Plan  # for these groups
  responses: Sequence[Sequence[Response]]  # by group: K, or K - 1 with a stored success
  verdicts: Sequence[Sequence[Verdict]]  # for the responses, in the same order
  left: tuple[PartialGroup, ...] = ()  # the other groups in flight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """All inputs of the loss. Rows are [prompt, response, padding]."""

  tokens_BT: Array  # int32
  response_mask_BT: Array  # float32, 1 where the policy wrote the token
  # float32, nats, aligned with tokens_BT, 0 outside the mask. Under the policy that wrote the
  # token; replayed rows without objective.importance_correction: under the step's initial policy.
  behaviour_logp_BT: Array
  advantage_B: Array  # float32
  is_replay_B: Array  # bool
  policy_step_B: Array  # int32, the step whose policy wrote the row, or its first token
  # float32, weight of a token's term: `losses.tis_weight` for a fresh token, 0 for a replayed token
  # that `objective.m2po_threshold` leaves out, else 1
  term_weight_BT: Array
  # bool, True where an earlier step wrote the token of a fresh row; None if responses never span
  # steps.
  is_carried_BT: Array | None = None
  # The experts of each token in each layer, if rows keep them (rollout/routes.py).
  routes_BTLC: Array | None = None


@dataclasses.dataclass(frozen=True)
class Experience:
  """The data of one step: groups stand in the plan's order, rows of the batch group by group."""

  plan: Plan
  responses: Sequence[Sequence[Response]]  # as in GradedGroups, like the verdicts
  verdicts: Sequence[Sequence[Verdict]]
  left: tuple[PartialGroup, ...]  # for the next step
  replays: Sequence[Trajectory | None]  # by group: its stored success; None if all are fresh
  scores: Sequence[ReplayScores | None]  # for `replays`
  batch: Batch
  sampling: Mapping[str, float]  # how generation went, as metrics
  mismatch: Mapping[str, float]  # sampler against trainer, as metrics; empty if not compared
