"""Built-in rewards; config.grading.rewards selects them by name.

A reward is a function that returns a number. Its parameter names select the values it receives (see
reward_functions.PARAMETERS). Rewards run in the grading workers, under their limits, so this file
must not import jax.
"""

import functools
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.grading.answers import extraction

_DEFAULT_BUFFER_SHARE = 5  # as in DAPO: 4,096 of 20,480 tokens
_FENCE = re.compile(r'^[^\S\n]*```', re.MULTILINE)


def correctness(outcome: str) -> float:
  """Return 1 if the verifier finds the response correct, else 0."""
  return float(outcome == 'correct')


def overlong(length: int, max_response: int, overlong_buffer: int) -> float:
  """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), from -1 to 0.

  It is 0 up to `max_response - overlong_buffer` tokens, then falls linearly to its minimum of -1 at
  `max_response`. The end token counts toward the length. A buffer of 0 means a fifth of
  `max_response`.
  """
  buffer = overlong_buffer or max(1, max_response // _DEFAULT_BUFFER_SHARE)
  return min(0.0, max(-1.0, (max_response - buffer - length) / buffer))


def think_format(response: str) -> float:
  """Return 1 if the response follows the paper's template, even with a wrong answer; else 0.

  The response must close exactly one think section, with text inside the section and after it. An
  opening tag is allowed only at the start of the response, for prompts that do not end with the tag
  (prompt.THINK).
  """
  thought, _, solution = response.strip().removeprefix('<think>').partition('</think>')
  is_whole = bool(thought.strip() and solution.strip())
  return float(is_whole and '</think>' not in solution and '<think>' not in thought + solution)


def boxed_format(response: str) -> float:
  r"""Return 1 if the answer is in a closed, nonempty \boxed{...}, else 0.

  As in verification, text up to the last '</think>' is ignored.
  """
  return float(extraction.extract(response, ('box',)) is not None)


def latin_script(response: str) -> float:
  """Return the share of the response's letters that are Latin; 1 if it has no letters.

  Like DeepSeek-R1's language consistency reward (arXiv:2501.12948), this reward is for models that
  slip into another language. DeepSeek's reward counts words in the target language, but this reward
  only checks the script, so Latin letters may be English, French or code. Greek and mathematical
  letters are ignored, because formulas use them.
  """
  kinds = [kind for kind in map(_script, response) if kind]
  return kinds.count('latin') / len(kinds) if kinds else 1.0


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
  """Classify a character as 'latin' or 'other', or as '' if it is ignored."""
  name = unicodedata.name(character, '') if character.isalpha() else ''
  if not name or name.startswith(('GREEK', 'MATHEMATICAL')):
    return ''
  return 'latin' if name.startswith(('LATIN', 'FULLWIDTH LATIN')) else 'other'


def score_answer(response: str, outcome: str, entry: Mapping[str, Any]) -> float:
  """Return the reasoning_gym task's score, including partial credit; 0 if there is no answer.

  `entry` is a column of the question's row.
  """
  answer = None if outcome == 'no answer' else reasoning_gym.extract(response, entry)
  return 0.0 if answer is None else reasoning_gym.score(answer, entry)


BUILT_IN = {
  function.__name__: function
  for function in (correctness, overlong, think_format, boxed_format, latin_script, score_answer)
}


def has_code_block(text: str) -> bool:
  """Return True if any line starts with ```, optionally indented; the block need not be closed.

  This is a metric, not a reward. Models write code that they cannot run, and then trust their own
  guess at its output. According to the paper, replaying such responses causes a snowball effect
  (arXiv:2510.02245).
  """
  return _FENCE.search(text) is not None
