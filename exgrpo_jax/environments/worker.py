"""The worker process: holds environments, and answers turns.

pool.py says what it is given, ../workers/server.py how it is asked:

  {'spec', 'tools'}         the class, and tools with which it is made where there are any, each
                            'package.module:name'; answered by {'tools': descriptions}
  {'key', 'begin', 'said'}  the answer to the last of the turns `said`: an Observation's fields;
                            without turns, {'messages': the prompt}. `begin` are the fields of a
                            `Beginning`, and all turns are played; None where the worker holds the
                            episode already, and then `said` has what is new; without turns it is
                            dropped
  {'begin', 'turns'}        {'episode': [[text, observation], …]}, played by the environment's own
                            `demonstrate`, at most so many turns

An episode is gone once answering it raised.
"""

import dataclasses
import functools
import inspect
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
  """What an episode begins with."""

  task: Sequence[Any]  # the fields of a Task
  seed: int
  prompt: Messages | None  # what `reset` must return; None where that is asked


def main() -> None:
  """Serve until the socket is closed or the parent ends."""
  server.serve(_load)


def _load(setup: Mapping[str, Any], say: Say) -> tuple[Reply, Callable[[dict[str, Any]], Reply]]:
  """Import the class and its tools; see server.Load."""
  sources, described = list[Callable[..., Any]](), list[dict[str, Any]]()
  for spec in setup['tools']:
    with user_code.refusing('environment.tools', spec):
      say('environment.tools', spec, 'importing it')
      sources.append(source := user_code.load(spec))
      found = tools.methods(source()) if inspect.isclass(source) else [source]
      described += map(tools.describe, found)
  with user_code.refusing('environment.name', setup['spec']):
    say('environment.name', setup['spec'], 'importing it')
    make = user_code.load(setup['spec'], 'Class')
    make = functools.partial(make, sources) if sources else make
    make()
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

  return {'tools': described}, answer


def _answer(
  make: Callable[[], Environment],
  episodes: dict[str, Environment],
  key: str,
  begin: Mapping[str, Any] | None,
  said: Sequence[str],
) -> Reply:
  if begin is not None:
    environment = make()
    prompt = _reset(environment, Beginning(**begin))
    if not said:
      return {'messages': prompt}
    episodes[key] = environment
  elif not said:
    episodes.pop(key, None)
    return {}
  environment = episodes[key]
  for text in said[:-1]:
    environment.step(text)
  observation = checked(environment.step(said[-1]))
  if observation.done:
    del episodes[key]
  return observation._asdict()


def _reset(environment: Environment, begin: Beginning) -> list[dict[str, str]]:
  """Begin an episode; raise ValueError if its prompt is another one than the task has."""
  prompt = as_messages(environment.reset(Task(*begin.task), begin.seed))
  if begin.prompt is not None and prompt != begin.prompt:
    raise ValueError(
      'the prompt of a task must be the same whatever the seed: reset returned '
      f'{prompt!r} with seed {begin.seed}, and {begin.prompt!r} with seed 0'
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
  main()
