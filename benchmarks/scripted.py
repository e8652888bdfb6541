"""Rollouts of consecutive steps with the real scheduler and scripted response lengths."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.frame import Bench
from exgrpo_jax.capacity import lengths
from exgrpo_jax.datatypes import Response
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import partial, settings
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE, Request
from exgrpo_jax.rollout.slots import Sync

_DRAWN = 4096  # number of groups before they repeat


class Group(NamedTuple):
  """The responses to one prompt."""

  number: int
  limits: list[int]  # tokens per response
  responses: list[Response]


class Taken(NamedTuple):
  """The rollout of a step."""

  syncs: list[Sync]
  lengths: np.ndarray  # int, tokens of the responses that the step trains on
  ages: list[int]  # their groups' staleness, in steps
  resumed: int  # tokens that were prefilled again

  @property
  def decoded(self) -> int:
    """Count the tokens that became part of a response."""
    return sum(sync.tokens for sync in self.syncs)

  @property
  def computed(self) -> int:
    """Count the tokens that the slots computed."""
    return sum(sync.steps * sync.slots for sync in self.syncs)


class Rollouts:
  """The rollouts of consecutive steps. With `carries`, groups may continue in later steps."""

  def __init__(self, bench: Bench, carries: bool) -> None:
    self.bench = bench
    self.config: settings.RolloutConfig = dataclasses.replace(bench.config.rollout, partial=carries)
    self._supply = drawn_groups(self.config)
    self._in_flight: list[Group] = []
    self._step = 0

  def take(self, params: Params) -> Taken:
    """Run the next step's rollout. `params` are in the decode layout."""
    self._step += 1
    missing = self.config.groups_in_flight - len(self._in_flight)
    self._in_flight += itertools.islice(self._supply, missing)
    before = [list(group.responses) for group in self._in_flight]
    syncs = self._generate(params)
    chosen = self._trained()
    assert chosen is not None, 'generate returns once the step can train'
    resumed = [
      self.config.max_prompt + len(then.tokens)
      for group, responses in zip(self._in_flight, before)
      for then, now in zip(responses, group.responses)
      if 0 < len(then.tokens) < len(now.tokens)
    ]
    trained = [self._in_flight[index] for index in chosen]
    ages = [
      self._step - min(one.first_step(self._step) for one in group.responses) for group in trained
    ]
    self._in_flight = [group for n, group in enumerate(self._in_flight) if n not in chosen]
    return Taken(syncs, np.concatenate([each.limits for each in trained]), ages, sum(resumed))

  def _generate(self, params: Params) -> list[Sync]:
    """Continue all incomplete responses, and store their new tokens in the groups."""
    bench, syncs = self.bench, list[Sync]()
    rows = [
      (group, sample)
      for group in self._in_flight
      for sample, response in enumerate(group.responses)
      if not response.is_complete
    ]
    begun = [group.responses[sample] for group, sample in rows]

    def keep(index: int, response: Response) -> bool:
      group, sample = rows[index]
      group.responses[sample] = partial.continued(self.config, begun[index], response, self._step)
      return self._trained() is not None

    if self._trained() is not None:
      return syncs
    requests = [
      Request(
        prompt=bench.prompt(group.number),
        question=group.number,
        sample=sample,
        step=0,
        limit=group.limits[sample],
        prefix=response,
      )
      for (group, sample), response in zip(rows, begun)
    ]
    engine = bench.engine(resumes=self.config.partial, on_sync=syncs.append)
    written, _ = engine.generate(params, requests, keep)
    for index, response in enumerate(written):
      keep(index, response)
    return syncs

  def _trained(self) -> list[int] | None:
    """Return the groups to train on, or None if too few are complete; see `partial.ready`."""
    responses = [group.responses for group in self._in_flight]
    return partial.ready(self.config, responses, self._step)


def drawn_groups(config: settings.RolloutConfig) -> Iterator[Group]:
  """Yield an endless sequence of groups, the same on every call."""
  drawn = lengths.draw('', _DRAWN * config.group_size, config.max_response)
  limits = itertools.cycle(drawn.reshape(-1, config.group_size).tolist())
  for number, group in enumerate(limits):
    yield Group(number, group, [EMPTY_RESPONSE] * config.group_size)
