"""Rollouts of one step after another whose responses have scripted lengths, by the real scheduler.

Lengths are lognormal, cut at 8 medians; where responses span steps, groups go on as in a run.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.datatypes import Response
from exgrpo_jax.performance import lengths
from exgrpo_jax.performance.workload import Workload, decode_spec, random_prompts
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import carry, scheduler, settings
from exgrpo_jax.rollout.slots import Sync

_CUT = 8  # medians, the 99th percentile
_MAX_AGE = 8  # steps, as in configs/base.py
_DRAWN = 4096  # groups, before they come again


class Group(NamedTuple):
  """The responses to one prompt."""

  number: int
  limits: list[int]  # tokens of each
  responses: list[Response]


class Taken(NamedTuple):
  """What a rollout did for a step."""

  syncs: list[Sync]
  lengths: np.ndarray  # int, tokens of the responses that the step trains
  ages: list[int]  # of their groups, in steps
  resumed: int  # tokens that were prefilled anew


@dataclasses.dataclass
class Rollouts:
  """One step's rollout after another, of scripted lengths."""

  workload: Workload
  mesh: jax.sharding.Mesh  # of decoding
  carries: bool
  closes_up: bool  # whether the cache is as short as it can be and, at last, few slots are left
  in_flight: list[Group] = dataclasses.field(default_factory=list)
  step: int = 0

  def __post_init__(self) -> None:
    self._supply = drawn_groups(self.workload)

  @functools.cached_property
  def config(self) -> settings.Config:
    """As a run has it."""
    workload = self.workload
    return settings.Config(
      questions=workload.questions,
      samples=workload.samples,
      max_prompt=workload.prompt,
      max_response=_CUT * workload.response,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      slots=workload.slots,
      carry=self.carries,
      in_flight=0,
      max_age=_MAX_AGE,
      logit_chunk=workload.chunk,
    )

  def take(self, params: Params) -> Taken:
    """The next step's, with these parameters in the decode layout."""
    self.step += 1
    missing = self.config.groups_in_flight - len(self.in_flight)
    self.in_flight += itertools.islice(self._supply, missing)
    before = [list(group.responses) for group in self.in_flight]
    syncs = self._generate(params)
    chosen = self._trained()
    assert chosen is not None, 'generate returns once the step can train'
    resumed = [
      self.workload.prompt + len(then.tokens)
      for group, responses in zip(self.in_flight, before)
      for then, now in zip(responses, group.responses)
      if 0 < len(then.tokens) < len(now.tokens)
    ]
    trained = [self.in_flight[index] for index in chosen]
    ages = [
      self.step - min(one.first_step(self.step) for one in group.responses) for group in trained
    ]
    self.in_flight = [group for n, group in enumerate(self.in_flight) if n not in chosen]
    return Taken(syncs, np.concatenate([each.limits for each in trained]), ages, sum(resumed))

  def _generate(self, params: Params) -> list[Sync]:
    """Goes on with what is not complete; the groups then hold what is written."""
    workload, config = self.workload, self.config
    rows = [
      (group, sample)
      for group in self.in_flight
      for sample, response in enumerate(group.responses)
      if not response.is_complete
    ]
    prompts = random_prompts(workload.model.vocab_size, config.groups_in_flight, workload.prompt)
    syncs: list[Sync] = []

    def keep(index: int, response: Response) -> None:
      group, sample = rows[index]
      group.responses[sample] = carry.continued(begun[index], response, self.step)

    begun = [group.responses[sample] for group, sample in rows]
    written = scheduler.generate(
      workload.model,
      params,
      [prompts[group.number % len(prompts)] for group, _ in rows],
      [group.number for group, _ in rows],
      [sample for _, sample in rows],
      jax.random.key(0),
      decode_spec(workload, config.max_prompt, config.max_response),
      self.mesh,
      on_finish=keep,
      limits=[group.limits[sample] for group, sample in rows],
      begun=None if self.closes_up else begun,
      is_enough=lambda: self._trained() is not None,
      on_sync=syncs.append,
    )
    for index, response in enumerate(written):
      keep(index, response)
    return syncs

  def _trained(self) -> list[int] | None:
    """Without carry it is all groups, once they are complete."""
    responses = [group.responses for group in self.in_flight]
    return carry.ready(responses, self.step, self.config.questions, self.config.max_age)


def drawn_groups(workload: Workload) -> Iterator[Group]:
  """Groups without end, the same on every call."""
  median, samples = workload.response, workload.samples
  limit = _CUT * median
  drawn = lengths.draw(f'lognormal:{median},{limit}', _DRAWN * samples, limit)
  limits = itertools.cycle(drawn.reshape(-1, samples).tolist())
  for number, group in enumerate(limits):
    yield Group(number, group, [carry.UNBEGUN] * samples)
