"""Math-Verify as a verifier: what the paper's authors train by.

It hands what a model wrote to sympy, which evaluates it. Its own time limits are off, for they need
signals: those of the worker process that it runs in hold instead.
"""

import logging

import math_verify

from exgrpo_jax.grading.answers.equality import strip_delimiters
from exgrpo_jax.grading.answers.extraction import accepted_answers
from exgrpo_jax.grading.verifier import BuiltIn, Judgement, Question

logging.getLogger('math_verify').setLevel(logging.ERROR)  # it warns of limits that are off


class MathVerify:
  """Compares mathematical answers as the authors do, and other kinds as our verifier does."""

  def judge(self, response: str, question: Question) -> Judgement:
    """What `math_verify.verify` says of both sides, each parsed with its defaults."""
    if question.kind != 'math':
      return BuiltIn().judge(response, question)
    given = math_verify.parse(response, parsing_timeout=0)
    if not given:
      return Judgement('no answer', None)
    truths = [f'${strip_delimiters(truth)}$' for truth in accepted_answers(question.answer)]
    is_right = any(
      math_verify.verify(math_verify.parse(truth, parsing_timeout=0), given, timeout_seconds=0)
      for truth in truths
    )
    # Beside an expression of sympy, which may take long to write out, stands the text parsed.
    text = next((part for part in given if isinstance(part, str)), None)
    return Judgement('correct' if is_right else 'wrong', text)
