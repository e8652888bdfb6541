"""Data types that the stages of a step pass to each other.

Shape letters, used in names throughout the code:
  Q questions in a step, K rollouts per question, B = Q * K rows, T tokens,
  V vocabulary, D width, N query heads, G key/value heads, H head size, L layers.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import numpy as np

# Inputs of pure functions: NumPy on the host, jax.Array on a device or while tracing.
Array = jax.Array | np.ndarray


class Message(NamedTuple):
  """One turn of a prompt."""

  role: str  # 'system', 'user' or 'assistant'
  content: str


@dataclasses.dataclass(frozen=True)
class Question:
  """A row of a data source, identified by its row number, not its text."""

  row: int  # row number in its data source, from 0
  messages: tuple[Message, ...]
  answer: str  # the ground truth, as the verifier reads it
  kind: str  # how answers are compared: one of verifier.KINDS
  solution: str  # a worked solution that ends in the answer; '' if missing
  source: str  # e.g. 'gsm8k', 'arithmetic' or 'aime24'; evaluation groups rows by it
  # The row's columns in the data set, as JSON values for reward functions; empty for embedded tasks
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  # The data set's messages, if an environment derived `messages` from them.
  original_messages: tuple[Message, ...] = ()


class Questions(Sequence[Question]):
  """A sequence of questions, numbered from 0 and read on demand; slicing returns a list."""

  @overload
  def __getitem__(self, row: int) -> Question: ...
  @overload
  def __getitem__(self, row: slice) -> list[Question]: ...
  def __getitem__(self, row: int | slice) -> Question | list[Question]:
    if isinstance(row, slice):
      return self.read(range(len(self))[row])
    row = operator.index(row)
    if not 0 <= row < len(self):
      raise IndexError(f'row {row} is not between 0 and {len(self) - 1}.')
    return self.read([row])[0]

  @abc.abstractmethod
  def read(self, rows: Sequence[int]) -> list[Question]:
    """Read several questions at once, which takes barely longer than reading one."""

  @abc.abstractmethod
  def select(self, rows: np.ndarray) -> 'Questions':
    """Select questions by row and renumber them from 0; `rows` is an int array."""


@dataclasses.dataclass(frozen=True)
class QuestionSet:
  """The questions of one data spec, with their prompts."""

  spec: str  # e.g. 'arithmetic:test[:1000]'
  questions: Questions
  prompts: Sequence[np.ndarray]  # one array per question, [T] int32


@dataclasses.dataclass(frozen=True)
class Cursor:
  """A position in the question stream: the next entry of an epoch's permutation."""

  epoch: int = 0
  position: int = 0


class Span(NamedTuple):
  """Consecutive tokens of a response that one step's policy wrote."""

  step: int
  tokens: int  # number of tokens


FAILURES = ('timed out', 'crashed')  # grading failures, which do not count against the response


class Verdict(NamedTuple):
  """The grade of one response."""

  reward: float  # the weighted sum of the components; 0 if grading failed
  outcome: str  # one of verifier.OUTCOMES or FAILURES
  reason: str = ''  # an error message if grading failed
  answer: str | None = None  # extracted from the response, cut at worker.MAX_ANSWER characters
  has_code_block: bool = False  # see `rewards.has_code_block`
  valid_steps: bool | None = None  # True if every step is right; None if steps cannot be checked
  # The value of each function in config.grading.rewards, by name; None if grading failed.
  components: Mapping[str, float] | None = None

  @property
  def correct(self) -> bool:
    """Return True if the outcome is 'correct'.

    Storage, buckets and retirement depend only on correctness, never on the reward.
    """
    return self.outcome == 'correct'


class Turn(NamedTuple):
  """A turn of an episode: the policy's tokens and the environment's reply."""

  written: int  # number of tokens that the policy wrote, including any end token
  observed: int  # number of tokens in the environment's reply; 0 after the last turn
  reward: float


def turn_places(turns: Sequence[Turn]) -> Iterator[tuple[slice, slice]]:
  """Yield each turn's slices of the token array: (policy's tokens, environment's tokens)."""
  begin = 0
  for turn in turns:
    written = begin + turn.written
    end = written + turn.observed
    yield slice(begin, written), slice(written, end)
    begin = end


def own_tokens(turns: Sequence[Turn], length: int) -> np.ndarray:
  """Return a mask of the tokens that the policy wrote, bool [T] with T = `length`.

  Tokens after the last turn count as the policy's, as do all tokens if `turns` is empty.
  """
  own_T = np.ones(length, bool)
  for _, observed in turn_places(turns):
    own_T[observed] = False
  return own_T


@dataclasses.dataclass(frozen=True)
class TokenSequence:
  """Tokens that a policy wrote, possibly interleaved with an environment's messages.

  Each optional feature adds one keyword-only field, which is empty if the feature is off. Stored
  trajectories copy these fields from their response, and files store all of them
  (learner/buffer_files.py).
  """

  tokens: np.ndarray  # [T] int32, response only, including any end token
  logp: np.ndarray  # [T] float32, nats, under the distribution that the tokens were sampled from
  _: dataclasses.KW_ONLY
  # The episode turns that the environment has replied to.
  turns: tuple[Turn, ...] = dataclasses.field(default=(), metadata={'item': Turn})
  routes: np.ndarray | None = None  # [prompt + T, L, C], see rollout/routes.py; None if not stored

  @property
  def features(self) -> dict[str, Any]:
    """Return the feature fields by name."""
    return {field.name: getattr(self, field.name) for field in FEATURES}

  @property
  def own(self) -> np.ndarray:
    """Return a mask of the tokens that the policy wrote, bool [T]."""
    return own_tokens(self.turns, len(self.tokens))

  @property
  def num_own(self) -> int:
    """Count the tokens that the policy wrote."""
    return len(self.tokens) - sum(turn.observed for turn in self.turns)

  @functools.cached_property
  def probability(self) -> float:
    """Return the mean probability of the tokens that the policy wrote."""
    return float(np.mean(np.exp(self.logp[self.own])))


# Each field is an array, or a tuple of items of type `metadata['item']`.
FEATURES = tuple(field for field in dataclasses.fields(TokenSequence) if field.kw_only)


@dataclasses.dataclass(frozen=True)
class Response(TokenSequence):
  """A response to a prompt; with partial rollouts, possibly written by several policies.

  In an episode (rollout/episodes.py), the response is everything after the prompt. Tokens of the
  environment's messages are context; their log-probability and entropy are 0.
  """

  entropy: np.ndarray  # [T] float32, nats, of the distributions that the tokens were sampled from
  truncated: bool  # True if cut off at the limit, without an end token; False while incomplete
  tis_weight: np.ndarray | None = None  # [T] float32, see `losses.tis_weight`; None means all 1
  is_complete: bool = True  # if False, the next step continues the response
  spans: tuple[Span, ...] = ()  # the part that each step wrote; empty if a single step wrote it
  verdict: Verdict | None = None  # the environment's verdict on a complete episode

  def first_step(self, step: int) -> int:
    """Return the step that wrote the first token; `step` if the response has no spans."""
    return self.spans[0].step if self.spans else step

  def observing(self, tokens: np.ndarray) -> 'Response':
    """Append an environment's reply; `tokens` is int32 [N]."""
    nothing = np.zeros(len(tokens), np.float32)
    added = {'tokens': tokens, 'logp': nothing, 'entropy': nothing}
    if self.routes is not None:
      shape, dtype = (len(tokens), *self.routes.shape[1:]), self.routes.dtype
      added['routes'] = np.full(shape, np.iinfo(dtype).max, dtype)  # unknown
    values = {name: np.concatenate([getattr(self, name), x]) for name, x in added.items()}
    return dataclasses.replace(self, **values)

  def tokens_before(self, step: int) -> int:
    """Count the leading tokens written by steps before `step`."""
    return sum(span.tokens for span in self.spans if span.step < step)


@dataclasses.dataclass(frozen=True)
class Trajectory(TokenSequence):
  """A past success, stored for replay; with `replay.store='all'`, any past response."""

  reward: float
  step: int  # the step that wrote the first token
  times_replayed: int = 0  # so far
  correct: bool = True  # `Verdict.correct`


def at_own(written: TokenSequence, x_N: np.ndarray) -> np.ndarray:
  """Scatter values of the policy's own tokens to their positions in `written`, with 0 elsewhere."""
  x_T = np.zeros(len(written.tokens), x_N.dtype)
  x_T[written.own] = x_N
  return x_T


@dataclasses.dataclass(frozen=True)
class ReplayScores:
  """Scores under the current policy for a replayed trajectory; T excludes environment tokens."""

  logp: np.ndarray  # [T] float32, nats
  entropy: np.ndarray  # [T] float32, nats
  weight: np.ndarray  # [T] float32, factor on the advantage; see `objective.replay_weights`
  log_ratio: np.ndarray  # [T] float32, nats: logp minus logp of the policy that wrote the tokens
  # Mean token entropies of all candidates, oldest first; None if no entropies were compared.
  candidate_entropies: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class PartialGroup:
  """A group carried over to the next step because it is incomplete or not yet trained on."""

  question_row: int
  drawn: int  # the step that first planned the group
  is_drawn: bool  # True if the question was drawn from the buffer
  responses: tuple[Response, ...]  # K, or K - 1 with replay; an empty response has not been started
  verdicts: tuple[Verdict, ...]  # for the complete responses, in the same order


@dataclasses.dataclass(frozen=True)
class Plan:
  """The questions of a step, in batch order."""

  step: int
  cursor: Cursor  # position in the question stream after this step's fresh questions
  replay_started: bool  # True if replay had started when the step was planned
  questions: tuple[Question, ...]  # Q questions; with partial rollouts, all questions in flight
  prompts: tuple[np.ndarray, ...]  # Q arrays [T] int32
  # Stored successes of each of the Q questions. Empty for fresh questions, and for all questions if
  # `replay.include_trajectory` is off.
  candidates: tuple[tuple[Trajectory, ...], ...]
  is_drawn: tuple[bool, ...]  # for each of the Q questions, True if it comes from the buffer
  # The first groups, left over from the previous step or, with dynamic sampling, from the step's
  # previous round.
  partial_groups: tuple[PartialGroup, ...] = ()
  # `Buffer.retired_epoch`; dynamic sampling needs it to draw more questions during the step.
  retired_epoch: Mapping[int, int] = dataclasses.field(default_factory=dict)
  # `Buffer.history` of the plan's questions.
  history: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)

  @property
  def epoch(self) -> int:
    """Return the question stream's epoch once this step's fresh questions are drawn."""
    return self.cursor.epoch

  @property
  def is_replay_Q(self) -> np.ndarray:
    """Return a mask of the questions whose group contains a stored success, bool [Q]."""
    return np.array([bool(c) for c in self.candidates])


class GradedGroups(NamedTuple):
  """A step's groups, with their fresh responses and verdicts.

  The step does not train on the last `num_dropped` groups; see rollout/dynamic.py.
  """

  plan: Plan  # the plan for these groups
  responses: Sequence[Sequence[Response]]  # by group: K, or K - 1 with a stored success
  verdicts: Sequence[Sequence[Verdict]]  # for the complete responses, in the same order
  partial_groups: tuple[PartialGroup, ...] = ()  # the other groups in flight
  num_dropped: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A step's training rows: [prompt, response, padding], with everything the loss needs."""

  tokens_BT: Array  # int32
  # float32, 1 where the policy wrote the token; all 0 in a row that `replay.difficulty` leaves out.
  response_mask_BT: Array
  # float32, nats, aligned with tokens_BT, 0 where the policy did not write the token. The
  # log-probability under the policy that wrote the token or, for replayed rows without
  # objective.importance_correction, under the step's initial policy.
  old_logp_BT: Array
  advantage_B: Array  # float32
  is_replay_B: Array  # bool
  policy_step_B: Array  # int32, the step whose policy wrote the row's first token
  # float32, weight of the token's term: `losses.tis_weight` for fresh tokens, 0 for replayed tokens
  # that `objective.m2po_threshold` drops, otherwise 1.
  term_weight_BT: Array
  # bool, True for tokens of fresh rows that an earlier step wrote; None if responses never span
  # steps.
  is_carried_BT: Array | None = None
  # The experts of each token in each layer, if rows store them (rollout/routes.py).
  routes_BTLC: Array | None = None


@dataclasses.dataclass(frozen=True)
class Experience:
  """The data of one step: groups in the plan's order, and batch rows group by group.

  The batch excludes the last `num_dropped` groups, which dynamic sampling dropped.
  """

  plan: Plan
  responses: Sequence[Sequence[Response]]  # see GradedGroups
  verdicts: Sequence[Sequence[Verdict]]  # see GradedGroups
  partial_groups: tuple[PartialGroup, ...]  # left for the next step
  replays: Sequence[Trajectory | None]  # each group's stored success; None if all rows are fresh
  scores: Sequence[ReplayScores | None]  # for `replays`
  batch: Batch
  sampling: Mapping[str, float]  # generation metrics
  mismatch: Mapping[str, float]  # metrics of the sampler-trainer mismatch; empty if not measured
  num_dropped: int = 0

  @property
  def num_trained(self) -> int:
    """Count the groups that the step trains on."""
    return len(self.plan.questions) - self.num_dropped
