r"""Judging of reasoning_gym's tasks by their own score_answer: an answer with score 1 is right.

It gets the answer as written, from a box or from prose. If neither '####' nor 'the answer is' marks
it, the last number counts if the entry's answer is a number, and otherwise the last line. Most
tasks compare letter by letter, so two more spellings are tried: without decoration such as
`\text{}`, `**`, `$` and quotes; and as the entry spells it, if both are the same number. A formula
is not a number, and a text that ends in one has no last number: `32 - 67 =` may be the question.

A worker imports the package when the pool sends it the first response that needs it, before the
response's own time begins.
"""

import contextlib
import functools
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.answers import equality, extraction
from exgrpo_jax.grading.answers.tokens import normalize_spelling

KIND = 'reasoning_gym'  # of questions; one of verifier.KINDS
# The column with a question's entry: question, answer and metadata as generated, the `task`, and
# the values of its `config` that are not the default.
COLUMN = 'entry'

# No leading zeros: '0101' may be a text.
_NUMBER = re.compile(r'-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?')
# 'x = 5', '+5.0', '5 legs'
_NAMED_NUMBER = re.compile(r'(?:[A-Za-z]* ?= ?)?[+-]?[0-9]+(?:\.[0-9]+)?(?: [A-Za-z ]+)?')
_WRAPPER = re.compile(r'\\(?:text|math)[a-z]{0,6}\{([^{}]*)\}')
_QUOTED = re.compile(r'(["\'`])([^"\'`]*)\1')
_EVALUATES = re.compile(r'\b(?:eval|exec|parse_expr|sympify)\(\s*answer\b')


def judge(response: str, columns: Mapping[str, Any]) -> tuple[str, str | None]:
  """Return the outcome and answer of a response without its thought, as in a Judgement.

  Raises InputError if the columns have no entry that can be scored.
  """
  if COLUMN not in columns:
    raise InputError(
      f"kind='{KIND}': the question has no column '{COLUMN}', which its score_answer needs. Use a "
      'data spec such as reasoning_gym:chain_sum:train, which makes both.'
    )
  given = extract(response, columns[COLUMN])
  if given is None:
    return 'no answer', None
  return 'correct' if score(given, columns[COLUMN]) >= 1 else 'wrong', given


def extract(response: str, entry: Mapping[str, Any]) -> str | None:
  """Return the response's answer to an entry's question, as written, or None."""
  if _NUMBER.fullmatch(entry['answer'] or ''):
    return extraction.extract_number(response)
  return extraction.extract_text(response)


def score(given: str, entry: Mapping[str, Any]) -> float:
  """Return the best score_answer of any spelling of an answer: 1 if right, else partial credit.

  Raises InputError if the task is unknown or evaluates a model's text.
  """
  task = _kept(entry['task'], json.dumps(entry['config']))
  best = 0.0
  for spelling in _spellings(given, entry['answer'] or ''):
    try:
      best = max(best, float(task.score_answer(spelling, _restored(entry))))
    except MemoryError:
      raise
    except Exception:  # many raise on an answer that is not of their form
      continue
    if best >= 1:
      break
  return best


def load() -> None:
  """Import the package, which takes seconds; do nothing if it is not installed."""
  with contextlib.suppress(ImportError):  # reported by the response that needs it
    importlib.import_module('reasoning_gym.factory')


def dataset(name: str, config: Mapping[str, Any]) -> Any:
  """Return a task's dataset with these arguments; raises InputError as `score`, and its errors."""
  tasks = importlib.import_module('reasoning_gym.factory').DATASETS
  if name not in tasks:
    raise InputError(f"the installed reasoning_gym has no task '{name}'.")
  generator, settings = tasks[name]
  # Text from a model is never evaluated; a test looks for ways that this pattern does not match.
  if found := _EVALUATES.search(inspect.getsource(generator.score_answer)):
    raise InputError(
      'this task is refused because its score_answer evaluates what a model wrote, by '
      f'{found[0]}). Choose another task.'
    )
  return generator(settings(**{'seed': 0, **config}))


@functools.cache
def _kept(name: str, config: str) -> Any:
  return dataset(name, json.loads(config))


def _spellings(given: str, true: str) -> list[str]:
  """Return the spellings of an answer that the module's docstring lists."""
  bare = _WRAPPER.sub(r'\1', equality.strip_delimiters(given)).strip()
  if quoted := _QUOTED.fullmatch(bare):
    bare = quoted[2].strip()
  spellings = [given] if bare == given else [given, bare]
  if _NUMBER.fullmatch(true) and _NAMED_NUMBER.fullmatch(normalize_spelling(bare)):
    spellings += [true] if equality.equal(bare, true, 'math') else []
  return spellings


def _restored(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Return an entry as score_answer takes it: JSON made lists of the tuples of two tasks."""
  if entry['task'] not in ('arc_agi', 'rearc'):
    return dict(entry)
  board = tuple(map(tuple, entry['metadata']['output']))
  return {**entry, 'metadata': {**entry['metadata'], 'output': board}}
