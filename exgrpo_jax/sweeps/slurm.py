"""A sweep's trials as array jobs on a Slurm cluster."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import check_writable, write_json
from exgrpo_jax.sweeps import sweep
from exgrpo_jax.sweeps.sweep import LOG, Trial

_JOBS, _SCRIPT = 'slurm.json', 'slurm.sh'
# squeue may still list ended jobs for a few minutes. All other states count as queued or running.
_END_STATES = (
  'BOOT_FAIL', 'CANCELLED', 'COMPLETED', 'DEADLINE', 'FAILED', 'LAUNCH_FAILED', 'NODE_FAIL',
  'OUT_OF_MEMORY', 'PREEMPTED', 'RECONFIG_FAIL', 'REVOKED', 'TIMEOUT',
)  # fmt: skip

Jobs = dict[str, dict[str, str]]  # 'job' or 'job;cluster' -> {array index: trial name}


def check_options(text: str) -> list[str]:
  """Split the value of --sbatch into options. Raises InputError if they set --array."""
  try:
    options = shlex.split(text)
  except ValueError as error:
    raise InputError(f'--sbatch={text}: {error}. Fix the quoting.') from error
  if any(option.startswith(('-a', '--array')) for option in options):
    raise InputError(
      f'--sbatch={text}: the sweep itself sets --array. Remove this option. To limit the number '
      'of trials that run at a time, set --parallel.'
    )
  return options


def submit(
  all_trials: Sequence[Trial], workdir: str, options: Sequence[str], at_once: int | None
) -> Collection[str]:
  """Submit the unfinished trials that are not queued yet; return the names of all queued trials.

  The trials form one array job: index n is the sweep's trial n. At most `at_once` run at a time;
  None sets no limit. `options` are passed to sbatch. slurm.json in the workdir records the jobs.
  Raises InputError if Slurm is not installed or rejects a command.
  """
  check_writable(workdir)
  with sweep.held(workdir):
    path = pathlib.Path(workdir, _JOBS)
    jobs = _select_queued(json.loads(path.read_text()) if path.exists() else {})
    active_names = {name for trials in jobs.values() for name in trials.values()}
    finished_names = {trial.name for trial in all_trials if sweep.is_finished(trial)}
    remaining = {
      str(index): trial
      for index, trial in enumerate(all_trials)
      if trial.name not in active_names | finished_names
    }
    if remaining:
      array = f'--array={",".join(remaining)}' + (f'%{at_once}' if at_once else '')
      job = _submit(remaining, workdir, [*options, '--parsable', array])
      jobs[job] = {index: trial.name for index, trial in remaining.items()}
      active_names |= {trial.name for trial in remaining.values()}
      print(
        f'submitted {counted(len(remaining), "trial")} as job {job}; output: {workdir}/TRIAL/{LOG}'
      )
    write_json(os.fspath(path), jobs)
  total, num_waiting = counted(len(all_trials), 'trial'), len(active_names - finished_names)
  print(f'{len(finished_names)} of {total} finished, {num_waiting} in the queue')
  if jobs:
    job_ids = ','.join(job.partition(';')[0] for job in jobs)
    print(
      f'to watch: squeue --jobs={job_ids}\nRun the same command again to update the table and to '
      'resubmit trials that ended without finishing.',
      flush=True,
    )
  return active_names


def _submit(remaining: Mapping[str, Trial], workdir: str, options: Sequence[str]) -> str:
  """Submit the trials in `remaining` (array index -> trial) as an array job and return its id."""
  lines = ['#!/bin/bash', 'case "$SLURM_ARRAY_TASK_ID" in']
  for index, trial in remaining.items():
    # A trial runs on one host, even if the environment lists the hosts of an enclosing job.
    command = [sys.executable, *trial.arguments, '--num_processes=1']
    folder, log = map(shlex.quote, (trial.workdir, os.path.join(trial.workdir, LOG)))
    lines.append(f'{index}) mkdir -p {folder} && exec {shlex.join(command)} >>{log} 2>&1 ;;')
  path = os.path.join(workdir, _SCRIPT)
  with replacing(path) as temporary_path:  # sbatch copies the file, so it can be replaced later
    temporary_path.write_text('\n'.join([*lines, 'esac', '']))
  defaults = [f'--job-name={os.path.basename(os.path.abspath(workdir))}']
  defaults.append(f'--output={os.path.join(workdir, "slurm-%A_%a.out")}')  # Slurm's own messages
  process = _run(['sbatch', *defaults, *options, path])
  if process.returncode:
    raise InputError(
      f'--launcher=slurm: sbatch rejected the job ({process.stderr.strip()}). Change --sbatch.'
    )
  return process.stdout.split()[-1]


def _select_queued(jobs: Jobs) -> Jobs:
  """Return the trials in `jobs` that are still queued or running."""
  queued_jobs: Jobs = {}
  for job, trials in jobs.items():
    number, _, cluster = job.partition(';')
    options = [f'--jobs={number}', *[f'--clusters={cluster}'] * bool(cluster)]
    process = _run(['squeue', '--noheader', '--array', '--format=%K %T', *options])
    if process.returncode and 'Invalid job id' not in process.stderr:  # Slurm forgets ended jobs
      raise InputError(
        f'--launcher=slurm: squeue failed ({process.stderr.strip()}), so the trials of job '
        f'{number} may still be in the queue. Run the command again later.'
      )
    states = dict(line.split()[:2] for line in process.stdout.splitlines() if ' ' in line.strip())
    queued_trials = {
      n: name for n, name in trials.items() if states.get(n, 'COMPLETED') not in _END_STATES
    }
    queued_jobs |= {job: queued_trials} if queued_trials else {}
  return queued_jobs


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
  if not shutil.which(command[0]):
    raise InputError(
      f'--launcher=slurm: {command[0]} was not found on this machine. Run the command on a login '
      'node of the cluster, or use --launcher=commands.'
    )
  return subprocess.run(command, text=True, capture_output=True)
