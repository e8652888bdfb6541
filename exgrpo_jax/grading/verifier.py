"""Whether a response ends in the right answer: the protocol of verifiers, and ours.

Ours parses a model's text but never evaluates it as code, and everything is bounded: the length of
an answer, the depth of its tree, the digits of its numbers.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.grading.answers import equality, extraction
from exgrpo_jax.workers import user_code

KINDS = ('math', 'choice', 'text', reasoning_gym.KIND)
OUTCOMES = ('correct', 'wrong', 'no answer')
NAMES = ('built_in', 'math_verify')  # of the verifiers that a config need not spell out


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
  """What a response must have before its answer is compared."""

  require_think: bool = setting(
    False, None, "a response without '</think>' has no answer; the training reward asks for it"
  )
  require_box: bool = setting(
    False,
    None,
    r"only \boxed{...} is an answer; if off, what follows '####' or 'the answer is', and the "
    'last number, count too',
  )


ANYTHING = VerifierConfig(require_think=False, require_box=False)


class Question(Protocol):
  """What a verifier knows of a question; `datatypes.Question` is one."""

  @property
  def answer(self) -> str:
    """The ground truth."""
    ...

  @property
  def kind(self) -> str:
    """How answers are compared, one of KINDS."""
    ...

  @property
  def columns(self) -> Mapping[str, Any]:
    """Columns of its row; a worker process has only reasoning_gym.COLUMN, where there is one."""
    ...


class Truth(NamedTuple):
  """A Question that is nothing else."""

  answer: str
  kind: str = 'math'
  columns: Mapping[str, Any] = {}


class Judgement(NamedTuple):
  """What a verifier says of a response."""

  outcome: str  # one of OUTCOMES
  given: str | None  # the answer that the response gives, as written, for the records


class Verifier(Protocol):
  """Judges responses; `config.grading.verifier` names one (`load`).

  It is made without arguments, once in each worker process, whose limits on time and memory hold
  for every call.
  """

  def judge(self, response: str, question: Question) -> Judgement:
    """Compares a response, without its thought, with the question's answer."""
    ...


class BuiltIn:
  """Our verifier."""

  def judge(self, response: str, question: Question) -> Judgement:
    """See extraction.py for what the answer is, and equality.py for when it is right."""
    if question.kind == reasoning_gym.KIND:
      return Judgement(*reasoning_gym.judge(response, question.columns))
    given = extraction.extract(response)
    return Judgement(compare(given, question.answer, question.kind), given)


def load(spec: str) -> Verifier:
  """Return one of NAMES, or 'package.module:Class'; raises InputError if it cannot be used."""
  if spec == 'built_in':
    return BuiltIn()
  with user_code.refusing('grading.verifier', spec):
    if spec == 'math_verify':
      if importlib.util.find_spec('math_verify') is None:
        raise InputError(
          "config.grading.verifier='math_verify' needs the package math-verify: "
          "pip install 'exgrpo_jax[math-verify]'."
        )
      spec = 'exgrpo_jax.grading.math_verify:MathVerify'
    return user_code.load(spec, 'Class')()


def judge_with(
  verifier: Verifier, response: str, question: Question, config: VerifierConfig = ANYTHING
) -> Judgement:
  """What a verifier says of a response, or 'no answer' where it lacks what `config` requires."""
  solution = extraction.solution(response, config.require_think, config.require_box)
  return Judgement('no answer', None) if solution is None else verifier.judge(solution, question)


def judge(response: str, answer: str, config: VerifierConfig = ANYTHING, kind: str = 'math') -> str:
  """Compares a response's answer with the ground truth by our verifier, in bounded time.

  Args:
    response: any text.
    answer: the ground truth.
    config: what the response must have.
    kind: how answers are compared.

  Returns:
    One of OUTCOMES.

  Raises:
    InputError: `kind` is not one of KINDS. No response raises.
  """
  return judge_with(BuiltIn(), response, Truth(answer, kind), config).outcome


def is_correct(
  response: str, answer: str, config: VerifierConfig = ANYTHING, kind: str = 'math'
) -> bool:
  """Whether `judge` finds the response correct."""
  return judge(response, answer, config, kind) == 'correct'


def compare(given: str | None, answer: str, kind: str = 'math') -> str:
  """What our verifier says of an answer as extracted; arguments and errors as for `judge`."""
  if kind not in KINDS:
    raise InputError(
      f'kind={kind!r} must be one of {", ".join(KINDS)}: it decides how answers are compared.'
    )
  if given is None:
    return 'no answer'
  return 'correct' if equality.equal(given, answer, kind) else 'wrong'
