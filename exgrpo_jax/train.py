"""Trains a policy with ExGRPO.

python -m exgrpo_jax.train --config=configs/arithmetic.py --workdir=/tmp/arithmetic

Exit status: 0 at the end, 2 for what cannot be run, 75 when told to stop by SIGTERM, after the
step has been finished and saved; the same command goes on.
"""

import concurrent.futures
import os
import sys
import time

import jax
import jax.numpy as jnp

from exgrpo_jax import evaluate, export, warm_start
from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.datatypes import Batch, Cursor
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import (
  CONFIG,
  WORKDIR,
  Experiment,
  load_questions,
  open_experiment,
  run_command,
)
from exgrpo_jax.grading import pool
from exgrpo_jax.huggingface import weights
from exgrpo_jax.learner import checkpoint, gradients, optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, plots, step_metrics
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import compilations, hosts, preemption, watchdog
from exgrpo_jax.runtime.workdir import check_hosts, check_workdir, check_writable, claim_workdir


def main() -> None:
  """Trains, or goes on, once all that can be checked before has been."""
  if not CONFIG.value or not WORKDIR.value:
    raise InputError(
      '--config and --workdir are both needed, e.g. --config=configs/smoke.py --workdir=/tmp/smoke.'
    )
  check_workdir(CONFIG.value, WORKDIR.value)
  check_writable(WORKDIR.value)
  check_hosts(CONFIG.value, WORKDIR.value)
  experiment = open_experiment(CONFIG.value, WORKDIR.value)
  pool.check(experiment.settings.grading, experiment.settings.verifier)
  rollout = rollout_of(experiment)
  for spec in experiment.settings.data.evaluation:
    load_questions(experiment, spec)  # what cannot be read is refused now, not after the warm start
  checkpoint.check_disk_space(WORKDIR.value, _state_shapes(experiment))
  # What a resumed run began with is read only where a KL term refers to it.
  goes_on = hosts.broadcast_from_first(bool(checkpoint.steps(WORKDIR.value)))
  needs_params = not goes_on or experiment.settings.objective.kl_coefficient
  params = initial_params(experiment) if needs_params else None
  claim_workdir(CONFIG.value, WORKDIR.value)
  run(experiment, rollout, params)


def _state_shapes(experiment):
  settings, shapes = experiment.settings, model.shapes(experiment.model, experiment.mesh)
  return optimizer.shapes(settings.optimizer, _num_updates(settings), shapes)


def rollout_of(experiment: Experiment) -> Rollout:
  """The rollout on the experiment's training questions; refuses too few of them."""
  settings = experiment.settings
  dataset, prompts = load_questions(experiment, settings.data.train)
  if len(dataset) < settings.rollout.questions:
    raise InputError(
      f'config.rollout.questions={settings.rollout.questions} must be at most the '
      f'{len(dataset)} questions of {settings.data.train}: no question comes twice '
      'in a step.'
    )
  return Rollout(
    settings.rollout,
    settings.replay,
    settings.objective,
    settings.parity,
    experiment.model,
    experiment.tokenizer,
    experiment.mesh,
    settings.seed,
    dataset,
    prompts,
  )


def initial_params(experiment: Experiment):
  """A checkpoint's parameters or random ones; after the warm start where the config has one."""
  path = experiment.settings.model.path
  if path:
    params = weights.load(path, experiment.model, experiment.mesh)
    print(
      f'weights of {path}: {sum(x.size for x in jax.tree.leaves(params)):,} parameters', flush=True
    )
  else:
    params = model.init(experiment.model, _key(experiment.settings, 'init', 0), experiment.mesh)
  if experiment.settings.warm_start.num_updates:
    params = warm_start.run(experiment, params)
  return params


def run(experiment: Experiment, rollout: Rollout, params) -> None:
  """Training and evaluation; goes on from the newest checkpoint in the workdir.

  `params` are what it begins with, and what a KL term refers to; None where it goes on and
  there is no such term.
  """
  settings, workdir = experiment.settings, experiment.workdir
  reference = params if settings.objective.kl_coefficient else None
  with (
    checkpoint.explain_full_disk(workdir),
    checkpoint.open_manager(workdir, settings.checkpoint) as manager,
  ):
    snapshot = checkpoint.restore_newest(manager, _state_shapes(experiment))
    if snapshot:
      print(f'resumed after step {snapshot.step} from {manager.directory}', flush=True)
    else:
      if reference is not None:  # a copy: the update gives its input's memory away
        reference = jax.tree.map(jnp.copy, params)
      snapshot = checkpoint.Snapshot(
        0,
        optimizer.init(settings.optimizer, _num_updates(settings), params),
        replay.Buffer(),
        Cursor(),
      )
    # Records of steps behind the checkpoint are written anew.
    first = snapshot.step + 1 if snapshot.step else 0
    with (
      metrics.Writer(workdir, first, settings.metrics.wandb_project) as writer,
      pool.Grader(settings.grading, settings.verifier) as grader,
      preemption.listening() as told_to_stop,
    ):
      if not snapshot.step:
        writer.write(0, _evaluated(experiment, snapshot.state.params, 0))
      with watchdog.watching() as clock:
        _steps(
          experiment, rollout, grader, writer, manager, snapshot, reference, told_to_stop, clock
        )
  if hosts.is_first():
    records = metrics.read(workdir)
    curves = os.path.join(workdir, 'curves.png')
    plots.curves(records, curves)
    print(f'{metrics.summary_table(records)}\ncurves: {curves}', flush=True)


def update(
  experiment: Experiment, state: TrainState, batch: Batch, clip: bool, reference=None
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One pass over a step's rows: an optimiser update for each minibatch of whole groups.

  Args:
    experiment: which objective, optimiser and model.
    state: given away; use the one returned.
    batch: all rows of the step, NumPy.
    clip: whether fresh ratios are clipped in this step.
    reference: parameters of the reference policy where the objective has a KL term.

  Returns:
    The new state and the step's sums (`update.minibatch`), on the device, not awaited.
  """
  count = experiment.settings.optimizer.minibatches
  size = len(batch.advantage_B) // count
  settings, found = _update_settings(experiment), []
  for index in range(count):
    rows = slice(index * size, (index + 1) * size)
    minibatch = jax.tree.map(lambda x, rows=rows: x[rows], batch)
    state, sums = gradients.minibatch(settings, state, minibatch, clip, index == 0, reference)
    found.append(sums)
  return state, objective.merge_sums(jax.tree.map(lambda *parts: jnp.stack(parts), *found))


def _update_settings(experiment):
  settings = experiment.settings
  return gradients.Settings(
    settings.gradient,
    settings.objective,
    settings.optimizer,
    experiment.model,
    experiment.mesh,
    _num_updates(settings),
    settings.rollout.temperature,
    settings.rollout.max_response,
    settings.rollout.logit_chunk,
  )


def _steps(experiment, rollout, grader, writer, manager, snapshot, reference, told_to_stop, clock):
  """The loop of the paper, one line a stage, from the snapshot to the last step.

  Exits with preemption.EXIT_CODE behind the step in which it was told to stop.
  """
  settings, silent = experiment.settings, 0
  done, state, buffer, cursor = snapshot
  started = time.monotonic()
  plan, cursor = rollout.plan(buffer, cursor, done + 1)
  for step in range(done + 1, settings.num_steps + 1):
    with clock('pick'):
      replays = rollout.pick_replays(state.params, plan)
    with clock('reshard'):
      weights_now = jax.block_until_ready(
        model.decode_layout(experiment.model, state.params, experiment.mesh)
      )
    with clock('generate'):
      responses = rollout.generate(weights_now, plan, _key(settings, 'step', step), grader.submit)
    del weights_now  # its memory is the update's
    with clock('reconcile'):
      responses, parity = rollout.reconcile(state.params, plan, responses)
    with clock('grade', device_waits=True):
      verdicts = rollout.grade(plan, responses, grader)
    with clock('assemble', device_waits=True):
      batch = rollout.assemble(plan, responses, replays, verdicts)
    state, sums = update(experiment, state, batch, _clips(settings, plan), reference)
    finished = _when_ready(sums)  # the device works on the update while the host goes on
    with clock('record'):
      buffer = replay.record_step(settings.replay, buffer, plan, responses, verdicts)
    with clock('plan'):
      next_plan, next_cursor = rollout.plan(buffer, cursor, step + 1)
    if next_plan.epoch > plan.epoch and rollout.reads_retired(buffer, next_plan.epoch):
      print(
        f'epoch {next_plan.epoch}: fewer than {settings.rollout.questions} questions are not '
        'yet retired, so retired ones are read again (and never replayed)',
        flush=True,
      )
    with clock('await_update'):
      clock.device_idle_since(finished.result())
    found = parity | _numbers(
      settings, plan, responses, replays, verdicts, buffer, jax.device_get(sums)
    )
    silent = silent + 1 if found['zero_variance'] == 1 else 0
    for warning in (
      step_metrics.training_alarm(step, found, silent, settings.rollout.max_response),
      step_metrics.grading_alarm(step, verdicts, settings.grading.max_failures),
    ):
      if warning:
        hosts.warn(warning)
    if step % settings.evaluation.every == 0 or step == settings.num_steps:
      with clock('evaluate'):
        scores = _evaluated(experiment, state.params, step)
        found |= scores
      if settings.export.best:
        with clock('export', device_waits=True):
          export.keep_best(experiment, state.params, step, evaluate.mean_score(scores))
    found |= clock.seconds() | compilations.metrics()
    found['speed/tokens_per_second'] = found['length/total'] / (
      found['time/step'] - found.get('time/evaluate', 0.0) - found.get('time/export', 0.0)
    )
    clock.restart()
    with clock('log', device_waits=True):
      seconds_left = (time.monotonic() - started) / (step - done) * (settings.num_steps - step)
      print(metrics.progress_line(step, settings.num_steps, found, seconds_left), flush=True)
      metrics.write_rows(
        os.path.join(experiment.workdir, 'samples', f'step_{step:06d}.jsonl'),
        rollout.samples(plan, responses, replays, verdicts, settings.metrics.sampled_rows),
      )
      writer.write(step, found)
    # After the metrics: a resumed run has them all.
    _save(settings, manager, clock, checkpoint.Snapshot(step, state, buffer, cursor), told_to_stop)
    plan, cursor = next_plan, next_cursor
  if settings.export.last:
    export.keep_last(experiment, state.params)
  manager.wait_until_finished()


def _save(settings, manager, clock, now, told_to_stop):
  """Saves where it is due; behind a save it exits where the run was told to stop."""
  is_last = now.step == settings.num_steps
  is_due = now.step % settings.checkpoint.every == 0 or is_last
  if is_due:
    with clock('save', device_waits=True):
      checkpoint.save(manager, now)
  if told_to_stop() and not is_last:
    if not is_due:
      checkpoint.save(manager, now)
    manager.wait_until_finished()
    print(
      f'told to stop by SIGTERM: saved after step {now.step} of {settings.num_steps}; the same '
      'command goes on',
      file=sys.stderr,
      flush=True,
    )
    sys.exit(preemption.EXIT_CODE)


def _numbers(settings, plan, responses, replays, verdicts, buffer, sums):
  """All metrics of a step but its times, as Python floats."""
  sums = {name: float(value) for name, value in sums.items()}
  found = step_metrics.rollout_metrics(plan, responses, replays, verdicts)
  found |= step_metrics.buffer_metrics(settings.replay, buffer, settings.rollout.samples)
  found |= objective.metrics(sums)
  updates = sums['updates']
  return found | {
    'loss': sums['loss'] / updates,
    'gradient_norm': sums['gradient_norm'] / updates,
    'skipped_updates': sums['skipped'],
  }


def _evaluated(experiment, params, step):
  found = {}
  for spec in experiment.settings.data.evaluation:
    found |= evaluate.evaluate(
      experiment,
      params,
      spec,
      step,
      _key(experiment.settings, 'evaluation', step),
      os.path.join(experiment.workdir, 'evaluation'),
    )
  print(f'evaluation after step {step}\n{evaluate.table(found)}', flush=True)
  return found


def _clips(settings, plan):
  return {'always': True, 'never': False, 'until_replay': not plan.replay_started}[
    settings.objective.clip
  ]


def _num_updates(settings):
  return settings.num_steps * settings.optimizer.minibatches


def _key(settings, purpose, step):
  purposes = ('init', 'step', 'evaluation')
  return jax.random.fold_in(
    jax.random.split(jax.random.key(settings.seed), len(purposes))[purposes.index(purpose)], step
  )


def _when_ready(values):
  """A future of the moment (time.monotonic) at which the device has computed `values`."""

  def wait():
    jax.block_until_ready(values)
    return time.monotonic()

  pool = concurrent.futures.ThreadPoolExecutor(1)
  moment = pool.submit(wait)
  pool.shutdown(wait=False)
  return moment


if __name__ == '__main__':
  run_command(main, on_all_hosts=True)
