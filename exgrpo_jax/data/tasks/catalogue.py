"""The embedded tasks, which need no download, and what they tell of a response beside its answer.

A task of one's own needs no entry here: a data spec may name a Python file, see row_files.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from exgrpo_jax.data.records import Record
from exgrpo_jax.data.tasks import chains, games, sums
from exgrpo_jax.datatypes import Question

# By the name in a data spec: a function that makes the records of every split.
TASKS: Mapping[str, Callable[[], Mapping[str, Sequence[Record]]]] = {
  'arithmetic': sums.arithmetic_rows,
  'chains': chains.chain_rows,
  'guess': games.guess_rows,
  'calculator': sums.calculator_rows,
  'lake': games.lake_rows,
}
# Tasks that only make sense in the environment of their name, or in one of the user's.
IN_TURNS = ('guess', 'lake')
# By a question's source: whether each step of a response to a question is right.
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  'arithmetic': sums.valid_steps,
  'arithmetic_ood': sums.valid_steps,
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
  """The style of a response to it, by its text; None where its task knows no styles."""
  style = STYLES.get(question.source)
  return functools.partial(style, question.messages[-1].content) if style else None
