"""Questions whose prompts come from an environment."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.data import prompt
from exgrpo_jax.data.questions import check_prompts
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message, Question, Questions, QuestionSet
from exgrpo_jax.environments.pool import Pool


class Begun(Questions):
  """Questions whose messages come from an environment."""

  def __init__(self, questions: Questions, messages: Sequence[tuple[Message, ...]]) -> None:
    self._questions, self._messages = questions, messages

  def __len__(self) -> int:
    return len(self._messages)

  def read(self, rows: Sequence[int]) -> list[Question]:
    """See Questions.read."""
    return [
      _beginning_with(self._messages[row], question)
      for row, question in zip(rows, self._questions.read(rows))
    ]

  def select(self, rows: np.ndarray) -> 'Begun':
    """See Questions.select."""
    return Begun(self._questions.select(rows), [self._messages[row] for row in rows])


def begin(questions: Sequence[Question], pool: Pool) -> list[Question]:
  """Return the questions with the environment's prompts. Raises InputError if `reset` fails."""
  return [
    _beginning_with(tuple(Message(**message) for message in own), question)
    for own, question in zip(pool.prompts(questions), questions)
  ]


def _beginning_with(messages: tuple[Message, ...], question: Question) -> Question:
  return dataclasses.replace(question, messages=messages, original_messages=question.messages)


def begun(
  data: QuestionSet, pool: Pool, tokenizer: Tokenizer, prompts: prompt.PromptConfig, max_prompt: int
) -> QuestionSet:
  """Use environment prompts in `data`; InputError if `reset` fails or a prompt is too long."""
  questions, tools = list(data.questions), pool.tools()
  messages = [question.messages for question in begin(questions, pool)]
  if messages == [question.messages for question in questions] and not tools:
    return data  # its prompts are tokenized already
  texts = [tokenizer.render(own, prompts, tools) for own in messages]
  tokens = [np.array(ids, np.int32) for ids in tokenizer.encode_all(texts)]
  check_prompts(data.spec, np.array([len(ids) for ids in tokens]), max_prompt, 'refuse')
  return QuestionSet(data.spec, Begun(data.questions, messages), tokens)
