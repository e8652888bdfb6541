"""Programs that grading workers run, and the facts about a response that workers receive."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.settings import GradingConfig
from exgrpo_jax.workers import pool
from exgrpo_jax.workers.pool import START_TIMEOUT, Program, Worker

COMMAND = pool.command('exgrpo_jax.grading.worker')


def program(
  config: GradingConfig,
  requirements: verifier.VerifierConfig,
  row: Mapping[str, Any] | None = None,
  is_batched: bool = False,
) -> Program:
  """Return the program that judges individual responses or, if `is_batched`, calls batched rewards.

  If a data `row` is given, the program tries only the rewards that read one. Otherwise, it tries
  only the others.
  """
  configs = {'config': dataclasses.asdict(config), 'requirements': dataclasses.asdict(requirements)}
  setup = {**configs, 'row': row, 'is_batched': is_batched}
  make = functools.partial(Program, COMMAND, setup, 'a grading process')
  if not is_batched:
    return make(
      late_reason=f'no verdict after {config.time_limit:g} s (config.grading.time_limit)',
      memory_limit=config.memory_limit,
      starts=3,
      standby_delay=0.1,  # a response that takes longer may be hanging
    )
  # This process may load a model, so it has no memory limit, no standby process and more time to
  # start.
  return make(
    late_reason=f'no rewards after {config.batch_timeout:g} s (config.grading.batch_timeout)',
    timeout=START_TIMEOUT + config.batch_timeout,
    timeout_note=' (config.grading.batch_timeout included)',
  )


def requested_facts(worker: Worker, facts: Mapping[str, Any]) -> dict[str, Any]:
  """Return the facts requested in a worker's greeting, converted to JSON types."""
  return {
    name: value.tolist() if isinstance(value, np.ndarray) else value
    for name, value in facts.items()
    if name in worker.greeting['asks']
  }
