"""Math-Verify, the verifier that the paper's authors use in training.

The package passes the model's text to sympy, which evaluates the text. The package's time limits
rely on signals, so they are turned off; the worker process's limits apply instead.
"""

import logging

import math_verify

from exgrpo_jax.grading.answers.equality import strip_delimiters
from exgrpo_jax.grading.answers.extraction import accepted_answers
from exgrpo_jax.grading.verifier import BuiltIn, Judgement, Question

logging.getLogger('math_verify').setLevel(logging.ERROR)  # silence a warning about the limits


class MathVerify:
  """The authors' verifier for math answers; `BuiltIn` judges all other kinds."""

  def judge(self, response: str, question: Question) -> Judgement:
    """Parse both answers with the default settings and compare them with math_verify.verify."""
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
    # Report the parsed text, because a sympy expression may be slow to print.
    text = next((part for part in given if isinstance(part, str)), None)
    return Judgement('correct' if is_right else 'wrong', text)
