r"""Grade reasoning_gym tasks with their own score_answer; a score of 1 means correct.

score_answer receives the answer as written, from a box or from prose. If prose does not mark the
answer with '####' or 'the answer is', the answer is the last number if the entry's answer is a
number, and the last line otherwise. Most tasks compare character by character, so two more
variants are tried: the answer without decoration such as `\text{}`, `**`, `$` and quotes; and the
entry's own answer, if the two are the same number. A formula is not a number, and text that
ends in a formula has no last number, because `32 - 67 =` may just repeat the question.

A worker imports the package when it receives the first response that needs it, before that
response's time limit starts.
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

KIND = 'reasoning_gym'  # a question's kind, one of verifier.KINDS
# The column with a question's entry: question, answer and metadata as generated, the `task`, and
# the non-default values of its `config`.
COLUMN = 'entry'

# No leading zeros: '0101' may be text.
_NUMBER = re.compile(r'-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?')
# 'x = 5', '+5.0', '5 legs'
_NAMED_NUMBER = re.compile(r'(?:[A-Za-z]* ?= ?)?[+-]?[0-9]+(?:\.[0-9]+)?(?: [A-Za-z ]+)?')
_WRAPPER = re.compile(r'\\(?:text|math)[a-z]{0,6}\{([^{}]*)\}')
_QUOTED = re.compile(r'(["\'`])([^"\'`]*)\1')
_EVALUATES = re.compile(r'\b(?:eval|exec|parse_expr|sympify)\(\s*answer\b')


def judge(response: str, columns: Mapping[str, Any]) -> tuple[str, str | None]:
  """Judge a response whose reasoning has been removed; return the fields of a Judgement.

  Raises InputError if the columns contain no entry that can be scored.
  """
  entry = columns.get(COLUMN)
  if not isinstance(entry, Mapping) or not {'answer', 'config', 'task'} <= entry.keys():
    raise InputError(
      f"kind='{KIND}': the question has no column '{COLUMN}' with an answer, config and task. "
      'score_answer needs all three. Use a data spec such as reasoning_gym:chain_sum:train, which '
      'provides the kind and the column.'
    )
  answer = extract(response, entry)
  if answer is None:
    return 'no answer', None
  return 'correct' if score(answer, entry) >= 1 else 'wrong', answer


def extract(response: str, entry: Mapping[str, Any]) -> str | None:
  """Return the response's answer to an entry's question, as written; None if there is none."""
  if _NUMBER.fullmatch(entry['answer'] or ''):
    return extraction.extract(response)
  return extraction.extract_text(response)


def score(answer: str, entry: Mapping[str, Any]) -> float:
  """Return the best score that any spelling of an answer gets: 1 if correct, else partial credit.

  Raises InputError if the task is unknown or would execute a model's text as code.
  """
  task = _cached_dataset(entry['task'], json.dumps(entry['config']))
  best = 0.0
  for spelling in _spellings(answer, entry['answer'] or ''):
    try:
      best = max(best, float(task.score_answer(spelling, _restore_tuples(entry))))
    except MemoryError:
      raise
    except Exception:  # many tasks raise on an answer in the wrong format
      continue
    if best >= 1:
      break
  return best


def load() -> None:
  """Import the package, which takes seconds; do nothing if it is not installed."""
  with contextlib.suppress(ImportError):  # the response that needs it reports the error
    importlib.import_module('reasoning_gym.factory')


def dataset(name: str, config: Mapping[str, Any]) -> Any:
  """Create a task's dataset. Raises the same errors as `score`, and any error from the task."""
  tasks = importlib.import_module('reasoning_gym.factory').DATASETS
  if name not in tasks:
    raise InputError(f"the installed reasoning_gym has no task '{name}'. Choose a different task.")
  generator, settings = tasks[name]
  # Text from a model is never evaluated. A test looks for evaluations that this pattern misses.
  if match := _EVALUATES.search(inspect.getsource(generator.score_answer)):
    raise InputError(
      'this task is rejected because its score_answer runs model output through '
      f'{match[0]}). Choose a different task.'
    )
  return generator(settings(**{'seed': 0, **config}))


@functools.cache
def _cached_dataset(name: str, config: str) -> Any:
  return dataset(name, json.loads(config))


def _spellings(answer: str, truth: str) -> list[str]:
  """Return the spellings to try for an answer, as described in the module docstring."""
  text = _WRAPPER.sub(r'\1', equality.strip_delimiters(answer)).strip()
  if match := _QUOTED.fullmatch(text):
    text = match[2].strip()
  is_number = _NUMBER.fullmatch(truth) and _NAMED_NUMBER.fullmatch(normalize_spelling(text))
  same_number = [truth] if is_number and equality.equal(text, truth, 'math') else []
  return list(dict.fromkeys((answer, text, *same_number)))


def _restore_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Restore tuples that JSON turned into lists, because score_answer needs tuples in two tasks."""
  if entry['task'] not in ('arc_agi', 'rearc'):
    return dict(entry)
  board = tuple(map(tuple, entry['metadata']['output']))
  return {**entry, 'metadata': {**entry['metadata'], 'output': board}}
