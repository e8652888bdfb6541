"""Which embedded tasks there are, and what each can tell of a response beside its answer."""

import functools
from collections.abc import Callable, Mapping

from exgrpo_jax.data.tasks import arithmetic, chains
from exgrpo_jax.data.tasks.embedded import RecordBuilder
from exgrpo_jax.datatypes import Question

# By the name in a data spec.
TASKS: Mapping[str, type[RecordBuilder]] = {
  'arithmetic': arithmetic.ArithmeticBuilder,
  'chains': chains.ChainsBuilder,
}
# By a question's source: whether each step of a response to a question is right.
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  'arithmetic': arithmetic.valid_steps,
  'arithmetic_ood': arithmetic.valid_steps,
  'chains': chains.valid_steps,
  'chains_ood': chains.valid_steps,
}
# By a question's source: the style of a response to a question, by its form alone.
STYLES: Mapping[str, Callable[[str, str], str]] = {
  'chains': chains.style,
  'chains_ood': chains.style,
}


def step_checker(question: Question) -> Callable[[str], bool] | None:
  """Whether each step of a response to it is right, by its text; None if that cannot be checked."""
  check = STEP_CHECKERS.get(question.source)
  return functools.partial(check, question.messages[-1].content) if check else None


def style_reader(question: Question) -> Callable[[str], str] | None:
  """In which style a response to it is, by its text; None where its task knows no styles."""
  style = STYLES.get(question.source)
  return functools.partial(style, question.messages[-1].content) if style else None
