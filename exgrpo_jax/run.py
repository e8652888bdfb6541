"""What the training loop works with, where it starts, and what it keeps in mind between steps."""

import dataclasses
from collections.abc import Callable, Sequence

import orbax.checkpoint as ocp

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.datatypes import Cursor, QuestionSet
from exgrpo_jax.experiment import Experiment
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, record_writer
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import compilations
from exgrpo_jax.runtime.clock import Clock
from exgrpo_jax.runtime.pace import Pace


@dataclasses.dataclass(frozen=True)
class Run:
  """What a training run has from its first step to its last."""

  experiment: Experiment
  rollout: Rollout
  evaluations: tuple[QuestionSet, ...]
  update: gradients.UpdateSpec
  reference: model.Params | None  # of the KL term, where there is one
  grader: pool.Grader
  writer: metrics.Writer
  records: record_writer.Writer
  checkpoints: ocp.CheckpointManager
  clock: Clock
  compiled: compilations.Counter
  told_to_stop: Callable[[], str]  # the signal's name, or ''


@dataclasses.dataclass
class Progress:
  """What changes with every step, and no checkpoint keeps."""

  pace: Pace
  buffer: Buffer  # after the last step that was reported
  silent_steps: int = 0  # in a row, up to now, without any difference in reward


def first_snapshot(
  experiment: Experiment,
  rollout: Rollout,
  params: model.Params,
  successes: Sequence[seeding.Candidate],
) -> Snapshot:
  """A run before its first step; updates will donate `params`."""
  config = experiment.config
  return Snapshot(
    step=0,
    state=optimizer.init(config.optimizer, config.num_updates, params),
    buffer=seeding.seeded(rollout, params, successes, config.experience.missing_logprobs),
    cursor=Cursor(),
  )
