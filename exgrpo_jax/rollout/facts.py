"""What a reward may ask for of a response, by the names of reward_functions.PARAMETERS."""

from typing import Any

import numpy as np

from exgrpo_jax.data import traces
from exgrpo_jax.datatypes import Question


def of_question(question: Question) -> dict[str, Any]:
  """Facts from a question's row; `question` and `messages` hide columns of these names."""
  return {
    **question.columns,
    'question': traces.asked(question.messages),
    'messages': [message._asdict() for message in question.messages],
  }


def of_response(
  question: Question, tokens: np.ndarray, truncated: bool, max_response: int
) -> dict[str, Any]:
  """All facts that do not come from the text of a response or from the verifier.

  Args:
    question: that it answers.
    tokens: [T] int32, the end token included where there is one.
    truncated: whether it was cut at the limit, without an end token.
    max_response: that limit, in tokens.
  """
  return {
    **of_question(question),
    'tokens': tokens,
    'length': len(tokens),
    'truncated': truncated,
    'max_response': max_response,
  }
