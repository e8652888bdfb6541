"""The workers that judge: what they run, and what they are told of a response."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.settings import GradingConfig
from exgrpo_jax.workers import pool
from exgrpo_jax.workers.pool import START_TIMEOUT, Program, Worker

COMMAND = pool.command('exgrpo_jax.grading.worker')

_NOUN = 'a grading process'


def program(
  config: GradingConfig,
  required: verifier.VerifierConfig,
  row: Mapping[str, Any] | None = None,
  is_batched: bool = False,
) -> Program:
  """Return what judges responses one at a time, or what calls the rewards that take batches.

  `row` is one of the data, to try the rewards that read it; None tries the others.
  """
  known = {'config': dataclasses.asdict(config), 'required': dataclasses.asdict(required)}
  setup = {**known, 'row': row, 'is_batched': is_batched}
  if not is_batched:
    return Program(
      COMMAND,
      setup,
      _NOUN,
      late=f'no verdict after {config.time_limit:g} s',
      memory_limit=config.memory_limit,
      starts=3,
      standby_delay=0.1,  # a response that takes longer may hang
    )
  # It may load a model: no limit on its memory, no second process beside it, more time to start.
  return Program(
    COMMAND,
    setup,
    _NOUN,
    late=f'no rewards after {config.batch_timeout:g} s',
    timeout=START_TIMEOUT + config.batch_timeout,
    timeout_note=' (config.grading.batch_timeout included)',
  )


def asked(worker: Worker, facts: Mapping[str, Any]) -> dict[str, Any]:
  """Return the facts that a worker's rewards ask for, as JSON can hold them, once it is ready."""
  return {
    name: value.tolist() if isinstance(value, np.ndarray) else value
    for name, value in facts.items()
    if name in worker.greeting['asks']
  }
