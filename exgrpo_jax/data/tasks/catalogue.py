"""Registry of the built-in tasks, with their step checkers and style classifiers.

Built-in tasks need no download. You don't need to register your own task here: a data spec can
name a Python file (see row_files.py).
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from exgrpo_jax.data.records import Record
from exgrpo_jax.data.tasks import chains, games, sums
from exgrpo_jax.datatypes import Question

# Task name in a data spec -> function that generates the records of every split.
TASKS: Mapping[str, Callable[[], Mapping[str, Sequence[Record]]]] = {
  'arithmetic': sums.arithmetic_rows,
  'chains': chains.chain_rows,
  'guess': games.guess_rows,
  'calculator': sums.calculator_rows,
  'lake': games.lake_rows,
}
# Tasks that need the environment of the same name or a user-defined one.
IN_TURNS = ('guess', 'lake')
# Question source -> function (question, response) that returns True if every step is right.
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  **dict.fromkeys(('arithmetic', 'arithmetic_ood'), sums.valid_steps),
  **dict.fromkeys(('chains', 'chains_ood'), chains.valid_steps),
}
# Question source -> function (question, response) that returns the style, judged by form alone.
STYLES: Mapping[str, Callable[[str, str], str]] = dict.fromkeys(
  ('chains', 'chains_ood'), chains.style
)


def step_checker(question: Question) -> Callable[[str], bool] | None:
  """Return a function that checks a response's steps, or None if the task has no step checker."""
  check = STEP_CHECKERS.get(question.source)
  return functools.partial(check, question.messages[-1].content) if check else None


def style_reader(question: Question) -> Callable[[str], str] | None:
  """Return a function that classifies a response's style, or None if the task has no styles."""
  style = STYLES.get(question.source)
  return functools.partial(style, question.messages[-1].content) if style else None
