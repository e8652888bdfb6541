"""Planning, running and comparing a sweep's trials."""

import contextlib
import csv
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.settings import check_length, parse_config
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.reporting import alarms, comparison, metrics
from exgrpo_jax.reporting.runs import flat
from exgrpo_jax.runtime import console
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import check_workdir, check_writable, folder_held, read_config
from exgrpo_jax.sweeps import launcher, trials

TRAINER = ('exgrpo_jax', 'train')  # the `python -m` arguments for a trial
LOG, _CONFIG_FILE = 'log.txt', 'config.json'


class Trial(NamedTuple):
  """One run of a sweep."""

  name: str
  workdir: str
  values: ConfigDict  # the config, with the trial's overrides
  arguments: list[str]  # the arguments passed to python
  keys: Sequence[str] = ()  # the config keys that the trial sets


def print_commands(all_trials: Sequence[Trial]) -> None:
  """Print the commands of all unfinished trials, so that you can queue them on a cluster."""
  remaining = [trial for trial in all_trials if not is_finished(trial)]
  for trial in remaining:
    print(console.to_copy(['python', *trial.arguments]))
  print(
    f'{len(remaining)} of {counted(len(all_trials), "trial")} still to run. Once they have '
    'finished, run this command again with --launcher=local to build the table.',
    file=sys.stderr,
  )


def plan_trials(
  sweep: trials.Sweep,
  path: str,
  values: ConfigDict,
  config_path: str,
  flags: Mapping[str, Any],
  workdir: str,
) -> list[Trial]:
  """Check a sweep's trials and return them; raise InputError for the first invalid trial.

  `path` is the sweep's file, and `config_path` is the --config value to pass to each trial.
  `values` is the config with the command-line overrides `flags` (dotted key -> value) applied. The
  sweep's workdir may already contain some of these trials.
  """
  all_trials: list[Trial] = []
  for name, overrides in sweep.items():
    folder = os.path.join(workdir, name)
    try:
      for key in overrides:
        if key in flags:
          raise InputError(
            f'--config.{key}={flags[key]}: the trial sets this key to {overrides[key]}. Remove one '
            'of the two settings.'
          )
      trial_values = config.overridden(values, overrides)
      parse_config(trial_values)
      check_length(trial_values, {**flags, **overrides})
    except InputError as error:
      raise InputError(f"{path}: trial '{name}': {error}") from error
    for other in all_trials:
      if other.values == trial_values:
        raise InputError(
          f"{path}: trials '{other.name}' and '{name}' are the same run. To repeat a trial, vary "
          "its 'seed'."
        )
    check_workdir(trial_values, folder)
    settings = [f'--config.{key}={value}' for key, value in {**flags, **overrides}.items()]
    arguments = ['-m', *TRAINER, f'--config={config_path}', f'--workdir={folder}', *settings]
    all_trials.append(Trial(name, folder, trial_values, arguments, list(overrides)))
  _check_strangers(path, workdir, {trial.name for trial in all_trials})
  return all_trials


def is_finished(trial: Trial) -> bool:
  """Return True if training has finished in the trial's workdir.

  Training writes report.html last. A run that is being extended already has that file, so the last
  record and the last checkpoint are checked too.
  """
  if not os.path.exists(os.path.join(trial.workdir, 'report.html')):
    return False
  run_config = parse_config(trial.values)
  num_steps = run_config.num_steps
  try:
    records = metrics.read(trial.workdir)
    if run_config.num_epochs:  # config.json contains the number of steps, which depends on the data
      recorded_config = read_config(trial.workdir)
      if recorded_config['num_epochs'] != run_config.num_epochs:
        return False
      num_steps = recorded_config['num_steps']
  except InputError:
    return False  # train will reject the file and name the bad line
  scores = comparison.scores_of(records, alarms.SCORE)
  last_step = alarms.last_step(scores, num_steps, run_config.evaluation.patience)
  # A run whose checkpoints were all deleted still counts as finished.
  saved_step = max(checkpoint.steps(trial.workdir), default=last_step)
  return bool(records) and min(records[-1]['step'], saved_step) >= last_step


def run(
  all_trials: Sequence[Trial],
  workdir: str,
  parallel: int,
  command: Sequence[str],
  conclude: Callable[[], None],
) -> int:
  """Run the unfinished trials, at most `parallel` at a time, and return the exit status.

  `command` is the sweep command without its flags, to be printed after an interrupt. `conclude` is
  called once all trials have ended, even if some failed.
  """
  check_writable(workdir)
  remaining = [trial for trial in all_trials if not is_finished(trial)]
  # Trials inherit the lock, because they outlive a killed sweep and must not run twice.
  with held(workdir) as lock:
    if len(remaining) < len(all_trials):
      print(
        f'{len(all_trials) - len(remaining)} of {counted(len(all_trials), "trial")} finished',
        flush=True,
      )
    jobs = [
      launcher.Job(t.name, [sys.executable, *t.arguments], os.path.join(t.workdir, LOG))
      for t in remaining
    ]
    outcome = launcher.run(jobs, parallel, (lock,))
    if not outcome.unfinished:
      conclude()
  ended_trials = [
    trial for trial in remaining if trial.name not in {*outcome.failed, *outcome.unfinished}
  ]
  early_names = [trial.name for trial in ended_trials if not is_finished(trial)]
  failures = outcome.failed | dict.fromkeys(
    early_names, 'exited with status 0 before its last step'
  )
  total = counted(len(all_trials), 'trial')
  if failures:
    print(f'{len(failures)} of {total} failed (to retry, run the same command again):')
    for name, reason in failures.items():
      print(f'  {name}: {reason}', flush=True)
  if outcome.unfinished:
    resume_command = console.to_copy([*command, *sys.argv[1:]])
    print(
      f'interrupted with {len(outcome.unfinished)} of {total} unfinished. Run the same command '
      f'again to resume:\n{resume_command}',
      flush=True,
    )
    return 130
  return 1 if failures else 0


def held(workdir: str) -> contextlib.AbstractContextManager[int]:
  """Lock a sweep's workdir with `folder_held`. Raises InputError if trials are running there."""
  reason = (
    f'--workdir={workdir}: another sweep, or a trial left over from a killed sweep, is still '
    'running there. Wait for it to finish, or stop it.'
  )
  return folder_held(workdir, 'sweep.lock', reason)


def report(all_trials: Sequence[Trial], workdir: str, active: Collection[str] = ()) -> None:
  """Print a table of the finished trials; write the table, the curves and a CSV to `workdir`.

  `active` contains the names of trials that are still in a cluster's queue.
  """
  write_csv(all_trials, workdir, active)
  runs, run_counts = {}, {}
  for label, members in by_setting(all_trials).items():
    run_counts[label] = len(members)
    run_records = [metrics.read(trial.workdir) for trial in members if is_finished(trial)]
    if run_records:
      runs[label] = run_records
  if not runs:
    print('No trial has finished yet, so there is nothing to compare.', flush=True)
    return
  from exgrpo_jax.reporting import canvas  # importing matplotlib takes half a second

  text = comparison.table(runs, run_counts)
  path, picture = pathlib.Path(workdir, 'sweep.md'), pathlib.Path(workdir, 'sweep.png')
  with replacing(path) as temporary_path:
    temporary_path.write_text(
      'Mean ± standard deviation over seeds. Final is the last evaluation. Best is the highest '
      'score of each run, or the lowest for measures where lower is better, such as truncated. The '
      'evaluation before training counts too.'
      f'\n\n{text}\n',
      encoding='utf-8',
    )
  canvas.picture(runs, picture)
  print(f'{text}\ntable: {path}\ncurves: {picture}\ntrials: {path.with_suffix(".csv")}', flush=True)


def write_csv(all_trials: Sequence[Trial], workdir: str, active: Collection[str]) -> None:
  """Write a row per trial to sweep.csv: settings, state, scores and total time of all steps.

  Only finished trials have scores. A cell is empty if the trial has no such value.
  """
  keys = [key for trial in all_trials for key in trial.keys if key != 'seed']
  columns = dict.fromkeys(['trial', 'seed', *keys, 'state', 'steps', 'seconds'])
  rows = []
  for trial in all_trials:
    settings, state = flat(trial.values.to_dict()), _state(trial, active)
    row = {'trial': trial.name, 'state': state, 'workdir': trial.workdir}
    row |= {key: settings[key] for key in ('seed', *keys)}
    with contextlib.suppress(InputError):  # train will reject the file and name the bad line
      if records := metrics.read(trial.workdir):
        row |= {'steps': int(records[-1]['step'])}
        row |= {'seconds': round(sum(record.get('time/step', 0.0) for record in records), 1)}
        row |= comparison.scores_by_column(records) if state == 'finished' else {}
    rows.append(row)
  columns |= dict.fromkeys(sorted({name for row in rows for name in row} - {*columns, 'workdir'}))
  with (
    replacing(os.path.join(workdir, 'sweep.csv')) as temporary_path,
    open(temporary_path, 'w', encoding='utf-8', newline='') as file,
  ):
    writer = csv.DictWriter(file, [*columns, 'workdir'], lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)


def _state(trial: Trial, active: Collection[str]) -> str:
  if is_finished(trial):
    return 'finished'
  if trial.name in active:
    return 'queued or running'
  return 'unfinished' if os.path.exists(os.path.join(trial.workdir, LOG)) else 'not started'


def by_setting(all_trials: Sequence[Trial]) -> dict[str, list[Trial]]:
  """Group trials that differ only in their seed; return a dict from group name to trials."""
  keys, groups = [], []
  for trial in all_trials:
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
  """Raise InputError if the workdir is a file or belongs to a single run or another sweep."""
  if os.path.exists(workdir) and not os.path.isdir(workdir):
    raise InputError(f'--workdir={workdir}: this path is not a folder. Choose a folder.')
  if os.path.exists(os.path.join(workdir, _CONFIG_FILE)):
    raise InputError(f"--workdir={workdir}: this is a single run's workdir. Choose another folder.")
  for name in sorted(os.listdir(workdir)) if os.path.isdir(workdir) else ():
    if name not in names and any(
      os.path.exists(os.path.join(workdir, name, mark)) for mark in (LOG, _CONFIG_FILE)
    ):
      raise InputError(
        f"--workdir={workdir}: this folder contains a trial '{name}' that is not in {path}. Use "
        'a different --workdir for this sweep, or move the trial elsewhere.'
      )
