"""Trains a policy with ExGRPO.

python -m exgrpo_jax.train --config=arithmetic --workdir=/tmp/arithmetic

A run found in --workdir is resumed from its newest checkpoint. Exit status: 0 at the end, 2 for
what cannot be run, 75 after SIGTERM or Ctrl-C, once the step is finished and saved; then the same
command resumes.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli, evaluation, export, held_out, prior_experience, rehearsal, warm_start
from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.check import check_start
from exgrpo_jax.datatypes import Cursor, Experience, Plan, QuestionSet
from exgrpo_jax.experiment import (
  Experiment,
  keep_tokenizer,
  load_evaluations,
  load_questions,
  make_rollout,
  open_experiment,
  state_shapes,
  update_spec,
)
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import checkpoint, gradients
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy import model
from exgrpo_jax.report import write_at_end
from exgrpo_jax.reporting import (
  curves,
  messages,
  metrics,
  record_writer,
  samples,
  step_metrics,
  step_rows,
)
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.run import Progress, Run, bucketed, first_snapshot, progress_after, warn
from exgrpo_jax.runtime import (
  activity,
  compilations,
  console,
  hosts,
  preemption,
  randomness,
  watchdog,
)
from exgrpo_jax.runtime.clock import NO_TRAINING
from exgrpo_jax.runtime.environment import peak_memory, record_start
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import claim_workdir


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_workdir()
  flags.DEFINE_bool(
    'compile_only', False, 'Compiles all programs of the run into its compilation cache, and ends.'
  )


def main(args: cli.Args) -> None:
  """Trains, or resumes, after everything that can be checked has been."""
  config = check_start(args)
  done = hosts.broadcast_from_first(max(checkpoint.steps(args.workdir), default=0))
  if done > args.config.num_steps:
    print(messages.finished(args.workdir, done, args.config.num_steps), flush=True)
    return
  with console.opened(os.path.join(args.workdir, 'console.log')):
    with activity.doing('reading the data'):
      experiment = open_experiment(args.config, args.workdir)
      rollout = make_rollout(experiment, load_questions(experiment, config.data.train))
      evaluations = load_evaluations(experiment)
      held_out.check(config.alignment, evaluations)
    successes = () if done else prior_experience.load(experiment, rollout.data)
    with jax.set_mesh(experiment.meshes.training), compilations.counted() as compiled:
      every, num_steps = config.evaluation.every, config.num_steps
      print(messages.banner(rollout, evaluations, every, done, num_steps, args.workdir), flush=True)
      if args.compile_only:
        rehearsal.run(experiment, rollout)
        print(f'compiled {compiled}', flush=True)
        return
      checkpoint.check_disk_space(args.workdir, state_shapes(experiment))
      # A resumed run needs its initial parameters only where a KL term refers to them.
      needs_params = not done or config.objective.kl_coefficient
      params = warm_start.initial_params(experiment, rollout.data) if needs_params else None
      claim_workdir(args.config, args.workdir)
      keep_tokenizer(experiment)
      start_or_resume(experiment, rollout, evaluations, params, successes, compiled)
    if hosts.is_first():
      print(f'compiled {compiled}', flush=True)
      records, arguments = metrics.read(args.workdir), cli.config_arguments(sys.argv)
      print(messages.farewell(records, args.workdir, sys.orig_argv[0], arguments), flush=True)


def start_or_resume(
  experiment: Experiment,
  rollout: Rollout,
  evaluations: tuple[QuestionSet, ...],
  params: model.Params | None,
  successes: Sequence[seeding.Candidate],
  compiled: compilations.Counter,
) -> None:
  """Training and evaluation, from the newest checkpoint in the workdir where there is one.

  `params` are the initial ones, to which a KL term refers; None for a run that is resumed and has
  no such term. `successes` are what the buffer of a new run begins with.
  """
  config, workdir = experiment.config, experiment.workdir
  reference = params if config.objective.kl_coefficient else None
  with (
    checkpoint.explain_full_disk(workdir),
    checkpoint.open_manager(workdir, config.checkpoint) as manager,
  ):
    with activity.doing('reading the newest checkpoint'):
      snapshot = checkpoint.restore_newest(manager, state_shapes(experiment))
    if snapshot:
      print(f'resumed after step {snapshot.step} from {manager.directory}', flush=True)
    else:
      assert params is not None
      if reference is not None:  # a copy, for updates donate their input
        reference = model.copied(params)
      snapshot = first_snapshot(experiment, rollout, params, successes)
    first = snapshot.step + 1 if snapshot.step else 0  # records from here on are written again
    record_start(workdir, first)
    settings = dataclasses.asdict(config)
    with (
      metrics.Writer(workdir, first, config.metrics.wandb_project, settings) as writer,
      record_writer.Writer(workdir, first, config.metrics.records_every) as records,
      pool.Grader(config.grading, config.verifier) as grader,
    ):
      progress = progress_after(experiment, rollout, snapshot.buffer, compiled)
      if not snapshot.step:
        with activity.doing('evaluate'), progress.pace.evaluation():
          scores = evaluation.score_all(experiment, snapshot.state.params, evaluations, 0)
        writer.write(0, scores)
      with watchdog.watching() as clock, preemption.listening() as told_to_stop:
        run = Run(
          experiment=experiment,
          rollout=rollout,
          evaluations=evaluations,
          update=update_spec(config, experiment.model, experiment.meshes.training),
          reference=reference,
          grader=grader,
          writer=writer,
          records=records,
          checkpoints=manager,
          clock=clock,
          compiled=compiled,
          told_to_stop=told_to_stop,
        )
        take_steps(run, snapshot, progress)
  if hosts.is_first() and (config.num_steps or evaluations):  # else there is nothing to draw
    curves.draw(workdir)
    write_at_end(workdir)


def take_steps(run: Run, snapshot: Snapshot, progress: Progress) -> None:
  """The loop of the paper, from the snapshot to the last step.

  Exits with preemption.EXIT_CODE after the step in which the run was told to stop.
  """
  num_steps = run.experiment.config.num_steps
  done, state, buffer = snapshot.step, snapshot.state, snapshot.buffer
  plan, cursor = run.rollout.plan(buffer, snapshot.cursor, done + 1)
  with activity.doing(lambda: f'step {plan.step} of {num_steps}'):
    for step in range(done + 1, num_steps + 1):
      experience = collect(run, state.params, plan)
      state, sums = learn(run, state, experience)  # dispatched, not awaited
      buffer, next_plan, next_cursor = remember(run, buffer, cursor, experience)
      report(run, progress, state, buffer, experience, sums)  # awaits the update
      # After the metrics, so that a resumed run has them all.
      save(run, Snapshot(step=step, state=state, buffer=buffer, cursor=cursor))
      plan, cursor = next_plan, next_cursor
  with activity.doing('writing the last checkpoint'):
    if run.experiment.config.export.last:
      export.keep_last(run.experiment, state.params)
    run.checkpoints.wait_until_finished()


# ---- The movements of a step ----


def collect(run: Run, params: model.Params, plan: Plan) -> Experience:
  """Fresh and replayed responses to the plan's questions, graded: no parameter changes."""
  experiment, rollout, clock = run.experiment, run.rollout, run.clock
  with clock('pick'):
    replays, scores = rollout.pick_replays(params, plan)
  with clock('reshard'):
    decode_params = jax.block_until_ready(
      model.decode_layout(experiment.model, params, experiment.meshes)
    )
  with clock('generate'), activity.doing(run.grader.progress):
    key = randomness.key(experiment.config.seed, Purpose.ROLLOUT, plan.step)
    responses = rollout.generate(decode_params, plan, key, run.grader.submit)
  del decode_params  # the update needs their memory
  with clock('old_logprobs'):
    responses, parity = rollout.old_logprobs(params, plan, responses)
  with clock('grade', device_waits=True):
    verdicts = rollout.grade(plan, responses, run.grader)
  with clock('assemble', device_waits=True):
    batch = rollout.assemble(plan, responses, replays, verdicts)
  aligned = held_out.measure_alignment(run, params, plan, batch)
  return Experience(
    plan=plan,
    replays=replays,
    scores=scores,
    responses=responses,
    verdicts=verdicts,
    batch=batch,
    parity=parity,
    alignment=aligned,
  )


@activity.doing('learn')
def learn(
  run: Run, state: TrainState, experience: Experience
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One pass over the step's rows: an optimiser update for each minibatch of whole groups.

  `state` is donated; use the one returned. The sums are float32 scalars on the device, not
  awaited: those of `objective.token_loss`, 'loss', 'gradient_norm', 'learning_rate', 'skipped' and
  'updates'.
  """
  config = run.experiment.config
  clip = objective.clips_fresh_ratios(config.objective, experience.plan.replay_started)
  all_sums = []
  minibatches = gradients.minibatches(experience.batch, config.optimizer.minibatches)
  for index, minibatch in enumerate(minibatches):
    gradient, sums = gradients.minibatch_gradient(
      run.update, state.params, minibatch, clip, index == 0, run.reference
    )
    state, norms = gradients.apply_gradient(run.update, state, gradient)
    del gradient  # the next one needs its memory
    all_sums.append(sums | norms | {'updates': np.float32(1)})
  sums = objective.merge_sums(all_sums)
  run.clock.dispatched(sums)
  return state, sums


def remember(
  run: Run, buffer: replay.Buffer, cursor: Cursor, experience: Experience
) -> tuple[replay.Buffer, Plan, Cursor]:
  """The buffer after the step, and the next step's plan: host work while the device learns."""
  config, rollout, plan = run.experiment.config, run.rollout, experience.plan
  with run.clock('record'):
    buffer = replay.record_step(
      config.replay,
      buffer,
      plan,
      experience.replays,
      experience.responses,
      experience.verdicts,
    )
  with run.clock('plan'):
    next_plan, next_cursor = rollout.plan(buffer, cursor, plan.step + 1)
  if next_plan.epoch > plan.epoch and rollout.reads_retired(buffer, next_plan.epoch):
    print(
      f'epoch {next_plan.epoch}: fewer than {config.rollout.questions} questions are not yet '
      'retired, so retired ones are read again (and never replayed)',
      flush=True,
    )
  return buffer, next_plan, next_cursor


def report(
  run: Run,
  progress: Progress,
  state: TrainState,
  buffer: replay.Buffer,
  experience: Experience,
  sums: Mapping[str, jax.Array],
) -> None:
  """Awaits the update; warns, evaluates, and writes the step's records, metrics and samples."""
  config, plan, clock = run.experiment.config, experience.plan, run.clock
  tokenizer = run.experiment.tokenizer
  with clock('records'):
    before, after = progress.bucketed, bucketed(run.experiment, buffer)
    chosen = step_rows.recorded_groups(plan, config.metrics.recorded_groups, config.seed)
    rows = step_rows.rows(config.replay, tokenizer, experience, before, after, chosen)
    run.records.add(plan.step, rows)
    progress.bucketed = after
  with clock('await_update'):
    clock.await_device()
  measured = step_metrics.measure(experience, after, rows, jax.device_get(sums))
  warn(run, progress, experience, measured)
  if plan.step in config.evaluation.steps(config.num_steps):
    with progress.pace.evaluation():
      with clock('evaluate'):
        scores = evaluation.score_all(run.experiment, state.params, run.evaluations, plan.step)
        measured |= scores
      if config.export.best:
        with clock('export', device_waits=True):
          export.keep_best(run.experiment, state.params, plan.step, scores['validation/score'])
  measured |= clock.seconds() | run.compiled.metrics() | peak_memory()
  apart = sum(measured.get(f'time/{phase}', 0.0) for phase in NO_TRAINING)
  measured['speed/tokens_per_second'] = measured['length/total'] / (measured['time/step'] - apart)
  clock.restart()
  progress.pace.finish_step()
  with clock('log', device_waits=True):
    due = [step for step in config.evaluation.steps(config.num_steps) if step > plan.step]
    seconds_left = progress.pace.seconds_left(config.num_steps - plan.step, len(due))
    print(messages.progress_line(plan.step, config.num_steps, measured, seconds_left), flush=True)
    sampled = samples.sample_rows(tokenizer, experience, config.metrics.sampled_rows, config.seed)
    file = f'step_{plan.step:06d}.jsonl'
    metrics.write_rows(os.path.join(run.experiment.workdir, 'samples', file), sampled)
    run.writer.write(plan.step, measured, sampled)


def save(run: Run, snapshot: Snapshot) -> None:
  """Saves where it is due; exits, once saved, where the run was told to stop."""
  config, manager = run.experiment.config, run.checkpoints
  is_last = snapshot.step == config.num_steps
  is_due = snapshot.step % config.checkpoint.every == 0 or is_last
  if is_due:
    with run.clock('save', device_waits=True):
      run.records.flush()  # a resumed run has the rows of all steps that it does not repeat
      checkpoint.save(manager, snapshot)
  if (signal_name := run.told_to_stop()) and not is_last:
    if not is_due:
      run.records.flush()
      checkpoint.save(manager, snapshot)
    manager.wait_until_finished()
    print(
      f'stopped by {signal_name}: saved after step {snapshot.step} of {config.num_steps}; the '
      'same command resumes',
      file=sys.stderr,
      flush=True,
    )
    sys.exit(preemption.EXIT_CODE)


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
