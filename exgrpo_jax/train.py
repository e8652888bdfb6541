"""Trains a policy with ExGRPO.

python -m exgrpo_jax.train --config=arithmetic --workdir=/tmp/arithmetic

A run found in --workdir is resumed from its newest checkpoint. Exit status: 0 at the end, 2 for
what cannot be run, 75 after SIGTERM or Ctrl-C, once the step is finished and saved; then the same
command resumes.
"""

import os
import sys

import jax
from absl import flags

from exgrpo_jax import cli, rehearsal, session
from exgrpo_jax.check import check_start
from exgrpo_jax.experiment import Config
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.reporting import messages, metrics
from exgrpo_jax.runtime import compilations, console, hosts
from exgrpo_jax.runtime.workdir import owned


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_workdir()
  flags.DEFINE_bool(
    'compile_only', False, 'Compiles all programs of the run into its compilation cache, and ends.'
  )


def main(args: cli.Args) -> None:
  """Trains, or resumes, after everything that can be checked has been."""
  config, workdir = check_start(args.config, args.workdir), args.workdir
  done = hosts.broadcast_from_first(max(checkpoint.steps(workdir), default=0))
  if done > config.num_steps:
    print(messages.finished(workdir, done, config.num_steps), flush=True)
    return
  log = os.path.join(workdir, 'console.log')
  with owned(workdir), console.opened(log), session.explained(workdir):
    _train(args, config)


def _train(args: cli.Args, config: Config) -> None:
  """Takes the steps that are left, or compiles their programs."""
  workdir, loaded = args.workdir, session.load(args.config, args.workdir)
  rollout, evaluations = loaded.rollout, loaded.evaluations
  with jax.set_mesh(loaded.experiment.meshes.training), compilations.counted() as compiled:
    every, num_steps = config.evaluation.every, config.num_steps
    print(messages.banner(rollout, evaluations, every, loaded.done, num_steps, workdir), flush=True)
    if args.compile_only:
      rehearsal.run(loaded.experiment, rollout)
      print(f'compiled {compiled}', flush=True)
      return
    session.train(loaded, session.claim(loaded, args.config), compiled)
  if hosts.is_first():
    print(f'compiled {compiled}', flush=True)
    records, arguments = metrics.read(workdir), cli.config_arguments(sys.argv)
    print(messages.farewell(records, workdir, sys.orig_argv[0], arguments), flush=True)


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
