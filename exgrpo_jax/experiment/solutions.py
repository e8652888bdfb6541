"""What a warm start learns: worked solutions, or episodes that an environment plays by itself."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from exgrpo_jax.data import conversation
from exgrpo_jax.datatypes import Question, Turn, own_tokens
from exgrpo_jax.environments import pool
from exgrpo_jax.environments.environment import Observation, as_messages
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import Experiment, load_questions
from exgrpo_jax.padding import right_padded
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

TOGETHER = 1000  # solutions that are made at a time


@dataclasses.dataclass(frozen=True)
class Solution:
  """A row to learn."""

  prompt: np.ndarray  # [T] int32
  tokens: np.ndarray  # [T] int32, what follows it
  turns: tuple[Turn, ...] = ()  # of an episode; its policy's tokens alone are learnt

  def __len__(self) -> int:
    return len(self.prompt) + len(self.tokens)


def load(experiment: Experiment) -> list[Solution]:
  """The rows to learn; InputError where a question has none, or one that is too long."""
  config = experiment.config
  spec, limit = config.warm_start.data, config.rollout.max_response
  data = load_questions(experiment, spec)
  of_questions = _episodes if config.environment.name else _written
  rows = []
  for start in range(0, len(data.questions), TOGETHER):
    part = slice(start, start + TOGETHER)
    asked = data.questions[part]
    made = of_questions(experiment, asked)
    for question, prompt, (tokens, turns) in zip(asked, data.prompts[part], made):
      if len(tokens) <= limit:
        rows.append(Solution(prompt, tokens, turns))
      elif config.data.overlong == 'refuse':
        raise InputError(
          f'{spec}: the solution of row {question.row} has {len(tokens)} tokens, '
          f'over config.rollout.max_response={limit}; raise it, or set '
          "config.data.overlong='drop'."
        )
  if not rows:
    raise InputError(f'{spec}: no solution fits config.rollout.max_response={limit}; raise it.')
  return rows


def padded(rows: Sequence[Solution], longest: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """`right_padded` rows, whose mask is 1 where a token is learnt."""
  tokens_BT, mask_BT = right_padded([(row.prompt, row.tokens) for row in rows], longest, pad_id)
  own = [own_tokens(row.turns, len(row.tokens)) for row in rows]
  mask_BT[mask_BT > 0] = np.concatenate(own)
  return tokens_BT, mask_BT


_Made = Iterator[tuple[np.ndarray, tuple[Turn, ...]]]  # tokens, and turns


def _written(experiment: Experiment, asked: Sequence[Question]) -> _Made:
  """The worked solutions of the data, each with its end token."""
  spec, tokenizer = experiment.config.warm_start.data, experiment.tokenizer
  solutions = tokenizer.encode_all([question.solution for question in asked])
  for question, ids in zip(asked, solutions):
    if not question.solution:
      raise InputError(
        f'{spec}: row {question.row} has no worked solution to learn from; '
        'set config.data.solution_field, or config.warm_start.num_updates=0.'
      )
    yield np.array([*ids, tokenizer.eos_ids[0]], np.int32), ()


def _episodes(experiment: Experiment, asked: Sequence[Question]) -> _Made:
  """Episodes as the environment plays them, written as a rollout would have them."""
  config = experiment.config
  environments = pool.of(config.environment)
  seeds = [
    int(randomness.generator(config.warm_start_seed, Purpose.DEMONSTRATION, q.row).integers(2**63))
    for q in asked
  ]
  try:
    episodes = environments.demonstrations(asked, seeds, config.environment.max_turns)
  except InputError as error:
    raise InputError(
      f'{error}. A warm start learns from episodes that the class plays by its method '
      'demonstrate(rng); config.warm_start.num_updates=0 goes without.'
    ) from error
  for episode in episodes:
    yield _tokens(experiment, episode)


def _tokens(
  experiment: Experiment, episode: Sequence[tuple[str, Observation]]
) -> tuple[np.ndarray, tuple[Turn, ...]]:
  tokenizer, pieces, turns = experiment.tokenizer, list[np.ndarray](), list[Turn]()
  for number, (text, answer) in enumerate(episode, 1):
    turn = np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]], np.int32)
    observed = turn[:0]
    if number < len(episode):
      prompts, messages = experiment.config.prompt, as_messages(answer.messages)
      observed = conversation.observed(tokenizer, prompts, turn, messages)
    pieces += [turn, observed]
    turns.append(Turn(len(turn), len(observed), answer.reward))
  return np.concatenate(pieces), tuple(turns)
