"""Environments of the package verifiers, before its version 0.4.

A question names the environment, its column `row` a row of that one's own data set, and `options`
what it is loaded with; with `split` 'eval' it is a row of the data for evaluation:

  {"question": "wordle", "answer": "won", "row": 7, "options": {"num_games": 100}}

The environment runs its own rollout here, and where it asks a model it gets the policy's turn.
"""

import asyncio
import functools
import importlib
import json
from typing import Any

from exgrpo_jax.environments.adapters import package
from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.errors import InputError


class Verifiers:
  """An episode of text; the environment's rubric rewards it at its end, and 1 is a success."""

  def __init__(self) -> None:
    if not hasattr(package('verifiers'), 'MultiTurnEnv'):
      raise InputError(
        'the verifiers that is installed has agents that are programs and call a server, which no '
        "episode can be: pip install 'verifiers<0.4' has environments that answer turn by turn."
      )

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the row; ValueError where the environment has tools of its own."""
    del seed  # the package has none for an episode
    name, columns = task.messages[-1]['content'].strip(), task.columns
    self._environment = _loaded(name, json.dumps(columns.get('options') or {}))
    if self._environment.tool_defs:
      raise ValueError(
        f'{name} has tools; name their functions in config.environment.tools instead, with '
        'config.environment.name=tools'
      )
    is_held_out = columns.get('split') == 'eval'
    environment = self._environment
    rows = environment.get_eval_dataset() if is_held_out else environment.get_dataset()
    self._loop = asyncio.new_event_loop()
    self._model = _Policy(self._loop)
    rollout = environment.rollout(dict(rows[columns['row']]), self._model, 'policy', {})
    self._rollout = self._loop.create_task(rollout)
    self._run()
    if self._rollout.done():
      raise ValueError(f'row {columns["row"]} of {name} is over before the first turn')
    return self._model.messages()

  def step(self, response: str) -> Observation:
    """What the environment adds to the conversation; ValueError where it changes what was said."""
    before = self._model.messages()
    self._model.say(response)
    self._run()
    if not self._rollout.done():
      messages = self._model.messages()
      if messages[: len(before)] != before:
        raise ValueError('it changes messages that were read already, which no token can undo')
      return Observation(messages[len(before) + 1 :])
    state = self._rollout.result()
    if state['error'] is not None:
      raise state['error']
    self._loop.run_until_complete(self._environment.rubric.score_rollout(state))
    self._loop.close()
    return Observation(reward=state['reward'], done=True, success=state['reward'] >= 1)

  def _run(self) -> None:
    """Goes on until the model is asked, or the rollout is over."""
    waits = {self._rollout, self._model.asked}
    self._loop.run_until_complete(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))


class _Policy:
  """What an environment takes for the client of a model."""

  def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
    importlib.import_module('verifiers.clients').Client.register(_Policy)
    self._loop = loop
    self.asked, self._said = loop.create_future(), loop.create_future()

  def messages(self) -> list[dict[str, str]]:
    """The conversation that the model is asked to go on with."""
    return [{'role': one.role, 'content': one.content} for one in self.asked.result()]

  def say(self, response: str) -> None:
    """Answers what was asked."""
    said, self.asked, self._said = (
      self._said,
      self._loop.create_future(),
      self._loop.create_future(),
    )
    said.set_result(response)

  async def get_response(self, prompt: Any, model: str, **_: Any) -> Any:
    """What the environment calls."""
    types = importlib.import_module('verifiers.types')
    self.asked.set_result(list(prompt))
    text = await self._said
    message = types.ResponseMessage(content=text, finish_reason='stop', is_truncated=False)
    return types.Response(id='', created=0, model=model, message=message)


@functools.cache
def _loaded(name: str, options: str) -> Any:
  return importlib.import_module('verifiers').load_environment(name, **json.loads(options))
