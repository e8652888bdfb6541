"""The worker process, which runs environments and answers turns.

pool.py sends the requests; ../workers/server.py describes the protocol:

  {'spec', 'tools'}          the class and any tools to create it with, each written as
                             'package.module:name'. The reply is {'tools': descriptions}
  {'key', 'begin', 'texts'}  `texts` are turns, and the reply answers the last one: an Observation's
                             fields, or {'messages': the prompt} if there are no turns. `begin`
                             contains the fields of a `Beginning`, and the worker plays all turns.
                             If the worker is already running the episode, `begin` is None and
                             `texts` contains only the new turn; in that case, an empty `texts`
                             drops the episode
  {'begin', 'turns'}         the reply is {'episode': [[text, observation], …]}, an episode of at
                             most `turns` turns played by the environment's own `demonstrate`

An episode is dropped if answering a turn raises an exception.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.environments import tools
from exgrpo_jax.environments.environment import (
  Environment,
  Messages,
  Observation,
  Task,
  as_messages,
  checked,
)
from exgrpo_jax.workers import server, user_code
from exgrpo_jax.workers.server import Reply, Say


@dataclasses.dataclass(frozen=True)
class Beginning:
  """The start of an episode."""

  task: Sequence[Any]  # the fields of a Task
  seed: int
  prompt: Messages | None  # what `reset` must return; None if the request asks for it


def _load(setup: Mapping[str, Any], say: Say) -> tuple[Reply, Callable[[dict[str, Any]], Reply]]:
  """Import the class and its tools; see server.Load."""
  sources, descriptions = list[Callable[..., Any]](), list[dict[str, Any]]()
  names = set[str]()
  for spec in setup['tools']:
    with user_code.refusing('environment.tools', spec):
      say('environment.tools', spec, 'importing it')
      sources.append(user_code.load(spec))
      functions = tools.Tools(sources[-1:]).functions
      if not functions:
        raise ValueError(f'{spec} has no public method that could be a tool')
      for name in names.intersection(functions):
        raise ValueError(f'there is another tool named {name}')
      names.update(functions)
      descriptions += map(tools.describe, functions.values())
  with user_code.refusing('environment.name', setup['spec']):
    say('environment.name', setup['spec'], 'importing it')
    make = user_code.load(setup['spec'], 'Class')
    make = functools.partial(make, sources) if sources else make
    environment = make()
    for method in ('reset', 'step'):
      if not callable(getattr(environment, method, None)):
        raise TypeError(f'{type(environment).__name__} has no method {method}')
  episodes: dict[str, Environment] = {}

  def answer(request: dict[str, Any]) -> Reply:
    if 'turns' in request:
      begin = Beginning(**request['begin'])
      return {'episode': _demonstration(make(), begin, request['turns'])}
    try:
      return _answer(make, episodes, **request)
    except BaseException:
      episodes.pop(request['key'], None)
      raise

  return {'tools': descriptions}, answer


def _answer(
  make: Callable[[], Environment],
  episodes: dict[str, Environment],
  key: str,
  begin: Mapping[str, Any] | None,
  texts: Sequence[str],
) -> Reply:
  if begin is not None:
    environment = make()
    prompt = _reset(environment, Beginning(**begin))
    if not texts:
      return {'messages': prompt}
    episodes[key] = environment
  elif not texts:
    episodes.pop(key, None)
    return {}
  environment = episodes[key]
  for text in texts[:-1]:
    environment.step(text)
  observation = checked(environment.step(texts[-1]))
  if observation.done:
    del episodes[key]
  return observation._asdict()


def _reset(environment: Environment, begin: Beginning) -> list[dict[str, str]]:
  """Start an episode and return its prompt. Raises ValueError if `begin` has a different prompt."""
  prompt = as_messages(environment.reset(Task(*begin.task), begin.seed))
  if begin.prompt is not None and prompt != begin.prompt:
    raise ValueError(
      "a task's prompt must not depend on the seed, but reset returned "
      f'{prompt!r} with seed {begin.seed} and {begin.prompt!r} with seed 0'
    )
  return prompt


def _demonstration(
  environment: Environment, begin: Beginning, turns: int
) -> list[tuple[str, Observation]]:
  rng, episode = np.random.default_rng(begin.seed), list[tuple[str, Observation]]()
  _reset(environment, begin)
  demonstrate = getattr(environment, 'demonstrate', None)
  if demonstrate is None:
    raise TypeError(f'{type(environment).__name__} has no method demonstrate(rng)')
  while len(episode) < turns and not (episode and episode[-1][1].done):
    text = demonstrate(rng)
    episode.append((text, checked(environment.step(text))))
  return episode


if __name__ == '__main__':
  server.serve(_load)
