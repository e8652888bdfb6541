"""The rewards that come with the package, to be named in config.grading.rewards.

A reward is a function that asks by the names of its parameters for what it needs (see
reward_functions.PARAMETERS) and returns a number. These run in grading's worker processes
under their limits, so this file must not import jax.
"""

import functools
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.grading.answers import extraction

_DEFAULT_BUFFER_SHARE = 5  # DAPO's: 4,096 of 20,480 tokens
_FENCE = re.compile(r'^[^\S\n]*```', re.MULTILINE)


def correctness(outcome: str) -> float:
  """1 for a response that the verifier finds correct, else 0."""
  return float(outcome == 'correct')


def overlong(length: int, max_response: int, overlong_buffer: int) -> float:
  """DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13): 0 down to -1.

  0 for at most `max_response` - `overlong_buffer` tokens, then linear to -1 at `max_response`,
  which is the least. The end token counts. A buffer of 0 is a fifth of the limit.
  """
  buffer = overlong_buffer or max(1, max_response // _DEFAULT_BUFFER_SHARE)
  return min(0.0, max(-1.0, (max_response - buffer - length) / buffer))


def think_format(response: str) -> float:
  """Return 1 for the format that the paper's template requests, else 0, whatever the answer.

  The response closes one think section and has text both in it and after it. It may open the
  section too, because not every prompt has done so (prompt.THINK); nothing may stand before that.
  """
  thought, _, solution = response.strip().removeprefix('<think>').partition('</think>')
  is_whole = bool(thought.strip() and solution.strip())
  return float(is_whole and '</think>' not in solution and '<think>' not in thought + solution)


def boxed_format(response: str) -> float:
  r"""1 where the answer stands in a \boxed{...} that is closed and not empty, else 0.

  Only what follows the last '</think>' counts, if there is one, as it does for the verifier.
  """
  return float(extraction.extract(response, require_box=True) is not None)


def latin_script(response: str) -> float:
  """Share of the response's letters that are of the Latin script; 1 where it has no letters.

  For models that slip into another language, as DeepSeek-R1's language consistency is
  (arXiv:2501.12948, by words of the target language). It sees the script alone: not whether
  Latin letters are English, French or code. Greek and mathematical letters, which formulas are
  made of, do not count.
  """
  kinds = [kind for kind in map(_script, response) if kind]
  return kinds.count('latin') / len(kinds) if kinds else 1.0


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
  """'latin', 'other', or '' for what does not count."""
  name = unicodedata.name(character, '') if character.isalpha() else ''
  if not name or name.startswith(('GREEK', 'MATHEMATICAL')):
    return ''
  return 'latin' if name.startswith(('LATIN', 'FULLWIDTH LATIN')) else 'other'


def score_answer(response: str, outcome: str, entry: Mapping[str, Any]) -> float:
  """The score that a task of reasoning_gym gives the answer, partial credit included; 0 for none.

  `entry` is a column that its questions have.
  """
  given = None if outcome == 'no answer' else reasoning_gym.extract(response, entry)
  return 0.0 if given is None else reasoning_gym.score(given, entry)


BUILT_IN = {
  function.__name__: function
  for function in (correctness, overlong, think_format, boxed_format, latin_script, score_answer)
}


def has_code_block(text: str) -> bool:
  """Whether some line begins with ```, after white space at most; closed or not.

  No reward, but a metric: models write code that they cannot run and take their own word for what
  it prints; the paper calls what follows from replaying that a snowball (arXiv:2510.02245).
  """
  return _FENCE.search(text) is not None
