"""Runs the trials of a sweep and compares them: many runs, one table.

python -m exgrpo_jax.sweep --sweep=configs/sweeps/ratio.py --config=configs/arithmetic.py \\
    --workdir=/tmp/ratio --parallel=2

Every trial is `python -m exgrpo_jax.train` in a folder of its name. The same command again skips
the finished and goes on with the others. Exit status: 0 when all have finished, 1 when
some have failed, 2 for what cannot be run, 130 when interrupted.
"""

import contextlib
import copy
import fcntl
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import config
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import CONFIG, WORKDIR, run_command, settings
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.reporting import comparison, metrics
from exgrpo_jax.runtime.workdir import check_workdir
from exgrpo_jax.sweeps import launcher, trials

_SWEEP = flags.DEFINE_string('sweep', None, 'The trials, e.g. configs/sweeps/ratio.py.')
_PARALLEL = flags.DEFINE_integer('parallel', 1, 'How many trials run at a time.')
_LAUNCHER = flags.DEFINE_enum(
  'launcher',
  'local',
  ['local', 'commands'],
  "Runs the trials here, or prints a command for each, for a cluster's queue.",
)

TRAINER = 'exgrpo_jax.train'  # the module that runs a trial
_LOG, _CONFIG_FILE = 'log.txt', 'config.json'


class Trial(NamedTuple):
  """One run of a sweep."""

  name: str
  workdir: str
  values: ConfigDict  # with the trial's overrides
  arguments: list[str]  # of python


def main() -> None:
  """Runs what is left of a sweep, or prints the commands for it."""
  if not (CONFIG.value and WORKDIR.value and _SWEEP.value):
    raise InputError(
      '--sweep, --config and --workdir are all needed, e.g. --sweep='
      'configs/sweeps/ratio.py --config=configs/arithmetic.py --workdir=/tmp/ratio.'
    )
  if _PARALLEL.value < 1:
    raise InputError(f'--parallel={_PARALLEL.value} must be at least 1.')
  flag = flags.FLAGS[CONFIG.name]
  found = planned(
    _SWEEP.value,
    CONFIG.value,
    config_flags.get_config_filename(flag),
    config_flags.get_override_values(flag),
    WORKDIR.value,
  )
  left = [trial for trial in found if not is_finished(trial)]
  if _LAUNCHER.value == 'commands':
    for trial in left:
      print(shlex.join(['python', *trial.arguments]))
    print(
      f'{len(left)} of {len(found)} trials are to be run; then --launcher=local makes the table',
      file=sys.stderr,
    )
    return
  sys.exit(run(found, left, WORKDIR.value, _PARALLEL.value))


def planned(
  path: str, values: ConfigDict, config_path: str, given: Mapping[str, Any], workdir: str
) -> list[Trial]:
  """The trials of the sweep file at `path`, all checked; InputError names the first bad one.

  Args:
    path: the sweep file.
    values: the config, with the overrides `given` on the command line (by dotted key).
    config_path: where the config comes from.
    given: those overrides.
    workdir: the sweep's; it may hold a part of these trials already.
  """
  found = []
  for name, overrides in trials.load(path).items():
    folder = os.path.join(workdir, name)
    try:
      for key in overrides:
        if key in given:
          raise InputError(
            f'--config.{key}={given[key]} is given, and the trial sets it '
            f'to {overrides[key]}; only one can be.'
          )
      changed = overridden(values, overrides)
      settings(changed)
    except InputError as error:
      raise InputError(f"{path}: trial '{name}': {error}") from error
    for other in found:
      if other.values == changed:
        raise InputError(
          f"{path}: trials '{other.name}' and '{name}' are the same run; a setting "
          "is run again with another 'seed'."
        )
    check_workdir(changed, folder)
    words = [f'--config.{key}={value}' for key, value in (given | overrides).items()]
    found.append(
      Trial(
        name,
        folder,
        changed,
        ['-m', TRAINER, f'--config={config_path}', f'--workdir={folder}', *words],
      )
    )
  _check_strangers(path, workdir, {trial.name for trial in found})
  return found


def overridden(values: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
  """A copy of `values` with `overrides` by dotted key; InputError for a key it does not have.

  A value of another type is taken, for `settings` to refuse.
  """
  changed = copy.deepcopy(values)
  for key, value in overrides.items():
    *sections, last = key.split('.')
    place, path = changed, 'config'
    for section in sections:
      config.check_known(section, list(place), path)
      place, path = place[section], f'{path}.{section}'
      if not isinstance(place, ConfigDict):
        raise InputError(f"{path} is one value and has no '{last}'.")
    config.check_known(last, list(place), path)
    if isinstance(place[last], ConfigDict):
      raise InputError(
        f'{path}.{last} is a section; an override sets one value, such as '
        f"'{key}.{next(iter(place[last]))}'."
      )
    with place.ignore_type():
      place[last] = value
  return changed


def is_finished(trial: Trial) -> bool:
  """Whether train has come to its end in the trial's workdir: it draws the curves last.

  A run that is being prolonged has curves, and records or checkpoints that end too early.
  """
  if not os.path.exists(os.path.join(trial.workdir, 'curves.png')):
    return False
  try:
    records = metrics.read(trial.workdir)
  except InputError:
    return False  # train refuses it and says where
  wanted = trial.values.num_steps
  # Without any checkpoints they have been cleared away, which undoes nothing.
  saved = max(checkpoint.steps(trial.workdir), default=wanted)
  return bool(records) and min(records[-1]['step'], saved) >= wanted


def run(found: Sequence[Trial], left: Sequence[Trial], workdir: str, parallel: int) -> int:
  """Runs the trials that are `left` of those `found`, compares all; returns the exit status."""
  with _claimed(workdir) as lock:
    if len(left) < len(found):
      print(f'{len(found) - len(left)} of {len(found)} trials have finished before', flush=True)
    outcome = launcher.run(
      [
        launcher.Job(
          trial.name, [sys.executable, *trial.arguments], os.path.join(trial.workdir, _LOG)
        )
        for trial in left
      ],
      parallel,
      (lock,),
    )
    if not outcome.unfinished:
      report(found, workdir)
  failed = outcome.failed | {
    trial.name: 'it ended as if finished, before its last step'
    for trial in left
    if trial.name not in {*outcome.failed, *outcome.unfinished} and not is_finished(trial)
  }
  if failed:
    print(
      f'{len(failed)} of {len(found)} trials failed; the same command tries them again:', flush=True
    )
    for name, reason in failed.items():
      print(f'  {name}: {reason}', flush=True)
  if outcome.unfinished:
    command = shlex.join(['python', '-m', 'exgrpo_jax.sweep', *sys.argv[1:]])
    print(
      f'interrupted before {len(outcome.unfinished)} of {len(found)} trials had ended; the '
      f'same command goes on with them:\n{command}',
      flush=True,
    )
    return 130
  return 1 if failed else 0


def report(found: Sequence[Trial], workdir: str) -> None:
  """Prints the table of the finished trials; keeps it, and their curves, in `workdir`."""
  runs, wanted = {}, {}
  for label, members in by_setting(found).items():
    wanted[label] = len(members)
    finished = [metrics.read(trial.workdir) for trial in members if is_finished(trial)]
    if finished:
      runs[label] = finished
  if not runs:
    print('no trial has finished: nothing to compare', flush=True)
    return
  text = comparison.table(runs, wanted)
  path, picture = os.path.join(workdir, 'sweep.md'), os.path.join(workdir, 'sweep.png')
  with open(path, 'w', encoding='utf-8') as file:
    file.write(
      'Mean ± standard deviation over seeds; final is the last evaluation, best the '
      f'highest of each run, the start included.\n\n{text}\n'
    )
  comparison.picture(runs, picture)
  print(f'{text}\ntable: {path}\ncurves: {picture}', flush=True)


def by_setting(found: Sequence[Trial]) -> dict[str, list[Trial]]:
  """Trials that differ only in seed, under the name that they have in common."""
  keys, groups = [], []
  for trial in found:
    key = {**trial.values.to_dict(), 'seed': None}
    if key not in keys:
      keys.append(key)
      groups.append([])
    groups[keys.index(key)].append(trial)
  labels = [trials.without_seed(group[0].name) or 'as configured' for group in groups]
  if len(set(labels)) < len(labels):
    labels = [group[0].name for group in groups]
  return dict(zip(labels, groups))


def _check_strangers(path, workdir, names):
  if os.path.exists(workdir) and not os.path.isdir(workdir):
    raise InputError(f'--workdir={workdir} must be a folder.')
  if os.path.exists(os.path.join(workdir, _CONFIG_FILE)):
    raise InputError(f"--workdir={workdir} is a single run's; a sweep needs one of its own.")
  for other in sorted(os.listdir(workdir)) if os.path.isdir(workdir) else ():
    if other not in names and any(
      os.path.exists(os.path.join(workdir, other, mark)) for mark in (_LOG, _CONFIG_FILE)
    ):
      raise InputError(
        f"--workdir={workdir} holds a trial '{other}', which {path} has not: take "
        'another --workdir for another sweep, or move that folder away.'
      )


@contextlib.contextmanager
def _claimed(workdir: str) -> Iterator[int]:
  """Holds a lock on the workdir, an open file; refused while another sweep or its trials do.

  Trials inherit it: when a sweep is killed, they live on and must not be run twice.
  """
  os.makedirs(workdir, exist_ok=True)
  with open(os.path.join(workdir, 'sweep.lock'), 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise InputError(
        f'a sweep is running in {workdir}, or trials that a killed one left '
        'behind; wait for them, or end them.'
      ) from error
    yield file.fileno()


if __name__ == '__main__':
  run_command(main)
