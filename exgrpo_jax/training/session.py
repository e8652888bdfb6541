"""A training run that is open in this process: its steps, its buffer, its policy.

`train` takes all of a run's steps; a notebook may take some, and look at what they did.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

import jax
from ml_collections import ConfigDict

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.evaluation import scores
from exgrpo_jax.experiment import memory, warm_start
from exgrpo_jax.experiment.experiment import (
  Experiment,
  load_evaluations,
  load_questions,
  open_experiment,
  state_shapes,
  update_spec,
)
from exgrpo_jax.experiment.generation import make_rollout
from exgrpo_jax.experiment.policies import Policy, Source
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import checkpoint, disk, storage
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import alarms, metrics, step_records
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
from exgrpo_jax.runtime.clock import Clock, Pace, watched
from exgrpo_jax.runtime.environment import record_start
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import claim_workdir, owned, release_workdir
from exgrpo_jax.training import export, prior_experience
from exgrpo_jax.training.checks import check_rewards, check_start
from exgrpo_jax.training.loop import Step, save, take_steps
from exgrpo_jax.training.run import Callback, Run, alarm_setup, begin, bucketed

Guard = contextlib.AbstractContextManager[tuple[Clock, Callable[[], str]]]
# What a new run begins with; a run that is resumed has parameters only where it keeps them.
Start = tuple[model.Params | None, Sequence[seeding.Candidate]]


@dataclasses.dataclass
class Session:
  """A run as a notebook has it, and where it stands."""

  run: Run
  snapshot: Snapshot  # after the last step that was taken

  def steps(self) -> Iterator[Step]:
    """The steps that are left, each taken when it is asked for; all of them end the run."""
    for step in take_steps(self.run, self.snapshot):
      self.snapshot = step.snapshot
      yield step

  @property
  def buffer(self) -> Buffer:
    """The replay buffer, a value that no later step changes."""
    return self.snapshot.buffer

  @property
  def policy(self) -> Policy:
    """A copy of the current policy, which no later step changes."""
    experiment = self.run.experiment
    source = Source('run', experiment.workdir)
    params = self.run.policy(self.snapshot.state.params)
    decode_params = model.decode_layout(experiment.model, params, experiment.meshes)
    return Policy(source, experiment, decode_params, self.snapshot.step)


@contextlib.contextmanager
def open_run(
  config: ConfigDict, workdir: str, callbacks: Sequence[Callback] = ()
) -> Iterator[Session]:
  """A run whose steps are taken by hand, resumed where the workdir holds one.

  Writes what train writes; a step that was taken and not yet saved is saved in the end. The block
  runs on the mesh of training, and holds the workdir: no other run may write there meanwhile.

  Args:
    config: such as `config_files.load_config` returns.
    workdir: the run's.
    callbacks: called in each step before its update, with the run, the parameters that are trained
      and the step's Experience; they return metrics, which become the step's.

  Raises:
    InputError: what train refuses.
  """
  check_start(config, workdir)
  with owned(workdir), explained(workdir):
    loaded = load(config, workdir)
    experiment, *_ = loaded
    full = machine.explained(lambda: memory.largest(experiment))
    with full, jax.set_mesh(experiment.meshes.training), compilations.counted() as compiled:
      start = claim(config, *loaded[:2])
      # A person may think between two steps, and stop them as any other code.
      guard = contextlib.nullcontext((Clock(), lambda: ''))
      with opened(*loaded, start, compiled, guard) as session:
        session.run.callbacks = callbacks
        yield session


@contextlib.contextmanager
def explained(workdir: str) -> Iterator[None]:
  """Turns a full disk, or too little memory, into an InputError of one line."""
  with disk.explain_failure(workdir), machine.explained():
    yield


def load(config: ConfigDict, workdir: str) -> tuple[Experiment, Rollout, tuple[QuestionSet, ...]]:
  """The experiment, its stages on the training questions, and the questions of its evaluations.

  The caller holds the workdir; what another config left there before its first step is removed.
  """
  release_workdir(config, workdir)
  with activity.doing('reading the data'):
    experiment = open_experiment(config, workdir)
    memory.check(experiment)
    export.check(experiment)
    rollout = make_rollout(experiment, load_questions(experiment, experiment.config.data.train))
    check_rewards(experiment.config, rollout.data)
    evaluations = load_evaluations(experiment)
  return experiment, rollout, evaluations


def steps_done(workdir: str) -> int:
  """The step of the newest checkpoint; 0 of a new run. All hosts call it."""
  return hosts.broadcast_from_first(max(checkpoint.steps(workdir), default=0))


def claim(config: ConfigDict, experiment: Experiment, rollout: Rollout) -> Start:
  """Claims the workdir for this config; returns what the run starts from."""
  workdir = experiment.workdir
  is_new = not steps_done(workdir)
  successes = prior_experience.load(experiment, rollout.data) if is_new else ()
  disk.check_space(workdir, state_shapes(experiment))
  needs_params = is_new or experiment.config.keeps_initial
  params = warm_start.initial_params(experiment, rollout.data) if needs_params else None
  hub.record(workdir)
  claim_workdir(config, workdir)
  keep_tokenizer(experiment)
  return params, successes


def keep_tokenizer(experiment: Experiment) -> None:
  """Writes the tokenizer's files into workdir/tokenizer, completely or not at all.

  With them what a run recorded can be read where its model is not. A folder that is there stays.
  Of several hosts only the first writes.
  """
  folder = os.path.join(experiment.workdir, 'tokenizer')
  if not hosts.is_first() or os.path.exists(folder):
    return
  with replacing(folder) as unfinished:
    experiment.tokenizer.save(unfinished)


def train(
  experiment: Experiment,
  rollout: Rollout,
  evaluations: tuple[QuestionSet, ...],
  start: Start,
  compiled: compilations.Counter,
  callbacks: Sequence[Callback] = (),
) -> None:
  """Takes all steps; watched, and stopped by SIGTERM after a step. For `callbacks` see open_run."""
  with opened(experiment, rollout, evaluations, start, compiled, _guarded()) as session:
    session.run.callbacks = callbacks
    for _ in session.steps():
      pass


@contextlib.contextmanager
def opened(
  experiment: Experiment,
  rollout: Rollout,
  evaluations: tuple[QuestionSet, ...],
  start: Start,
  compiled: compilations.Counter,
  guard: Guard,
) -> Iterator[Session]:
  """The run at its newest checkpoint, or at its start, where it is evaluated; on training's mesh.

  `start` is what `claim` returned; `compiled` counts the programs from now on. `guard` is entered
  after the evaluation at the start, and gives the clock of the steps and whether they are to end.
  """
  config, workdir = experiment.config, experiment.workdir
  with checkpoint.open_manager(workdir, config.checkpoint) as manager:
    snapshot, initial, base_sums = begin(experiment, rollout, manager, *start)
    first = snapshot.step + 1 if snapshot.step else 0  # records from here on are written again
    digest = '' if snapshot.step else storage.digest(snapshot.state, base_sums)
    settings = dataclasses.asdict(config)
    with (
      metrics.Writer(workdir, first, config.metrics.wandb_project, settings) as writer,
      step_records.Writer(workdir, first, config.metrics.records_every) as records,
      pool.Grader(config.grading, config.verifier) as grader,
    ):
      past = metrics.read(workdir)
      scored = alarms.scores_of(past)
      if first <= alarms.last_step(scored, config.num_steps, config.evaluation.patience):
        record_start(workdir, first, digest)
      pace = Pace(compiled, past)
      if not snapshot.step:
        policy = lora.joined(config.lora, initial, snapshot.state.params)
        with activity.doing('evaluate'), pace.evaluation():
          writer.write(0, scores.score_all(experiment, policy, evaluations, 0))
      with guard as (clock, told_to_stop):
        run = Run(
          experiment=experiment,
          rollout=rollout,
          evaluations=evaluations,
          update=update_spec(config, experiment.model, experiment.meshes.training),
          initial=initial,
          base_sums=base_sums,
          grader=grader,
          writer=writer,
          records=records,
          checkpoints=manager,
          clock=clock,
          compiled=compiled,
          told_to_stop=told_to_stop,
          pace=pace,
          bucketed=bucketed(experiment, snapshot.buffer),
          scores=scored,
          history=alarms.history(alarm_setup(experiment, rollout), past),
        )
        session = Session(run, snapshot)
        yield session
        _save_rest(session)
  if hosts.is_first() and (config.num_steps or evaluations):  # else there are no metrics
    write_at_end(workdir)


def _save_rest(session: Session) -> None:
  """Saves the last step that was taken, unless it is saved already."""
  run, snapshot = session.run, session.snapshot
  if snapshot.step and snapshot.step not in run.checkpoints.all_steps():
    save(run, snapshot, is_last=True)
  run.checkpoints.wait_until_finished()


@contextlib.contextmanager
def _guarded() -> Iterator[tuple[Clock, Callable[[], str]]]:
  """The guard of a run that is left to itself."""
  with watched() as clock, preemption.listening() as told_to_stop:
    yield clock, told_to_stop
