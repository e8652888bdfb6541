"""The tokens of a conversation that goes on after a turn of the policy."""

from collections.abc import Mapping, Sequence

import numpy as np

from exgrpo_jax.data import prompt
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message


def observed(
  tokenizer: Tokenizer,
  prompts: prompt.Config,
  turn: np.ndarray,
  messages: Sequence[Mapping[str, str]],
) -> np.ndarray:
  """The tokens after a turn: `messages`, up to where the policy's next turn begins.

  Args:
    tokenizer: of the policy.
    prompts: how messages become text, see `prompt.following`.
    turn: its tokens, which stay as they are; where it was cut, an end token comes first.
    messages: what was said to it, each with its role and content.

  Returns:
    int32 [T].
  """
  said = [Message(**message) for message in messages]
  text, end = prompt.following(said, prompts, tokenizer.chat), int(turn[-1])
  if end in tokenizer.eos_ids:
    ids = tokenizer.encode(text.removeprefix(tokenizer.decode([end], special=True)))
    return np.array(ids, np.int32)
  is_there = text.startswith(tokenizer.decode(tokenizer.eos_ids[:1], special=True))
  missing = () if is_there else tokenizer.eos_ids[:1]
  return np.array([*missing, *tokenizer.encode(text)], np.int32)
