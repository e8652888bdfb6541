"""The worker process: holds environments, and answers turns.

pool.py says how it is started, runtime/worker_slot.py kills it where it must. Both sides send lines
of JSON over a socket, which is the worker's standard input:

  the fields of `Setup`            answered by {'trying': a setting, 'how': …} before the class and
                                   its tools are imported, then by {'tools': descriptions} or
                                   {'refused': what is wrong}
  {'key', 'begin', 'said'}         the answer to the last of the turns `said`: an Observation's
                                   fields; without turns, {'messages': the prompt}. `begin` are the
                                   fields of a `Beginning`, and all turns are played; None where
                                   the worker holds the episode already, and then `said` has
                                   what is new; without turns it is dropped
  {'begin', 'turns'}               {'episode': [[text, observation], …]}, played by the
                                   environment's own `demonstrate`, at most so many turns

Each may be answered by {'reason': …} instead, and then the episode is gone. Whatever an environment
prints goes to standard error.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.environments import tool_schema, tools
from exgrpo_jax.environments.environment import (
  Environment,
  Messages,
  Observation,
  Task,
  as_messages,
  checked,
)
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import user_code
from exgrpo_jax.grading.user_code import ERRORS, summarize
from exgrpo_jax.runtime import worker_limits


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the pool sends first."""

  parent: int  # process id
  memory_limit: int  # MiB, in addition to what the process uses when it is ready
  spec: str  # 'package.module:Class'
  tools: Sequence[str]  # 'package.module:name', with which it is made where there are any


@dataclasses.dataclass(frozen=True)
class Beginning:
  """What an episode begins with."""

  task: Sequence[Any]  # the fields of a Task
  seed: int
  prompt: Messages | None  # what `reset` must return; None where that is asked


def main() -> None:
  """Serves until the socket is closed or the parent ends."""
  requests, replies = worker_limits.streams()
  line = requests.readline()
  if not line:
    return  # the parent has ended already

  def reply(value: Mapping[str, Any]) -> None:
    replies.write(json.dumps(value).encode() + b'\n')

  setup = Setup(**json.loads(line))
  worker_limits.die_with(setup.parent)
  try:
    make, described = _load(
      setup, lambda key, spec: reply({'trying': f'config.{key}: {spec!r}', 'how': 'importing it'})
    )
  except InputError as error:
    reply({'refused': str(error)})
    return
  worker_limits.limit_memory(setup.memory_limit)
  reply({'tools': described})
  episodes: dict[str, Environment] = {}
  for line in requests:
    request = json.loads(line)
    try:
      if 'turns' in request:
        reply({'episode': _demonstration(make(), Beginning(**request['begin']), request['turns'])})
      else:
        reply(_answer(make, episodes, **request))
    except ERRORS as error:
      episodes.pop(request.get('key'), None)
      reply({'reason': summarize(error), 'must_be_replaced': isinstance(error, MemoryError)})


def _load(
  setup: Setup, say: Callable[[str, str], None]
) -> tuple[Callable[[], Environment], list[dict[str, Any]]]:
  """What makes an environment, and its tools described; InputError where one cannot be used.

  Says what it imports before it does, as it may never come back.
  """
  sources, described = list[Callable[..., Any]](), list[dict[str, Any]]()
  for spec in setup.tools:
    say('environment.tools', spec)
    with user_code.refusing('environment.tools', spec):
      sources.append(source := user_code.load(spec))
      found = tools.methods(source()) if inspect.isclass(source) else [source]
      described += map(tool_schema.describe, found)
  say('environment.name', setup.spec)
  with user_code.refusing('environment.name', setup.spec):
    make = user_code.load(setup.spec, 'Class')
    make = functools.partial(make, sources) if sources else make
    make()
  return make, described


def _answer(
  make: Callable[[], Environment],
  episodes: dict[str, Environment],
  key: str,
  begin: Mapping[str, Any] | None,
  said: Sequence[str],
) -> Mapping[str, Any]:
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
  """Begins an episode; ValueError where its prompt is another one than the task has."""
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
