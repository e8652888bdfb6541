"""Planning, running and comparing the trials of a sweep."""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.experiment import parse_config
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.reporting import alarms, comparison, metrics
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import check_workdir, check_writable, folder_held
from exgrpo_jax.sweeps import launcher, trials

TRAINER = ('exgrpo_jax', 'train')  # what `python -m` runs for a trial
_LOG, _CONFIG_FILE = 'log.txt', 'config.json'


class Trial(NamedTuple):
  """One run of a sweep."""

  name: str
  workdir: str
  values: ConfigDict  # with the trial's overrides
  arguments: list[str]  # of python


def print_commands(planned: Sequence[Trial]) -> None:
  """Print the command of each unfinished trial, for a cluster's queue."""
  left = _left(planned)
  for trial in left:
    print(shlex.join(['python', *trial.arguments]))
  print(
    f'{len(left)} of {len(planned)} trials are left to run; when they have finished, '
    '--launcher=local makes the table',
    file=sys.stderr,
  )


def plan_trials(
  sweep: trials.Sweep,
  path: str,
  values: ConfigDict,
  config_path: str,
  given: Mapping[str, Any],
  workdir: str,
) -> list[Trial]:
  """Return the trials of a sweep, all checked; an InputError names the first bad one.

  Args:
    sweep: name -> overrides.
    path: the file that defines the sweep.
    values: the config, with the overrides in `given`.
    config_path: of the config.
    given: the overrides on the command line, by dotted key.
    workdir: the sweep's; it may already hold some of these trials.
  """
  planned: list[Trial] = []
  for name, overrides in sweep.items():
    folder = os.path.join(workdir, name)
    try:
      for key in overrides:
        if key in given:
          raise InputError(
            f'--config.{key}={given[key]}: the trial sets it to {overrides[key]}. Leave one of '
            'them out.'
          )
      changed = config.overridden(values, overrides)
      parse_config(changed)
    except InputError as error:
      raise InputError(f"{path}: trial '{name}': {error}") from error
    for other in planned:
      if other.values == changed:
        raise InputError(
          f"{path}: trials '{other.name}' and '{name}' are the same run. To repeat a setting, vary "
          "its 'seed'."
        )
    check_workdir(changed, folder)
    settings = [f'--config.{key}={value}' for key, value in {**given, **overrides}.items()]
    arguments = ['-m', *TRAINER, f'--config={config_path}', f'--workdir={folder}', *settings]
    planned.append(Trial(name=name, workdir=folder, values=changed, arguments=arguments))
  _check_strangers(path, workdir, {trial.name for trial in planned})
  return planned


def is_finished(trial: Trial) -> bool:
  """Return True if train has finished in the trial's workdir. It writes report.html last.

  A run that is being extended already has that file, but its records or checkpoints end too early.
  """
  if not os.path.exists(os.path.join(trial.workdir, 'report.html')):
    return False
  try:
    records = metrics.read(trial.workdir)
  except InputError:
    return False  # train will refuse the file and say where it is wrong
  config = parse_config(trial.values)
  wanted = alarms.last_step(alarms.scores_of(records), config.num_steps, config.evaluation.patience)
  # A run whose checkpoints were all deleted is still finished.
  saved = max(checkpoint.steps(trial.workdir), default=wanted)
  return bool(records) and min(records[-1]['step'], saved) >= wanted


def run(
  planned: Sequence[Trial],
  workdir: str,
  parallel: int,
  command: Sequence[str],
  conclude: Callable[[], None],
) -> int:
  """Run the unfinished trials and return the exit status.

  Args:
    planned: all trials.
    workdir: the sweep's.
    parallel: how many run at a time.
    command: the words that start this sweep, before its flags; printed after an interrupt.
    conclude: called once every trial has ended, with or without an error.
  """
  check_writable(workdir)
  left = _left(planned)
  with _claimed(workdir) as lock:
    if len(left) < len(planned):
      print(f'{len(planned) - len(left)} of {counted(len(planned), "trial")} finished', flush=True)
    outcome = launcher.run(
      [
        launcher.Job(
          name=trial.name,
          command=[sys.executable, *trial.arguments],
          log=os.path.join(trial.workdir, _LOG),
        )
        for trial in left
      ],
      parallel,
      (lock,),
    )
    if not outcome.unfinished:
      conclude()
  ended_early = [
    trial.name
    for trial in left
    if trial.name not in {*outcome.failed, *outcome.unfinished} and not is_finished(trial)
  ]
  failed = outcome.failed | dict.fromkeys(
    ended_early, 'it exited with status 0, but before its last step'
  )
  if failed:
    print(
      f'{len(failed)} of {counted(len(planned), "trial")} failed; run the same command to try them '
      'again:'
    )
    for name, reason in failed.items():
      print(f'  {name}: {reason}', flush=True)
  if outcome.unfinished:
    again = shlex.join([*command, *sys.argv[1:]])
    print(
      f'interrupted before {len(outcome.unfinished)} of {counted(len(planned), "trial")} had '
      f'ended; run the same command to resume them:\n{again}',
      flush=True,
    )
    return 130
  return 1 if failed else 0


def _left(planned: Sequence[Trial]) -> list[Trial]:
  return [trial for trial in planned if not is_finished(trial)]


def report(planned: Sequence[Trial], workdir: str) -> None:
  """Print the table of the finished trials; write the table and their curves to `workdir`."""
  runs, wanted = {}, {}
  for label, members in by_setting(planned).items():
    wanted[label] = len(members)
    finished = [metrics.read(trial.workdir) for trial in members if is_finished(trial)]
    if finished:
      runs[label] = finished
  if not runs:
    print('no trial has finished, so there is nothing to compare', flush=True)
    return
  from exgrpo_jax.reporting import canvas  # matplotlib takes half a second

  text = comparison.table(runs, wanted)
  path, picture = pathlib.Path(workdir, 'sweep.md'), pathlib.Path(workdir, 'sweep.png')
  with replacing(path) as unfinished:
    unfinished.write_text(
      'Mean ± standard deviation over seeds. Final is the last evaluation. Best is the highest '
      'evaluation of each run, or the lowest if the measure should fall, such as truncated; the '
      'evaluation at the start counts.'
      f'\n\n{text}\n',
      encoding='utf-8',
    )
  canvas.picture(runs, picture)
  print(f'{text}\ntable: {path}\ncurves: {picture}', flush=True)


def by_setting(planned: Sequence[Trial]) -> dict[str, list[Trial]]:
  """Group trials that differ only in seed, under the name that they share."""
  keys, groups = [], []
  for trial in planned:
    key = {**trial.values.to_dict(), 'seed': None}
    if key not in keys:
      keys.append(key)
      groups.append([])
    groups[keys.index(key)].append(trial)
  labels = [trials.without_seed(group[0].name) or 'as configured' for group in groups]
  if len(set(labels)) < len(labels):
    labels = [group[0].name for group in groups]
  return dict(zip(labels, groups))


def _check_strangers(path: str, workdir: str, names: Collection[str]) -> None:
  """Raise InputError if the workdir is a file, a single run's, or holds trials of another sweep."""
  if os.path.exists(workdir) and not os.path.isdir(workdir):
    raise InputError(f'--workdir={workdir}: this is not a folder. Choose a folder.')
  if os.path.exists(os.path.join(workdir, _CONFIG_FILE)):
    raise InputError(f'--workdir={workdir}: this is the folder of a single run. Choose another.')
  for other in sorted(os.listdir(workdir)) if os.path.isdir(workdir) else ():
    if other not in names and any(
      os.path.exists(os.path.join(workdir, other, mark)) for mark in (_LOG, _CONFIG_FILE)
    ):
      raise InputError(
        f"--workdir={workdir}: this folder holds a trial '{other}' that is not in {path}. Use "
        'another --workdir for another sweep, or move the trial away.'
      )


def _claimed(workdir: str) -> contextlib.AbstractContextManager[int]:
  """Lock the workdir; refuse it while another sweep or its trials hold the lock.

  Trials inherit the lock because they outlive a killed sweep, and must not be run twice.
  """
  return folder_held(
    workdir,
    'sweep.lock',
    f'--workdir={workdir}: a sweep is running there, or trials that a killed sweep left running. '
    'Wait for them, or end them.',
  )
