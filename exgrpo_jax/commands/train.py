"""Train a policy with ExGRPO.

exgrpo train --config=arithmetic --workdir=/tmp/arithmetic

If --workdir contains a run, that run is resumed from its newest checkpoint. Exit status: 0 if the
run is complete, 1 if it failed, 2 if the command cannot run, 75 if SIGTERM or Ctrl-C stopped it. In
the last case, the current step is finished and saved first. To resume, run the same command again.
"""

import os
from collections.abc import Sequence

import jax
from absl import flags

from exgrpo_jax.capacity import rehearsal
from exgrpo_jax.commands import command_line
from exgrpo_jax.experiment import memory
from exgrpo_jax.experiment.experiment import RunConfig
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.reporting import messages, metrics
from exgrpo_jax.runtime import compilations, console, hosts, machine
from exgrpo_jax.runtime.workdir import owned
from exgrpo_jax.training import export, session
from exgrpo_jax.training.checks import check_start
from exgrpo_jax.training.run import Callback


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_bool(
    'compile_only', False, 'Compile all programs of the run into its compilation cache, then exit.'
  )


def main(args: command_line.Args, callbacks: Sequence[Callback] = ()) -> None:
  """Check everything that can be checked up front, then train or resume.

  For `callbacks`, see `session.open_run`.
  """
  config, workdir = check_start(args.config, args.workdir), args.workdir
  newest_step = session.steps_done(workdir)
  if not config.num_epochs and _is_finished(config, workdir, newest_step):
    return
  log = os.path.join(workdir, 'console.log')
  with owned(workdir), console.opened(log), session.explained(workdir):
    _train(args, newest_step, callbacks)


def _is_finished(config: RunConfig, workdir: str, newest_step: int) -> bool:
  """Print a message and return True if the run has taken more steps than the config specifies."""
  if newest_step > config.num_steps:
    print(messages.finished(workdir, newest_step, config.length), flush=True)
  return newest_step > config.num_steps


def _train(args: command_line.Args, newest_step: int, callbacks: Sequence[Callback]) -> None:
  """Run the remaining training steps, or only compile the programs."""
  workdir = args.workdir
  experiment, rollout, evaluations = session.load(args.config, workdir)
  config = experiment.config  # with the number of steps, which may depend on the data
  if _is_finished(config, workdir, newest_step):
    return
  explanation = machine.explained(lambda: memory.largest(experiment))
  with explanation, jax.set_mesh(experiment.meshes.training), compilations.counted() as compiled:
    every, epochs = config.evaluation.every, config.num_epochs
    length = f'{config.num_steps:,}' + f', config.num_epochs={epochs:g}' * bool(epochs)
    print(messages.banner(rollout, evaluations, every, newest_step, length, workdir), flush=True)
    if args.compile_only:
      rehearsal.run(experiment)
      print(f'compiled {compiled}', flush=True)
      return
    start = session.claim(args.config, experiment, rollout)
    session.train(experiment, rollout, evaluations, start, compiled, callbacks)
  if hosts.is_first():
    print(f'compiled {compiled}', flush=True)
    is_saved = bool(checkpoint.steps(workdir))  # False if config.num_steps is 0
    text = messages.farewell(
      metrics.read(workdir),
      workdir,
      console.program(),
      can_evaluate=is_saved and bool(evaluations),
      can_export=is_saved and export.is_possible(experiment),
    )
    print(text, flush=True)


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, on_all_hosts=True)
