"""An open training run: its steps, buffer and policy.

`train` takes all steps of a run. With `open_run`, a notebook can take and inspect them one by one.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from ml_collections import ConfigDict

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.config import overridden
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import InputError, check_argument
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
from exgrpo_jax.learner import checkpoint, storage
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import alarms, messages, metrics, step_records
from exgrpo_jax.reporting.comparison import scores_of
from exgrpo_jax.reporting.report import write_at_end
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout.stages import RolloutSetup
from exgrpo_jax.runtime import activity, compilations, hosts, hub, machine, preemption
from exgrpo_jax.runtime.clock import Clock, Pace, watched
from exgrpo_jax.runtime.environment import PARAMETERS, QUESTIONS, record_start
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import (
  claim_workdir,
  has_begun,
  owned,
  read_config,
  release_workdir,
  stored_dtype,
)
from exgrpo_jax.training import export, prior_experience
from exgrpo_jax.training.checks import (
  check_data,
  check_rewards,
  check_start,
  fingerprint,
  warn_of_overlap,
)
from exgrpo_jax.training.loop import Step, save, take_steps
from exgrpo_jax.training.run import Callback, Run, alarm_setup, begin, bucketed

# Yields the steps' clock and `Run.told_to_stop`.
Guard = contextlib.AbstractContextManager[tuple[Clock, Callable[[], str]]]
# Initial parameters and successes of a new run. A resumed run has parameters only if it keeps them.
Start = tuple[model.Params | None, Sequence[seeding.Candidate]]


@dataclasses.dataclass
class Session:
  """An open run and its current snapshot, for use in a notebook."""

  run: Run
  snapshot: Snapshot  # after the last step
  is_open: bool = True  # False after the end of the block

  def steps(self) -> Iterator[Step]:
    """Take the remaining steps, one per iteration."""
    self._check(self.snapshot)
    for step in take_steps(self.run, self.snapshot):
      self.snapshot = step.snapshot
      yield step
      self._check(step.snapshot)

  def _check(self, snapshot: Snapshot) -> None:
    """Raise InputError if the run is closed, or another iterator took steps after `snapshot`."""
    if not self.is_open:
      raise InputError('steps(): the run is closed. Call open_run again to resume it.')
    if snapshot is not self.snapshot:
      raise InputError(
        'steps(): another iterator is already ahead of this one. Continue with that one.'
      )

  @property
  def buffer(self) -> Buffer:
    """Return the replay buffer. Later steps don't change it."""
    return self.snapshot.buffer

  @property
  def policy(self) -> Policy:
    """Return a copy of the current policy. Later steps don't change it."""
    experiment, params = self.run.experiment, self.run.policy(self.snapshot.state.params)
    decode_params = model.decode_layout(experiment.model, params, experiment.meshes)
    return Policy(Source('run', experiment.workdir), experiment, decode_params, self.snapshot.step)


@contextlib.contextmanager
def open_run(
  config: ConfigDict, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()
) -> Iterator[Session]:
  """Open a run to take its steps one at a time. Resumes the run in the workdir, if there is one.

  Writes the same files as train, and saves the last step at the end of the block. The block runs
  on the training mesh and locks the workdir, so no other run may write there. Raises InputError for
  anything that train rejects. `config` can be loaded with `config_files.load_config`.

  `callbacks` are called in each step before its update, with the run, the trained parameters and
  the step's Experience. They return metrics, which are added to the step's metrics.
  """
  check_argument('config', config, ConfigDict, "a ConfigDict, which load_config('smoke') returns")
  check_argument('workdir', workdir, (str, os.PathLike), "the path of the run's folder")
  check_argument('callbacks', callbacks, (list, tuple), 'a list of functions')
  workdir = os.fspath(workdir)
  check_start(config, workdir)
  with owned(workdir), explained(workdir):
    experiment, rollout, evaluations = load(config, workdir)
    if (newest_step := steps_done(workdir)) > experiment.config.num_steps:
      raise InputError(messages.finished(workdir, newest_step, experiment.config.length))
    explanation = machine.explained(lambda: memory.largest(experiment))
    with explanation, jax.set_mesh(experiment.meshes.training), compilations.counted() as compiled:
      start = claim(config, experiment, rollout)
      # No hang warnings or signal handlers: a person may pause, or interrupt as usual.
      guard = contextlib.nullcontext((Clock(), lambda: ''))
      with opened(experiment, rollout, evaluations, start, compiled, guard) as session:
        session.run.callbacks = callbacks
        try:
          yield session
        finally:
          session.is_open = False


@contextlib.contextmanager
def explained(workdir: str) -> Iterator[None]:
  """Turn errors caused by a full disk or too little memory into one-line InputErrors."""
  with checkpoint.explain_failure(workdir), machine.explained():
    yield


def load(
  config: ConfigDict, workdir: str
) -> tuple[Experiment, RolloutSetup, tuple[QuestionSet, ...]]:
  """Load the experiment, its rollout setup with the training questions, and its evaluation sets.

  The caller must have locked the workdir. Removes the files of a run that had a different
  config and never finished a step.
  """
  release_workdir(config, workdir)
  with activity.doing('reading the data'):
    experiment = open_experiment(config, workdir)
    memory.check(experiment)
    export.check(experiment.config, experiment.model)
    data = load_questions(experiment, experiment.config.data.train)
    check_data(experiment.config, data, workdir, steps_done(workdir))
    run_config = experiment.config.with_length(len(data.questions))
    experiment = dataclasses.replace(experiment, config=run_config)
    rollout = make_rollout(experiment, data)
    check_rewards(experiment.config, rollout.data)
    evaluations = load_evaluations(experiment)
  return experiment, rollout, evaluations


def steps_done(workdir: str) -> int:
  """Return the newest checkpoint's step, or 0 for a new run. All hosts must call this."""
  return hosts.broadcast_from_first(max(checkpoint.steps(workdir), default=0))


def claim(config: ConfigDict, experiment: Experiment, rollout: RolloutSetup) -> Start:
  """Claim the workdir for this config, and return the run's initial parameters and successes."""
  workdir = experiment.workdir
  is_new = not steps_done(workdir)
  successes = prior_experience.load(experiment, rollout.data) if is_new else ()
  checkpoint.check_space(workdir, state_shapes(experiment))
  needs_params = is_new or experiment.config.keeps_initial
  params = warm_start.initial_params(experiment, rollout.data) if needs_params else None
  hub.record(workdir)
  overrides = {}
  if experiment.config.num_epochs:
    overrides['num_steps'] = experiment.config.num_steps
  # A run started by an earlier version keeps 'auto', because it may have begun on another machine.
  if is_new or not has_begun(workdir) or stored_dtype(read_config(workdir)) != 'auto':
    overrides['model.dtype'] = experiment.model.dtype
  claim_workdir(overridden(config, overrides), workdir)
  keep_tokenizer(experiment)
  return params, successes


def keep_tokenizer(experiment: Experiment) -> None:
  """Write the tokenizer's files to workdir/tokenizer, completely or not at all.

  With these files, the run's records can be read on a machine that doesn't have the model. An
  existing folder is left alone. Only the first host writes.
  """
  folder = os.path.join(experiment.workdir, 'tokenizer')
  if not hosts.is_first() or os.path.exists(folder):
    return
  with replacing(folder) as temporary_folder:
    experiment.tokenizer.save(temporary_folder)


def train(
  experiment: Experiment,
  rollout: RolloutSetup,
  evaluations: tuple[QuestionSet, ...],
  start: Start,
  compiled: compilations.Counter,
  callbacks: Sequence[Callback] = (),
) -> None:
  """Take all steps, report hangs, and stop after SIGTERM. For `callbacks`, see `open_run`."""
  with opened(experiment, rollout, evaluations, start, compiled, _unattended_guard()) as session:
    session.run.callbacks = callbacks
    for _ in session.steps():
      pass


@contextlib.contextmanager
def opened(
  experiment: Experiment,
  rollout: RolloutSetup,
  evaluations: tuple[QuestionSet, ...],
  start: Start,
  compiled: compilations.Counter,
  guard: Guard,
) -> Iterator[Session]:
  """Open the run at its newest checkpoint. A new run is evaluated first.

  The training mesh must be set. `start` is the result of `claim`. `compiled` counts compilations.
  `guard` is entered after the initial evaluation. At the end, saves the last step if necessary.
  """
  config, workdir = experiment.config, experiment.workdir
  warn_of_overlap(rollout.data, evaluations)
  with checkpoint.open_manager(workdir, config.checkpoint) as manager:
    snapshot, initial, base_sums = begin(experiment, rollout, manager, *start)
    first_step = snapshot.step + 1 if snapshot.step else 0  # its records are rewritten
    settings = dataclasses.asdict(config)
    with (
      metrics.Writer(workdir, first_step, config.metrics.wandb_project, settings) as writer,
      step_records.Writer(workdir, first_step) as records,
      pool.Grader(config.grading, config.verifier) as grader,
    ):
      past_metrics = metrics.read(workdir, first_step)  # later steps may not be deleted yet
      score_of = scores_of(past_metrics, alarms.SCORE)  # validation score by step
      if first_step <= alarms.last_step(score_of, config.num_steps, config.evaluation.patience):
        record_start(workdir, first_step, _digests(rollout.data, snapshot, base_sums))
      pace = Pace(compiled, past_metrics)
      if not snapshot.step:
        policy = lora.joined(config.lora, initial, snapshot.state.params)
        with activity.doing('evaluate'), pace.evaluation():
          writer.write(0, results := scores.score_all(experiment, policy, evaluations, 0))
        score_of |= scores_of([{'step': 0} | results], alarms.SCORE)
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
          scores=score_of,
          history=alarms.history(alarm_setup(experiment, rollout), past_metrics),
        )
        yield (session := Session(run, snapshot))
        if (last := session.snapshot).step and last.step not in manager.all_steps():
          save(run, last, is_last=True)
        manager.wait_until_finished()
  if hosts.is_first() and (config.num_steps or evaluations):  # otherwise there are no metrics
    write_at_end(workdir)


def _digests(data: QuestionSet, start: Snapshot, base_sums: Mapping[str, int]) -> dict[str, str]:
  """Return the digests that `record_start` records. Only a new run has initial parameters."""
  initial = {} if start.step else {PARAMETERS: storage.digest(start.state, base_sums)}
  return {QUESTIONS: fingerprint(data)} | initial


@contextlib.contextmanager
def _unattended_guard() -> Iterator[tuple[Clock, Callable[[], str]]]:
  """Guard an unattended run: report hangs, and listen for signals."""
  with watched() as clock, preemption.listening() as told_to_stop:
    yield clock, told_to_stop
