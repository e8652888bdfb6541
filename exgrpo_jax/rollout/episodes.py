"""Multi-turn episodes on top of the slot engine. An environment answers each turn.

Tokens in, tokens out: the policy's tokens are never decoded and re-encoded. The environment's
messages are rendered the way the chat template renders them after a turn, and their tokens are
appended.

A slot is freed at the end of each turn. Once the environment has answered, the episode queues for
another slot, ahead of all requests that have not started. More episodes than slots can therefore be
in flight, and slots keep decoding while environments work. Samples depend only on the request and
the position, not on the order in which environments answer. If this order could affect which
responses a step trains on, or could differ between hosts, answers are processed in turn order
instead. The engine then waits for an answer once a fixed number of syncs have passed since the end
of the turn.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Response, Turn, Verdict, turn_places
from exgrpo_jax.environments import pool, settings
from exgrpo_jax.environments.environment import as_messages
from exgrpo_jax.environments.pool import Answer, Failure, Pool
from exgrpo_jax.environments.worker import Beginning
from exgrpo_jax.grading.rewards import has_code_block
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout.sampler import OnFinish, Request, ignore
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.runtime import hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose

# Syncs from the end of a turn until its answer is due, if answers are processed in order. Most
# environments answer within that time.
_DELAY = 2


@dataclasses.dataclass(frozen=True)
class EpisodeSampler:
  """A `Sampler` whose responses are whole episodes. It can resume unfinished episodes."""

  engine: SlotEngine
  environments: Pool
  config: settings.EnvironmentConfig
  tokenizer: Tokenizer
  prompts: prompt.PromptConfig
  seed: int  # the run's seed
  purpose: Purpose  # what the responses are for
  in_order: bool  # True to process answers in an order that timing cannot change

  def generate(
    self, params: Params, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """See `Sampler.generate`. Each request must have an `episode_question`."""
    play = _Play(self, on_finish)
    first_requests = [play.begin(request) for request in requests]
    responses, metrics = self.engine.generate(params, first_requests, play.turn_written, play.more)
    play.end(responses)
    return [episode.response for episode in play.episodes], metrics | play.metrics()


@dataclasses.dataclass
class _Episode:
  """An episode in progress."""

  index: int  # the index of its request
  request: Request
  start: Beginning
  response: Response  # the response so far
  turn_texts: list[str]  # the text of each of the policy's turns
  last_row: int | None = None  # engine row of the last turn

  @property
  def key(self) -> str:
    """Return the episode's name in the environment pool. It is the same in every step."""
    return f'{self.request.question}:{self.start.seed}'

  @property
  def is_own(self) -> bool:
    """Return True if this host runs the environment. The assignment never changes between steps."""
    return hosts.is_own_share(self.request.question + self.request.sample)

  @property
  def begin_of_turn(self) -> int:
    """Return where the current turn begins: the number of tokens in answered turns."""
    return sum(turn.written + turn.observed for turn in self.response.turns)


class _Play:
  """The episodes of one `generate` call. Each turn is a row in the engine."""

  def __init__(self, sampler: EpisodeSampler, on_finish: OnFinish) -> None:
    self._sampler, self._on_finish = sampler, on_finish
    self.episodes: list[_Episode] = []
    self._row_episodes: list[_Episode] = []
    self._waiting: dict[str, _Episode] = {}  # episodes without an answer, by key, in turn order
    self._end_syncs: dict[str, int] = {}  # the sync at which the turn ended, by key
    self._early_answers: dict[str, Answer] = {}  # answers that are not due yet, by key
    self._sync, self._is_enough = 0, False
    self._seconds, self._idle = 0.0, 0.0
    self._counts = collections.defaultdict[str, float](float)  # sums by name

  def begin(self, request: Request) -> Request:
    """Begin or resume an episode, and return the request for its next turn."""
    assert request.episode_question is not None, 'an episode needs its question'
    place = self._sampler.purpose, request.step, request.question, request.sample
    rng = randomness.generator(self._sampler.seed, Purpose.ENVIRONMENT, *place)
    start = pool.beginning(request.episode_question, int(rng.integers(2**63)))
    prefix, tokenizer = request.prefix, self._sampler.tokenizer
    turn_texts = [tokenizer.decode(prefix.tokens[span]) for span, _ in turn_places(prefix.turns)]
    self.episodes.append(_Episode(len(self.episodes), request, start, request.prefix, turn_texts))
    return self._next_turn(self.episodes[-1])

  def turn_written(self, row: int, response: Response) -> None:
    """Record a finished turn. If this host runs the environment, also send the turn to it."""
    episode, tokenizer = self._row_episodes[row], self._sampler.tokenizer
    self._keep_tokens(episode, response)
    episode.last_row = row
    episode.turn_texts.append(tokenizer.decode(response.tokens[episode.begin_of_turn :]))
    self._waiting[episode.key], self._end_syncs[episode.key] = episode, self._sync
    if episode.is_own:
      self._sampler.environments.submit(episode.key, episode.start, episode.turn_texts)

  def more(self, is_idle: bool) -> list[Request] | None:
    """Return requests for the next turns of answered episodes; see `sampler.More`."""
    self._sync += 1
    requests = self._next_requests(self._sync - _DELAY, is_idle)
    while is_idle and self._waiting and not (requests or self._is_enough):
      requests = self._next_requests(self._sync - _DELAY, is_idle)
    return None if self._is_enough else requests

  def end(self, responses: Sequence[Response]) -> None:
    """Store the tokens of unfinished turns, and wait for the answers to finished turns."""
    for episode, response in zip(self._row_episodes, responses):
      if not (response.is_complete or episode.response.is_complete):
        self._keep_tokens(episode, response)
    while self._waiting:
      self._next_requests(self._sync, is_idle=True)

  def metrics(self) -> dict[str, float]:
    """Compute turns and observed tokens per episode, environment times, and environment counts."""
    counts = {f'environment/{name}': count for name, count in self._counts.items()}
    turn_lists = [
      episode.response.turns for episode in self.episodes if episode.response.is_complete
    ]
    if not turn_lists:
      return counts
    token_counts = [sum(turn.observed for turn in turns) for turns in turn_lists]
    return {
      'environment/turns_mean': float(np.mean([len(turns) for turns in turn_lists])),
      'environment/turns_max': float(max(map(len, turn_lists))),
      'environment/tokens_mean': float(np.mean(token_counts)),
      'environment/seconds': self._seconds,
      'environment/idle_seconds': self._idle,  # while no slot was decoding
      **counts,
    }

  def _keep_tokens(self, episode: _Episode, response: Response) -> None:
    turns = episode.response.turns
    episode.response = dataclasses.replace(
      response, turns=turns, is_complete=False, truncated=False
    )

  def _next_turn(self, episode: _Episode) -> Request:
    self._row_episodes.append(episode)
    request, max_tokens = episode.request, self._sampler.config.max_turn_tokens
    limit = min(request.limit, episode.begin_of_turn + (max_tokens or request.limit))
    return dataclasses.replace(
      request, prefix=episode.response, limit=limit, follows=episode.last_row
    )

  def _next_requests(self, last_sync: int, is_idle: bool) -> list[Request]:
    """Process answers that have arrived (or are due, if `in_order`) and request the next turns."""
    start = time.monotonic()
    if self._sampler.in_order:
      answers = self._due_answers(last_sync, is_idle)
    else:
      answers = self._sampler.environments.answers(wait=is_idle and bool(self._waiting))
    self._idle += time.monotonic() - start if is_idle else 0.0
    episodes = [self._apply_answer(answer) for answer in answers]
    return [self._next_turn(episode) for episode in episodes if not episode.response.is_complete]

  def _due_answers(self, last_sync: int, is_idle: bool) -> list[Answer]:
    """Await answers to turns that had ended as of `last_sync`.

    If `is_idle`, also await answers to the turns that ended first, even if they ended after
    `last_sync`.
    """
    oldest = next(iter(self._end_syncs.values()), 0) if is_idle else 0
    keys = [key for key, sync in self._end_syncs.items() if sync <= max(last_sync, oldest)]
    own_keys = [key for key in keys if self._waiting[key].is_own]
    while any(key not in self._early_answers for key in own_keys):
      new_answers = self._sampler.environments.answers(wait=True)
      self._early_answers |= {answer.key: answer for answer in new_answers}
    shares = (
      hosts.all_gather([self._early_answers.pop(key).as_json() for key in own_keys]) if keys else []
    )
    answers = {(answer := Answer.of_json(value)).key: answer for share in shares for value in share}
    return [answers[key] for key in keys]

  def _apply_answer(self, answer: Answer) -> _Episode:
    """Apply an answer to its episode, and return the episode, which may now be complete."""
    episode, result = self._waiting.pop(answer.key), answer.result
    del self._end_syncs[answer.key]
    self._seconds += answer.seconds
    response, config, begin = episode.response, self._sampler.config, episode.begin_of_turn
    turn = Turn(len(response.tokens) - begin, 0, 0.0)
    if isinstance(result, Failure):
      response = dataclasses.replace(response, turns=(*response.turns, turn))
      self._complete_episode(episode, response, Verdict(0.0, result.outcome, result.reason))
      return episode
    for name, count in result.counts.items():
      self._counts[name] += count
    turn_tokens, messages = response.tokens[begin:], as_messages(result.messages)
    formats = self._sampler.tokenizer, self._sampler.prompts
    observation = tokenizer.observed_tokens(*formats, turn_tokens, messages)
    is_last = result.done or len(episode.turn_texts) >= config.max_turns  # nobody reads the reply
    is_full = len(response.tokens) + len(observation) * (not is_last) >= episode.request.limit
    goes_on = not (is_last or is_full)
    observation = observation if goes_on else observation[:0]
    turn = turn._replace(observed=len(observation), reward=result.reward)
    response = dataclasses.replace(
      response.observing(observation),
      turns=(*response.turns, turn),
      truncated=is_full and not result.done,
    )
    if goes_on:
      episode.response = response
      return episode
    if not result.done and episode.is_own:
      self._sampler.environments.leave(answer.key)
    self._complete_episode(episode, response, verdict(config, response, result.success))
    return episode

  def _complete_episode(self, episode: _Episode, response: Response, verdict: Verdict) -> None:
    verdict = verdict._replace(has_code_block=any(map(has_code_block, episode.turn_texts)))
    episode.response = dataclasses.replace(response, is_complete=True, verdict=verdict)
    self._is_enough |= bool(self._on_finish(episode.index, episode.response))


def verdict(config: settings.EnvironmentConfig, response: Response, success: bool) -> Verdict:
  """Return the verdict on a complete episode; its reward is the discounted sum of turn rewards."""
  rewards = [turn.reward * config.discount**number for number, turn in enumerate(response.turns)]
  reward = float(sum(rewards))
  outcome = 'correct' if success else 'wrong'
  return Verdict(reward, outcome, components={'environment': reward})
