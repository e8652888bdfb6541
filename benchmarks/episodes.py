"""Episodes of eight turns with slow and with instant environments."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.frame import Bench, Figure
from exgrpo_jax.data import prompt
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.environments import settings
from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.environments.pool import Pool
from exgrpo_jax.rollout.episodes import EpisodeSampler
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.rollout.slots import Sync
from exgrpo_jax.runtime.randomness import Purpose

_TURNS = 8
_SLOW, _INSTANT = 0.05, 0.0  # seconds per answer
_IN_FLIGHT = 2  # episodes per slot
_ARMS = {  # seconds per answer, and the share of episodes whose caches are kept
  'slow': (_SLOW, 1.0),
  'instant': (_INSTANT, 1.0),
  'recomputed': (_INSTANT, 0.0),
}


class Waiting:
  """An environment that always answers the same, after the seconds given as the task's answer."""

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt."""
    del seed
    self._seconds = float(task.answer)
    return task.messages

  def step(self, response: str) -> Observation:
    """Wait, as a slow service would."""
    del response
    time.sleep(self._seconds)
    return Observation('on')


class Letters(Tokenizer):
  """A fake tokenizer: every answer has `observed` tokens, and every turn is truncated."""

  files, pad_id = {}, 0

  def __init__(self, vocab_size: int, observed: int) -> None:
    self.vocab_size, self.eos_ids = vocab_size, (vocab_size - 1,)
    self._answer = [1] * (observed - 1)  # the turn's end token comes first

  def encode(self, text: str) -> list[int]:
    """See Tokenizer.encode."""
    return self._answer if text else []

  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """See Tokenizer.encode_all."""
    return list(map(self.encode, texts))

  def decode(self, ids: Any, special: bool = False) -> str:
    """See Tokenizer.decode."""
    del special
    return '.' * len(ids)


class _Played(NamedTuple):
  """The cost of a step's episodes."""

  seconds: float
  idle: float  # seconds in which no slot decoded
  syncs: list[Sync]
  written: int  # tokens that the policy wrote


def measure(bench: Bench) -> list[Figure]:
  """Measure busy slots and speed with slow environments, and the gain from kept caches."""
  slots, turn = bench.config.rollout.slots, bench.config.rollout.max_response // _TURNS
  config = settings.EnvironmentConfig(
    name='benchmarks.episodes:Waiting',
    max_turns=_TURNS,
    max_turn_tokens=turn - _observed(bench),
    workers=slots,
  )
  pool = Pool(config)
  played: dict[str, list[_Played]] = {name: [] for name in _ARMS}
  for repeat in range(1 + bench.size.repeats):
    for name, (seconds, kept) in _ARMS.items():
      found = _play(bench, config, pool, seconds, round(kept * _IN_FLIGHT * slots))
      played[name] += [found] * (repeat > 0)  # the first repeat compiles
  speed = {
    name: sum(one.written for one in found) / sum(one.seconds for one in found)
    for name, found in played.items()
  }
  slow = played['slow']
  decoding = 1 - sum(one.idle for one in slow) / sum(one.seconds for one in slow)
  decoded, computed = (
    sum(count(sync) for one in slow for sync in one.syncs)
    for count in (lambda sync: sync.tokens, lambda sync: sync.steps * sync.slots)
  )
  answer = f'an answer takes {1e3 * _SLOW:.0f} ms'
  flight = f'{_IN_FLIGHT * slots} episodes in {slots} slots'
  return [
    Figure('slots busy', 100 * decoding * decoded / computed, '%', f'{flight}; {answer}'),
    Figure('end to end', speed['slow'], 'tokens/s', f'of the policy, {_TURNS} turns; {answer}'),
    Figure(
      'of instant', 100 * speed['slow'] / speed['instant'], '%', 'of the speed with instant answers'
    ),
    Figure(
      'kept caches',
      speed['instant'] / speed['recomputed'],
      'x',
      'as fast as recomputing the caches in each turn, with instant answers',
    ),
  ]


def _observed(bench: Bench) -> int:
  """Return the length of an answer in tokens, a quarter of a turn's length."""
  return max(2, bench.config.rollout.max_response // _TURNS // 4)


def _play(
  bench: Bench, config: settings.EnvironmentConfig, pool: Pool, seconds: float, parked: int
) -> _Played:
  """Play twice as many episodes as there are slots, one per question."""
  rollout, syncs = bench.config.rollout, list[Sync]()
  asked = [
    Question(row, (Message('user', 'go'),), str(seconds), 'math', '', 'waiting')
    for row in range(_IN_FLIGHT * rollout.slots)
  ]
  engine = bench.engine(resumes=True, on_sync=syncs.append)
  sampler = EpisodeSampler(
    engine=dataclasses.replace(engine, spec=dataclasses.replace(engine.spec, parked=parked)),
    environments=pool,
    config=config,
    tokenizer=Letters(bench.model.vocab_size, _observed(bench)),
    prompts=prompt.PromptConfig(),
    seed=0,
    purpose=Purpose.ROLLOUT,
    in_order=False,
  )
  rows = range(len(asked))
  requests = requests_for(
    [bench.prompt(row) for row in rows], rows, 1, 0, rollout.max_response, asked
  )
  started = time.monotonic()
  responses, metrics = sampler.generate(bench.decode_params, requests)
  took = time.monotonic() - started
  written = sum(response.num_own for response in responses)
  return _Played(took, metrics['environment/idle_seconds'], syncs, written)
