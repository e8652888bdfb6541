"""The `Verifier` protocol and our own verifier. A verifier decides whether a response is correct.

Our verifier parses a model's text but never evaluates the text as code. The length of answers, the
depth of trees and the number of digits are bounded.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError, check_argument
from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.grading.answers import equality, extraction
from exgrpo_jax.workers import user_code

KINDS = ('math', 'choice', 'text', reasoning_gym.KIND)
OUTCOMES = ('correct', 'wrong', 'no answer')
REQUIREMENTS = ((), ('think',), ('box',), ('think', 'box'))
NAMES = ('built_in', 'math_verify')  # verifiers that a config can name without a module


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
  """Requirements that a response must meet before its answer is compared."""

  require: tuple[str, ...] = setting(
    (),
    REQUIREMENTS,
    "the parts that a response must contain for its answer to count in training: '</think>' "
    "(think), \\boxed{...} (box); unless box is required, the text after '####' or 'the answer "
    "is' is accepted too, and so is the last number",
  )


ANYTHING = VerifierConfig()


class Question(Protocol):
  """The interface through which verifiers read a question; `datatypes.Question` implements it."""

  @property
  def answer(self) -> str:
    """Return the ground truth."""
    ...

  @property
  def kind(self) -> str:
    """Return how answers are compared: one of KINDS."""
    ...

  @property
  def columns(self) -> Mapping[str, Any]:
    """Return the row's columns; a worker has only those that programs.requested_facts selects."""
    ...


class Truth(NamedTuple):
  """A minimal Question: the ground truth and how to compare it."""

  answer: str
  kind: str = 'math'
  columns: Mapping[str, Any] = {}


class Judgement(NamedTuple):
  """A verifier's result for one response."""

  outcome: str  # one of OUTCOMES
  answer: str | None  # the response's answer as written; stored in records


class Verifier(Protocol):
  """The interface of verifiers; `config.grading.verifier` names the class to use (see `load`).

  Each worker process creates one instance, without arguments. The process's time and memory limits
  apply to every call.
  """

  def judge(self, response: str, question: Question) -> Judgement:
    """Compare a response, whose reasoning has been removed, with the question's answer."""
    ...


class BuiltIn:
  """Our own verifier."""

  def judge(self, response: str, question: Question) -> Judgement:
    """Extract the answer and compare it with the truth; reasoning_gym judges its own tasks."""
    if question.kind == reasoning_gym.KIND:
      return Judgement(*reasoning_gym.judge(response, question.columns))
    answer = extraction.extract(response)
    return Judgement(compare(answer, question.answer, question.kind), answer)


class MathVerify:
  """Math-Verify, which the paper's authors use; `BuiltIn` judges every kind except 'math'.

  The package passes the model's text to sympy, which evaluates it. The package's time limits
  rely on signals, so they are turned off; the worker process's limits apply instead.
  """

  def __init__(self) -> None:
    if importlib.util.find_spec('math_verify') is None:
      raise InputError(
        "config.grading.verifier='math_verify': the math-verify package is not installed. Run "
        "pip install 'exgrpo_jax[math-verify]'."
      )
    logging.getLogger('math_verify').setLevel(logging.ERROR)  # silence a warning about the limits
    self._package = importlib.import_module('math_verify')

  def judge(self, response: str, question: Question) -> Judgement:
    """Parse both answers with the default settings and compare them with math_verify.verify."""
    if question.kind != 'math':
      return BuiltIn().judge(response, question)
    parse, verify = self._package.parse, self._package.verify
    expressions = parse(response, parsing_timeout=0)
    if not expressions:
      return Judgement('no answer', None)
    truths = extraction.accepted_answers(question.answer)
    is_right = any(
      verify(
        parse(f'${equality.strip_delimiters(truth)}$', parsing_timeout=0),
        expressions,
        timeout_seconds=0,
      )
      for truth in truths
    )
    # Report the parsed text, because a sympy expression may be slow to print.
    text = next((part for part in expressions if isinstance(part, str)), None)
    return Judgement('correct' if is_right else 'wrong', text)


def load(spec: str) -> Verifier:
  """Load one of NAMES or 'package.module:Class'; raises InputError if that fails."""
  classes = dict(zip(NAMES, (BuiltIn, MathVerify), strict=True))
  with user_code.refusing('grading.verifier', spec):
    return classes[spec]() if spec in classes else user_code.load(spec, 'Class')()


def judge_with(
  verifier: Verifier, response: str, question: Question, config: VerifierConfig = ANYTHING
) -> Judgement:
  """Judge a response; the outcome is 'no answer' if it does not meet `config`'s requirements."""
  solution = extraction.solution(response, config.require)
  return Judgement('no answer', None) if solution is None else verifier.judge(solution, question)


def judge(response: str, answer: str, config: VerifierConfig = ANYTHING, kind: str = 'math') -> str:
  """Judge a response with our own verifier, in bounded time; return one of OUTCOMES.

  Raises InputError if an argument has the wrong type, or if `kind` is not one of KINDS or is
  'reasoning_gym', which needs a data row. The texts themselves, however malformed, never raise an
  error.
  """
  form = "a string. Decode a Response's tokens with policy.experiment.tokenizer.decode"
  check_argument('response', response, str, form)
  form = """a string. Write a number as '5', and several accepted answers as '["4", "four"]'"""
  check_argument('answer', answer, str, form)
  check_argument('config', config, VerifierConfig, "a VerifierConfig, such as the run's `verifier`")
  return judge_with(BuiltIn(), response, Truth(answer, kind), config).outcome


def is_correct(
  response: str, answer: str, config: VerifierConfig = ANYTHING, kind: str = 'math'
) -> bool:
  """Return True if `judge` finds the response correct."""
  return judge(response, answer, config, kind) == 'correct'


def compare(answer: str | None, truth: str, kind: str = 'math') -> str:
  """Compare an extracted answer with the ground truth; results and errors are as in `judge`."""
  if kind not in KINDS:
    raise InputError(
      f'kind={kind!r} must be one of {", ".join(KINDS)}. The kind decides how answers are compared.'
    )
  if answer is None:
    return 'no answer'
  return 'correct' if equality.equal(answer, truth, kind) else 'wrong'
