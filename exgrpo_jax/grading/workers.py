"""The workers that judge: what they run, and what they are asked."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.settings import Config
from exgrpo_jax.runtime import worker_slot
from exgrpo_jax.runtime.worker_slot import START_TIMEOUT, Program, WorkerSlot

COMMAND = worker_slot.command('exgrpo_jax.grading.worker')

_NOUN = 'a grading process'
_STANDBY_DELAY = 0.1  # seconds; a response that takes longer may hang, so a standby is started
_MAX_STARTS = 3  # attempts to start a worker


def of_responses(
  config: Config,
  required: verifier.Config,
  row: Mapping[str, Any] | None = None,
  starts: int = _MAX_STARTS,
) -> WorkerSlot:
  """A slot whose worker judges responses, one at a time, under the limits of `config`.

  `row` is one of the data, to try the rewards that read it; None tries the others. `starts` as in
  WorkerSlot.
  """
  specs = [spec for spec in config.rewards if spec not in config.batched]
  setup = _setup(config, required, specs, row) | {'memory_limit': config.memory_limit}
  return WorkerSlot(Program(COMMAND, _NOUN, setup), starts, _STANDBY_DELAY)


def of_batches(
  config: Config, required: verifier.Config, row: Mapping[str, Any] | None = None
) -> WorkerSlot:
  """A slot whose process calls `config.batched`; `row` as for `of_responses`.

  It may load a model: no limit on its memory, no second process beside it, more time to start.
  """
  setup = _setup(config, required, config.batched, row) | {'is_batched': True}
  timeout, note = START_TIMEOUT + config.batch_timeout, ' (config.grading.batch_timeout included)'
  return WorkerSlot(Program(COMMAND, _NOUN, setup, timeout, note), starts=1)


def asked(slot: WorkerSlot, facts: Mapping[str, Any]) -> dict[str, Any]:
  """The facts that a worker's rewards ask for, as JSON can hold them; after `slot.ready`."""
  return {
    name: value.tolist() if isinstance(value, np.ndarray) else value
    for name, value in facts.items()
    if name in slot.greeting['asks']
  }


def _setup(
  config: Config,
  required: verifier.Config,
  specs: Sequence[str],
  row: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """The fields of worker.Setup."""
  return {
    'parent': os.getpid(),
    'memory_limit': 0,
    'max_length': config.max_length,
    'verifier': config.verifier,
    'rewards': specs,
    'is_batched': False,
    'overlong_buffer': config.overlong_buffer,
    'row': row,
    'required': dataclasses.asdict(required),
  }
