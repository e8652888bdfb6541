"""TextArena and Gymnasium games as environments.

The question is the game's name. The `seed` column selects an instance, and the `options` column
contains the arguments for creating it:

  {"question": "Sokoban-v0", "answer": "won", "seed": 7, "options": {"num_boxes": 1}}

The seed in the column determines the board, so all episodes for a question start from the same
board. The episode's own seed determines all randomness after that.
"""

import contextlib
import importlib
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.errors import InputError

_COLORED = re.compile(r'\x1b\[([\d;]+)m(.*?)\x1b\[0m')
_MARKS = {'34;1': '()', '35': '{}', '42': '<>'}  # Taxi's passenger, destination, occupied taxi


class TextArena:
  """A single-player TextArena game. A reward of at least 1 counts as a win.

  The policy sees the game's messages to the player, except those that echo the policy's moves.
  """

  def __init__(self) -> None:
    self._textarena = package('textarena')

  def reset(self, task: Task, seed: int) -> Messages:
    """Start the game and return its prompt. Raises ValueError if the row has no seed."""
    options = task.columns.get('options') or {}
    # The 'raw' form contains only new text; other forms repeat the whole game every turn.
    self._game = self._textarena.make(f'{_name(task)}-raw', **options)
    self._random_state = None
    with self._own_random_state():
      self._game.reset(num_players=1, seed=_seed(task))
      prompt = self._new_messages()
      random.seed(seed)
      np.random.seed(seed % 2**32)
    return prompt

  def step(self, response: str) -> Observation:
    """Make a move. The last move gets the game's reward. A second invalid move ends the game."""
    with self._own_random_state():
      done, _ = self._game.step(response)
      if not done:
        return Observation(self._new_messages())
    reward = float(self._game.close()[0][0])
    return Observation(reward=reward, done=True, success=reward >= 1)

  def _new_messages(self) -> str:
    own_move = self._textarena.ObservationType.PLAYER_ACTION
    _, messages = self._game.get_observation()
    return '\n'.join(text.strip() for _, text, kind in messages if kind != own_move)

  @contextlib.contextmanager
  def _own_random_state(self) -> Iterator[None]:
    """Use this game's own random state, not the one all episodes share, inside a `with` block."""
    global_state = random.getstate(), np.random.get_state()
    if self._random_state is not None:
      random.setstate(self._random_state[0])
      np.random.set_state(self._random_state[1])
    try:
      yield
    finally:
      self._random_state = random.getstate(), np.random.get_state()
      random.setstate(global_state[0])
      np.random.set_state(global_state[1])


class Gymnasium:
  """A Gymnasium game with discrete actions, such as the toy text games.

  In each turn, the policy chooses an action by its number or, if the `actions` column lists names
  for the actions in the order of their numbers, by its name. The prompt begins with the text in the
  `rules` column. The game is won if it ends with a reward of at least the value in the `won` column
  (default 1).
  """

  def __init__(self) -> None:
    self._gymnasium = package('gymnasium')

  def reset(self, task: Task, seed: int) -> Messages:
    """Start the game and return its prompt. Raises ValueError if the actions are not discrete."""
    gymnasium, columns = self._gymnasium, task.columns
    name, options = _name(task), columns.get('options') or {}
    self._game = gymnasium.make(name, **options)
    if 'ansi' in self._game.metadata['render_modes']:
      self._game = gymnasium.make(name, render_mode='ansi', **options)
    if not isinstance(self._game.action_space, gymnasium.spaces.Discrete):
      raise ValueError(
        f'{name} has the action space {self._game.action_space}, which is not discrete'
      )
    numbers = [str(number) for number in range(self._game.action_space.n)]
    self._actions = columns.get('actions') or numbers
    self._winning_reward = float(columns.get('won', 1))
    observation, _ = self._game.reset(seed=_seed(task))
    self._game.unwrapped.np_random = np.random.default_rng(seed)
    actions = f'Answer with one of: {", ".join(self._actions)}.'
    return '\n'.join([*filter(None, [columns.get('rules')]), actions, self._board(observation)])

  def step(self, response: str) -> Observation:
    """Take an action and return the game's reward. An unknown action changes nothing."""
    if (action := response.strip()) not in self._actions:
      return Observation(f'Answer with one of: {", ".join(self._actions)}.')
    observation, reward, is_over, is_cut, _ = self._game.step(self._actions.index(action))
    won = bool(is_over) and float(reward) >= self._winning_reward
    return Observation(self._board(observation), float(reward), bool(is_over or is_cut), won)

  def _board(self, observation: Any) -> str:
    """Return the board as text (brackets show colors), or the observation if there is no board."""
    if self._game.render_mode != 'ansi':
      return str(observation)

    def mark(match: re.Match[str]) -> str:
      begin, end = _MARKS.get(match[1], '[]')
      return f'{begin}{match[2]}{end}'

    return _COLORED.sub(mark, self._game.render()).strip('\n')


def package(name: str) -> Any:
  """Import an optional package. Raises InputError if it is not installed."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise InputError(
      f"{name} environments require the {name} package. Run pip install 'exgrpo_jax[{name}]'."
    ) from error


def _name(task: Task) -> str:
  return task.messages[-1]['content'].strip()


def _seed(task: Task) -> int:
  seed = task.columns.get('seed')
  if not isinstance(seed, int):
    raise ValueError(
      f"column 'seed' is {seed!r}, but must be an integer. The seed decides which game is played, "
      'so training and evaluation need different seeds'
    )
  return seed
