"""The paper's training loop, `take_steps`, and the parts of a step: collect, learn, remember."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.algorithm import objective, question_stream, replay
from exgrpo_jax.datatypes import Experience, Plan
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import scores
from exgrpo_jax.learner import checkpoint, gradients
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import alarms, messages, metrics, step_rows
from exgrpo_jax.reporting.comparison import scores_of
from exgrpo_jax.rollout import dynamic, stages
from exgrpo_jax.runtime import activity, preemption, randomness
from exgrpo_jax.runtime.clock import NO_TRAINING, traced
from exgrpo_jax.runtime.environment import peak_memory
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.training import export
from exgrpo_jax.training.run import Run, bucketed, check_policy, check_step, warn

# Prefixes of metrics that only some steps have, so that a name clash could surface late in a run.
_METRIC_PREFIXES = ('eval/', 'validation/', 'time/', 'perf/', 'memory/')


class Step(NamedTuple):
  """A finished step."""

  snapshot: Snapshot  # taken after the step; the next step donates its state
  experience: Experience
  metrics: Mapping[str, float]


def take_steps(run: Run, snapshot: Snapshot) -> Iterator[Step]:
  """Run the paper's loop from the snapshot to the last step, yielding each finished step.

  After a signal to stop, exits with preemption.EXIT_CODE at the end of the current step.
  """
  config, workdir = run.experiment.config, run.experiment.workdir
  first_step, state, buffer = snapshot.step + 1, snapshot.state, snapshot.buffer
  plan = stages.plan_step(run.rollout, buffer, snapshot.cursor, first_step, snapshot.partial_groups)
  steps = range(first_step, run.last_step + 1)
  with activity.doing(lambda: f'step {plan.step} of {config.num_steps}'):
    for step in traced(steps, config.metrics.traced_steps, workdir):
      experience = collect(run, state.params, plan)
      callback_metrics = observe(run, state.params, experience)
      state, sums = learn(run, state, experience)  # dispatches the update without waiting
      buffer, next_plan = remember(run, buffer, experience)
      # Waits for the update.
      step_metrics = report(run, state, buffer, experience, sums, callback_metrics)
      # Saved after the metrics, so that a resumed run has all of them.
      snapshot = Snapshot(step, state, buffer, experience.plan.cursor, experience.partial_groups)
      is_last = step == run.last_step
      save(run, snapshot, is_last)
      yield Step(snapshot, experience, step_metrics)
      if is_last:
        break
      plan = next_plan
  # A resumed run with a smaller patience may already be past `run.last_step`.
  if (last_step := snapshot.step) < config.num_steps:
    print(messages.ended_early(last_step, config.num_steps, config.evaluation.patience), flush=True)
  with activity.doing('writing the last checkpoint'):
    if config.export.last:
      export.keep_last(run.experiment, run.policy(state.params), last_step)
    run.checkpoints.wait_until_finished()


# ---- The parts of a step ----


def collect(run: Run, params: model.Params, plan: Plan) -> Experience:
  """Generate and grade responses to the planned questions, and pick replays. Doesn't train."""
  experiment, rollout, clock, policy = run.experiment, run.rollout, run.clock, run.policy(params)
  with clock('pick'):
    plan = stages.admit(rollout, policy, plan)
  with clock('reshard'):
    decode_params = model.decode_layout(experiment.model, policy, experiment.meshes)
    jax.block_until_ready(decode_params)
  with clock('generate'), activity.doing(run.grader.progress):
    plan, responses, sampling = dynamic.sample(rollout, decode_params, plan, run.grader)
  del decode_params  # free their memory for the update
  with clock('old_logprobs'):
    responses, mismatch = stages.old_logprobs(rollout, policy, plan, responses)
  with clock('grade', device_waits=True):
    groups = stages.collect_verdicts(rollout, plan, responses, run.grader)
    sampling |= dynamic.metrics(rollout, groups)
  with clock('pick'):
    replays, replay_scores = stages.pick_replays(rollout, policy, groups.plan)
  with clock('assemble', device_waits=True):
    batch = stages.assemble(rollout, groups, replays, replay_scores)
  return Experience(
    **groups._asdict(),
    replays=replays,
    scores=replay_scores,
    batch=batch,
    sampling=sampling,
    mismatch=mismatch,
  )


def observe(run: Run, params: model.Params, experience: Experience) -> dict[str, float]:
  """Call the run's callbacks before the step's update, and return the metrics they add.

  Raises InputError if a callback returns neither None nor a mapping from names to numbers.
  """
  callback_metrics: dict[str, float] = {}
  for callback in run.callbacks:
    with run.clock('callbacks'):
      result = callback(run, params, experience)
    try:
      numbers = dict({} if result is None else result).items()
      added = {str(name): float(value) for name, value in numbers}
    except (TypeError, ValueError) as error:
      raise InputError(
        f'callbacks: {getattr(callback, "__name__", callback)} returned {result!r}. Return a '
        "dict that maps metric names to numbers, such as {'mine/score': 0.5}, or None."
      ) from error
    if clashes := sorted(added.keys() & callback_metrics.keys()):
      raise InputError(f'callbacks: two of them return {clashes[0]}. Rename one of the metrics.')
    callback_metrics |= added
  _refuse_names(name for name in callback_metrics if name.startswith(_METRIC_PREFIXES))
  return callback_metrics


def _refuse_names(names: Iterable[str]) -> None:
  """Raise InputError unless `names`, the metrics that callbacks and the run both log, is empty."""
  if clashes := sorted(names):
    raise InputError(
      f'callbacks: the run itself logs {", ".join(clashes)}. Choose other names, such as '
      f"'mine/{clashes[0]}'."
    )


@activity.doing('learn')
def learn(
  run: Run, state: TrainState, experience: Experience
) -> tuple[TrainState, list[dict[str, jax.Array]]]:
  """Make `epochs` passes over the step's rows, with one update per minibatch of whole groups.

  From the second epoch on, the groups are shuffled. Returns the new state (`state` is donated) and
  a dict of sums for each epoch. It contains the sums of `objective.token_loss`, plus 'loss',
  'gradient_norm', 'learning_rate', 'skipped', 'updates' and, with `max_kl`, 'skipped_by_kl'. The
  sums are float32 device scalars and may not have been computed yet.
  """
  config = run.experiment.config
  clip = objective.clips_fresh_ratios(config.objective, experience.plan.replay_started)
  batch, count = experience.batch, config.optimizer.minibatches
  epoch_sums, order_Q, stacks, stopped = [], None, None, gradients.not_stopped(run.update)
  for epoch in range(config.optimizer.epochs):
    if epoch and count > 1:
      rng = randomness.generator(config.seed, Purpose.EPOCH_ORDER, experience.plan.step, epoch)
      order_Q = rng.permutation(config.rollout.questions)
    all_sums = []
    for index, minibatch in enumerate(gradients.minibatches(batch, count, order_Q)):
      if stacks is None or count > 1:  # otherwise each epoch has the same minibatch
        stacks = gradients.packed(run.update, minibatch)
      gradient, sums = gradients.minibatch_gradient(
        run.update, state.params, minibatch, clip, epoch == index == 0, run.initial, stopped, stacks
      )
      state, norms = gradients.apply_gradient(run.update, state, gradient, sums, stopped)
      del gradient  # free its memory for the next one
      stopped = norms.get('skipped_by_kl')
      all_sums.append(sums | {'updates': np.float32(1)} | norms)
    epoch_sums.append(objective.merge_sums(all_sums))
  run.clock.dispatched(epoch_sums)
  return state, epoch_sums


def remember(run: Run, buffer: replay.Buffer, experience: Experience) -> tuple[replay.Buffer, Plan]:
  """Update the buffer and plan the next step. The host does this while the device trains."""
  config, rollout, plan = run.experiment.config, run.rollout, experience.plan
  with run.clock('record'):
    groups = experience.replays, experience.responses, experience.verdicts
    if config.objective.baseline == 'history':
      buffer = replay.with_history(buffer, plan, experience.verdicts)
    stores_truncated = not config.objective.mask_truncated
    buffer = replay.record_step(config.replay, buffer, plan, *groups, stores_truncated)
  with run.clock('plan'):
    next_plan = stages.plan_step(
      rollout, buffer, plan.cursor, plan.step + 1, experience.partial_groups
    )
  if next_plan.epoch > plan.epoch:
    size, at_once = len(rollout.data.questions), config.rollout.questions_at_once
    if question_stream.reads_retired(next_plan.epoch, size, buffer.retired_epoch, at_once):
      print(
        f'epoch {next_plan.epoch}: fewer than {at_once} active questions are left, so retired '
        'questions are drawn again (but never replayed)',
        flush=True,
      )
  return buffer, next_plan


def report(
  run: Run,
  state: TrainState,
  buffer: replay.Buffer,
  experience: Experience,
  sums: Sequence[Mapping[str, jax.Array]],
  callback_metrics: Mapping[str, float],
) -> dict[str, float]:
  """Wait for the update, then warn, evaluate, and write the step's records, metrics and samples.

  Returns the metrics, including `callback_metrics`. Raises InputError if training has broken down.
  """
  config, plan, clock = run.experiment.config, experience.plan, run.clock
  tokenizer = run.experiment.tokenizer
  with clock('records'):
    before, after = run.bucketed, bucketed(run.experiment, buffer)
    group_indices = step_rows.recorded_groups(plan, config.metrics.recorded_groups, config.seed)
    rows = step_rows.rows(config.replay, tokenizer, experience, before, after, group_indices)
    run.records.add(plan.step, rows)
    run.bucketed = after
  with clock('await_update'):
    clock.await_device()
  step_metrics = step_rows.measure_step(experience, after, rows, jax.device_get(sums))
  check_step(run, experience, step_metrics)
  warn(run, experience, step_metrics)
  if plan.step in config.evaluation.steps(config.num_steps):
    policy = run.policy(state.params)
    with run.pace.evaluation():
      with clock('evaluate'):
        evaluation_metrics = scores.score_all(run.experiment, policy, run.evaluations, plan.step)
        step_metrics |= evaluation_metrics
        run.scores |= scores_of([{'step': plan.step} | evaluation_metrics], alarms.SCORE)
      if config.export.best:
        with clock('export', device_waits=True):
          export.keep_best(run.experiment, policy, plan.step, evaluation_metrics)
  step_metrics |= clock.seconds() | run.compiled.metrics() | peak_memory()
  other_seconds = sum(step_metrics.get(f'time/{phase}', 0.0) for phase in NO_TRAINING)
  seconds = step_metrics['time/step'] - other_seconds
  step_metrics['perf/tokens_per_second'] = step_metrics['length/total'] / seconds
  _refuse_names(callback_metrics.keys() & step_metrics.keys())
  step_metrics |= callback_metrics
  clock.restart()
  run.pace.finish_step()
  with clock('log', device_waits=True):
    remaining = [step for step in config.evaluation.steps(config.num_steps) if step > plan.step]
    seconds_left = run.pace.seconds_left(config.num_steps - plan.step, len(remaining))
    line = messages.progress_line(plan.step, config.num_steps, step_metrics, seconds_left)
    print(line, flush=True)
    samples = step_rows.sample_rows(tokenizer, experience, config.metrics.sampled_rows, config.seed)
    file = f'step_{plan.step:06d}.jsonl'
    metrics.write_rows(os.path.join(run.experiment.workdir, 'samples', file), samples)
    run.writer.write(plan.step, step_metrics, samples)
  return step_metrics


def save(run: Run, snapshot: Snapshot, is_last: bool) -> None:
  """Save a checkpoint if one is due. After a signal to stop, save and exit.

  Raises InputError without saving if the policy's probabilities are no longer finite, and the error
  of an earlier write that has failed.
  """
  if not run.checkpoints.is_saving_in_progress():
    run.checkpoints.wait_until_finished()  # doesn't wait, but raises the error of a failed write
  config = run.experiment.config
  is_due = snapshot.step % config.checkpoint.every == 0 or is_last
  if is_due:
    with run.clock('save', device_waits=True):
      _write(run, snapshot)
  if (signal_name := run.told_to_stop()) and not is_last:
    if not is_due:
      _write(run, snapshot)
    run.checkpoints.wait_until_finished()
    print(
      f'stopped by {signal_name}: the run was saved after step {snapshot.step} of '
      f'{config.num_steps}. Run the same command again to resume it.',
      file=sys.stderr,
      flush=True,
    )
    sys.exit(preemption.EXIT_CODE)


def _write(run: Run, snapshot: Snapshot) -> None:
  """Start writing a checkpoint. Raises InputError if the policy's probabilities aren't finite."""
  check_policy(run, snapshot)
  run.records.flush()  # so that a resumed run has the rows of all earlier steps
  run.writer.flush()
  checkpoint.save(run.checkpoints, snapshot, run.base_sums)
