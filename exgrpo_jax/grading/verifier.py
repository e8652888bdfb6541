"""Whether a response ends in the right answer.

Text of a model is parsed but never evaluated as code, and everything is bounded: the length of
an answer, the depth of its tree, the digits of its numbers.
"""

import dataclasses

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.answers import equality, extraction

KINDS = ('math', 'choice', 'text')
OUTCOMES = ('correct', 'wrong', 'no answer')


@dataclasses.dataclass(frozen=True)
class Config:
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


ANYTHING = Config(require_think=False, require_box=False)


def is_correct(response: str, answer: str, config: Config = ANYTHING, kind: str = 'math') -> bool:
  """Whether the response's answer equals the ground truth; arguments as for `judge`."""
  return judge(response, answer, config, kind) == 'correct'


def judge(response: str, answer: str, config: Config = ANYTHING, kind: str = 'math') -> str:
  """Compares a response's answer with the ground truth, in bounded time.

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
  return compare(extract(response, config), answer, kind)


def compare(given: str | None, answer: str, kind: str = 'math') -> str:
  """What `judge` says of a response from which `given` was extracted."""
  if kind not in KINDS:
    raise InputError(
      f'kind={kind!r} must be one of {", ".join(KINDS)}: it decides how answers are compared.'
    )
  if given is None:
    return 'no answer'
  return 'correct' if equality.equal(given, answer, kind) else 'wrong'


def extract(response: str, config: Config) -> str | None:
  """The answer that a response gives, as written, or None; see extraction.py."""
  return extraction.extract(response, config.require_think, config.require_box)
