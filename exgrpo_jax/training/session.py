"""A training run that is open in this process: its steps, its buffer, its policy.

`train` takes all of a run's steps; a notebook may take some, and look at what they did.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.evaluation import scores
from exgrpo_jax.experiment import warm_start
from exgrpo_jax.experiment.experiment import (
  Experiment,
  load_evaluations,
  load_questions,
  make_rollout,
  open_experiment,
  state_shapes,
  update_spec,
)
from exgrpo_jax.experiment.policies import Policy, Source
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import checkpoint, checksums, disk
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import curves, metrics, record_writer
from exgrpo_jax.reporting.report import write_at_end
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import (
  activity,
  compilations,
  hosts,
  hub,
  machine,
  preemption,
)
from exgrpo_jax.runtime.clock import Clock, watched
from exgrpo_jax.runtime.environment import record_start
from exgrpo_jax.runtime.workdir import claim_workdir, owned
from exgrpo_jax.training import held_out, prior_experience
from exgrpo_jax.training.checks import check_rewards, check_start
from exgrpo_jax.training.loop import Step, save, take_steps
from exgrpo_jax.training.run import Progress, Run, begin, progress_after

Guard = contextlib.AbstractContextManager[tuple[Clock, Callable[[], str]]]


@dataclasses.dataclass
class Session:
  """A run that is open, and where it stands."""

  run: Run
  progress: Progress
  snapshot: Snapshot  # after the last step that was taken

  def steps(self) -> Iterator[Step]:
    """The steps that are left, each taken when it is asked for; all of them end the run."""
    for step in take_steps(self.run, self.snapshot, self.progress):
      self.snapshot = step.snapshot
      yield step

  @property
  def buffer(self) -> Buffer:
    """The replay buffer, a value that no later step changes."""
    return self.snapshot.buffer

  @property
  def policy(self) -> Policy:
    """As it is now; the next step takes its memory."""
    experiment = self.run.experiment
    source = Source('run', experiment.workdir)
    params = self.run.policy(self.snapshot.state.params)
    return Policy(source, experiment, params, self.snapshot.step)


class Loaded(NamedTuple):
  """What a run is about: all that is read before anything is computed."""

  experiment: Experiment
  rollout: Rollout  # on the training questions
  evaluations: tuple[QuestionSet, ...]
  successes: Sequence[seeding.Candidate]  # what the buffer of a new run begins with
  done: int  # steps up to the newest checkpoint


@contextlib.contextmanager
def open_run(config: ConfigDict, workdir: str) -> Iterator[Session]:
  """A run whose steps are taken by hand, resumed where the workdir holds one.

  Writes what train writes; a step that was taken and not yet saved is saved in the end. The block
  runs on the mesh of training, and holds the workdir: no other run may write there meanwhile.

  Args:
    config: such as `config_files.load_config` returns.
    workdir: the run's.

  Raises:
    InputError: what train refuses.
  """
  check_start(config, workdir)
  with owned(workdir), explained(workdir):
    loaded = load(config, workdir)
    with jax.set_mesh(loaded.experiment.meshes.training), compilations.counted() as compiled:
      params = claim(loaded, config)
      # A person may think between two steps, and stop them as any other code.
      guard = contextlib.nullcontext((Clock(), lambda: ''))
      with opened(loaded, params, compiled, guard) as session:
        yield session


@contextlib.contextmanager
def explained(workdir: str) -> Iterator[None]:
  """Says in one line, as an InputError, what is wrong with a machine: its disk, or its memory."""
  with disk.explain_failure(workdir), machine.explained():
    yield


def load(config: ConfigDict, workdir: str) -> Loaded:
  """Reads the data and opens the experiment."""
  done = hosts.broadcast_from_first(max(checkpoint.steps(workdir), default=0))
  with activity.doing('reading the data'):
    experiment = open_experiment(config, workdir)
    rollout = make_rollout(experiment, load_questions(experiment, experiment.config.data.train))
    check_rewards(experiment.config, rollout.data)
    evaluations = load_evaluations(experiment)
    held_out.check(experiment.config.alignment, evaluations)
  successes = () if done else prior_experience.load(experiment, rollout.data)
  return Loaded(experiment, rollout, evaluations, successes, done)


def claim(loaded: Loaded, config: ConfigDict) -> model.Params | None:
  """Makes the workdir this config's; returns what the run starts from, None where it needs none."""
  experiment, workdir = loaded.experiment, loaded.experiment.workdir
  disk.check_space(workdir, state_shapes(experiment))
  needs_params = not loaded.done or experiment.config.keeps_initial
  params = warm_start.initial_params(experiment, loaded.rollout.data) if needs_params else None
  hub.record(workdir)
  claim_workdir(config, workdir)
  keep_tokenizer(experiment)
  return params


def keep_tokenizer(experiment: Experiment) -> None:
  """Writes the tokenizer's files into workdir/tokenizer, completely or not at all.

  With them what a run recorded can be read where its model is not. A folder that is there stays.
  Of several hosts only the first writes.
  """
  folder = os.path.join(experiment.workdir, 'tokenizer')
  if not hosts.is_first() or os.path.exists(folder):
    return
  unfinished = folder + '.new'
  shutil.rmtree(unfinished, ignore_errors=True)  # what a kill left
  experiment.tokenizer.save(unfinished)
  os.replace(unfinished, folder)


def train(loaded: Loaded, params: model.Params | None, compiled: compilations.Counter) -> None:
  """Takes all steps; watched, and stopped by SIGTERM after a step."""
  with opened(loaded, params, compiled, _guarded()) as session:
    for _ in session.steps():
      pass


@contextlib.contextmanager
def opened(
  loaded: Loaded, params: model.Params | None, compiled: compilations.Counter, guard: Guard
) -> Iterator[Session]:
  """The run at its newest checkpoint, or at its start, where it is evaluated; on training's mesh.

  Args:
    loaded: what the run is about.
    params: the initial ones; None for a run that is resumed and does not keep them.
    compiled: counts the programs from now on.
    guard: entered after the evaluation at the start; gives the clock of the steps, and whether they
      are to end.
  """
  experiment, config, workdir = (
    loaded.experiment,
    loaded.experiment.config,
    loaded.experiment.workdir,
  )
  with checkpoint.open_manager(workdir, config.checkpoint) as manager:
    snapshot, kept = begin(experiment, loaded.rollout, manager, params, loaded.successes)
    first = snapshot.step + 1 if snapshot.step else 0  # records from here on are written again
    digest = '' if snapshot.step else checksums.digest(snapshot.state, kept.base_sums)
    record_start(workdir, first, digest)
    settings = dataclasses.asdict(config)
    with (
      metrics.Writer(workdir, first, config.metrics.wandb_project, settings) as writer,
      record_writer.Writer(workdir, first, config.metrics.records_every) as records,
      pool.Grader(config.grading, config.verifier) as grader,
    ):
      progress = progress_after(experiment, loaded.rollout, snapshot.buffer, compiled)
      if not snapshot.step:
        policy = lora.joined(config.lora, kept.initial, snapshot.state.params)
        with activity.doing('evaluate'), progress.pace.evaluation():
          evaluated = scores.score_all(experiment, policy, loaded.evaluations, 0)
        writer.write(0, evaluated)
      with guard as (clock, told_to_stop):
        run = Run(
          experiment=experiment,
          rollout=loaded.rollout,
          evaluations=loaded.evaluations,
          update=update_spec(config, experiment.model, experiment.meshes.training),
          kept=kept,
          grader=grader,
          writer=writer,
          records=records,
          checkpoints=manager,
          clock=clock,
          compiled=compiled,
          told_to_stop=told_to_stop,
        )
        session = Session(run, progress, snapshot)
        yield session
        _save_rest(session)
  if hosts.is_first() and (config.num_steps or loaded.evaluations):  # else nothing to draw
    curves.draw(workdir)
    write_at_end(workdir)


def _save_rest(session: Session) -> None:
  """Saves the last step that was taken, unless it is saved already."""
  run, snapshot = session.run, session.snapshot
  if snapshot.step and snapshot.step not in run.checkpoints.all_steps():
    save(run, snapshot, is_last=True)
  run.checkpoints.wait_until_finished()


@contextlib.contextmanager
def _guarded() -> Iterator[tuple[Clock, Callable[[], str]]]:
  """Of a run that is left to itself."""
  with watched() as clock, preemption.listening() as told_to_stop:
    yield clock, told_to_stop
