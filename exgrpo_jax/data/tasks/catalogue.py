"""The embedded tasks, which need no download, and their checks of a response's steps and style.

Your own task needs no entry here: a data spec may name a Python file, see row_files.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from exgrpo_jax.data.records import Record
from exgrpo_jax.data.tasks import chains, games, sums
from exgrpo_jax.datatypes import Question

# Name in a data spec -> a function that makes the records of every split.
TASKS: Mapping[str, Callable[[], Mapping[str, Sequence[Record]]]] = {
  'arithmetic': sums.arithmetic_rows,
  'chains': chains.chain_rows,
  'guess': games.guess_rows,
  'calculator': sums.calculator_rows,
  'lake': games.lake_rows,
}
# Tasks that need the environment of their name, or one of the user's.
IN_TURNS = ('guess', 'lake')
# A question's source -> a function of question and response; True if each step is right.
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  'arithmetic': sums.valid_steps,
  'arithmetic_ood': sums.valid_steps,
  'chains': chains.valid_steps,
  'chains_ood': chains.valid_steps,
}
# A question's source -> a function of question and response; the style, from the form only.
STYLES: Mapping[str, Callable[[str, str], str]] = {
  'chains': chains.style,
  'chains_ood': chains.style,
}


def step_checker(question: Question) -> Callable[[str], bool] | None:
  """Return the check of a response's steps for this question; None if its task has no check."""
  check = STEP_CHECKERS.get(question.source)
  return functools.partial(check, question.messages[-1].content) if check else None


def style_reader(question: Question) -> Callable[[str], str] | None:
  """Return a function from a response's text to its style; None if its task has no styles."""
  style = STYLES.get(question.source)
  return functools.partial(style, question.messages[-1].content) if style else None
