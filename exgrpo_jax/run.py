"""What the training loop works with, where it starts, and what it keeps in mind between steps."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import orbax.checkpoint as ocp

from exgrpo_jax.algorithm import replay
from exgrpo_jax.algorithm.replay import Bucketed, Buffer
from exgrpo_jax.datatypes import Cursor, Experience, QuestionSet
from exgrpo_jax.experiment import Experiment
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import early_stop, metrics, record_writer, regime, step_metrics
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import compilations, hosts
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
  bucketed: Bucketed  # the buffer after the last step that was reported
  silent_steps: int  # in a row, up to now, without any difference in reward
  scores: dict[int, float]  # step -> validation score
  history: regime.History


def progress_after(
  experiment: Experiment, rollout: Rollout, buffer: Buffer, compiled: compilations.Counter
) -> Progress:
  """That of a run with this buffer, after the steps of its metrics.jsonl."""
  past = metrics.read(experiment.workdir)
  is_silent = (record.get('zero_variance') == 1 for record in reversed(past))
  return Progress(
    pace=Pace(compiled, past),
    bucketed=bucketed(experiment, buffer),
    silent_steps=sum(1 for _ in itertools.takewhile(bool, is_silent)),
    scores=early_stop.scores(past),
    history=regime.history(regime_setup(experiment, rollout), past),
  )


def last_step(run: Run, progress: Progress) -> int:
  """The step after which the run ends, by what is known up to now; see `early_stop.last_step`."""
  config = run.experiment.config
  return early_stop.last_step(progress.scores, config.num_steps, config.evaluation.patience)


def bucketed(experiment: Experiment, buffer: Buffer) -> Bucketed:
  """The buffer with its buckets, by the run's config."""
  config = experiment.config
  return Bucketed(buffer, replay.buckets(config.replay, buffer, config.rollout.samples))


def warn(
  run: Run, progress: Progress, experience: Experience, measured: Mapping[str, float]
) -> None:
  """Prints what is wrong with a step, or with the last ones; `measured` are the step's metrics."""
  config, step = run.experiment.config, experience.plan.step
  progress.silent_steps = progress.silent_steps + 1 if measured['zero_variance'] == 1 else 0
  progress.history, departures = regime.observe(
    regime_setup(run.experiment, run.rollout), progress.history, {**measured, 'step': step}
  )
  for warning in (
    step_metrics.training_alarm(step, measured, progress.silent_steps, config.rollout.max_response),
    step_metrics.grading_alarm(step, experience.verdicts, config.grading.max_failures),
    *departures,
  ):
    if warning:
      hosts.warn(warning)


def regime_setup(experiment: Experiment, rollout: Rollout) -> regime.Setup:
  """What the warnings about a run depend on."""
  config = experiment.config
  return regime.Setup(
    num_steps=config.num_steps,
    pool=len(rollout.data.questions),
    questions=config.rollout.questions,
    samples=config.rollout.samples,
    replay=config.replay,
    objective=config.objective,
  )


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
