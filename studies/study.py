"""The trials of a study, planned by a protocol, and its results."""

import hashlib
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.data.questions import spec_name
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files, warm_start
from exgrpo_jax.experiment.experiment import model_config, parse_config, with_folders
from exgrpo_jax.reporting import comparison
from exgrpo_jax.sweeps import sweep
from exgrpo_jax.sweeps.sweep import Trial
from studies import drawing, protocol, results_figures, runs, tables
from studies.protocol import Cell, Protocol
from studies.runs import StudyRun

MEASURED = pathlib.Path(__file__).parent / 'measured'  # results.csv of each study that has been run


def plan(chosen: Protocol, workdir: str) -> tuple[ConfigDict, Mapping[Cell, Trial]]:
  """Plan a study's config and trials, and check all; an InputError names the first bad one."""
  study = chosen.study
  try:
    config_path = config_files.config_path(study.config)
  except InputError as error:
    raise InputError(f'study {chosen.name}: {error}') from error
  values = config_files.load(config_path)
  cells = {
    cell: (name, {**overrides, **_shared_warm_start(values, overrides, workdir)})
    for cell, (name, overrides) in protocol.cells(study).items()
  }
  portable = config_files.portable_config(config_path)
  trials = sweep.plan_trials(
    dict(cells.values()), f'study {chosen.name}', values, portable, {}, workdir
  )
  planned = {
    cell: _aligned(trial, study.align_every_of(cell.setting)) for cell, trial in zip(cells, trials)
  }
  for cell, trial in planned.items():
    measure = study.measure_of(cell.setting)
    names = [spec_name(spec) for spec in parse_config(trial.values).data.evaluation]
    if not any(measure.startswith(f'eval/{name}/') for name in names):
      raise InputError(
        f"study {chosen.name}: trial '{trial.name}': measure='{measure}' is of no set that the run "
        f'is evaluated on: {", ".join(f"eval/{name}/…" for name in names) or "there is none"}.'
      )
  return values, planned


def _aligned(trial: Trial, every: int) -> Trial:
  """Return the trial; if it compares gradients, the `train` command of studies runs it."""
  if not every:
    return trial
  flags = trial.arguments[1 + len(sweep.TRAINER) :]
  return trial._replace(arguments=['-m', 'studies', 'train', *flags, f'--align_every={every}'])


def _shared_warm_start(
  values: ConfigDict, overrides: Mapping[str, Any], workdir: str
) -> dict[str, str]:
  """Return config.warm_start.path, so that runs with the same warm start train it only once.

  Empty if a run has no warm start, sets the path itself, or cannot run at all.
  """
  try:
    parsed = parse_config(config.overridden(values, overrides))
  except InputError:
    return {}  # planning the trials refuses this run by name
  if not parsed.warm_start.num_updates or parsed.warm_start.path:
    return {}
  shape = model_config(with_folders(parsed, parsed.model.path))
  origin = warm_start.origin(parsed, shape)
  digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:12]
  return {'warm_start.path': str(pathlib.Path(workdir, 'warm_starts', digest))}


def report(chosen: Protocol, planned: Mapping[Cell, Trial], workdir: str) -> None:
  """Print the results of the finished runs; write them, and their curves, to `workdir`."""
  found = [
    StudyRun(
      *cell,
      command=shlex.join(['python', *trial.arguments]),
      commits=runs.commits(trial.workdir),
      warm_start=runs.warm_start(trial.workdir),
      is_finished=sweep.is_finished(trial),
      evaluations=runs.evaluations(trial.workdir, parse_config(trial.values).rollout.questions),
    )
    for cell, trial in planned.items()
  ]
  runs.write_csv(pathlib.Path(workdir, 'results.csv'), found)
  saved = protocol.read(workdir)
  written = f'Protocol written {saved["written"]}, sha256 {saved["sha256"]}. '
  write(chosen, found, pathlib.Path(workdir), written)


def read(name: str) -> list[StudyRun]:
  """Read the measured runs of a study; InputError if it has not been run."""
  path = MEASURED / f'{name}.csv'
  if not path.is_file():
    raise InputError(f'{name}: studies/measured has no {path.name}, so nothing can be drawn.')
  return runs.read_csv(path)


def write(
  chosen: Protocol, found: Sequence[StudyRun], out: pathlib.Path, written: str = ''
) -> None:
  """Print the tables of these runs, and write them and the figures to a folder.

  `written` says when the protocol was written.
  """
  study = chosen.study
  text = '\n\n'.join(tables.setting(name, found, study) for name in study.settings)
  head = _head(chosen, found, written)
  (out / 'results.md').write_text(f'{head}\n\n{text}\n', encoding='utf-8')
  print(f'{text}\nresults: {out / "results.md"}', flush=True)
  figures = {
    'curves': lambda: results_figures.curves(found, study.measure_of),
    'differences': lambda: results_figures.differences(found, study),
  }
  drawing.write_all(figures, out)


def _head(chosen: Protocol, found: Sequence[StudyRun], written: str) -> str:
  """Write the text above the tables: the protocol, and the commits of the runs."""
  finished = sum(run.is_finished for run in found)
  commits = dict.fromkeys(commit for run in found for commit in run.commits)
  changed = ' (+: with uncommitted changes)' if any(c.endswith('+') for c in commits) else ''
  return '\n\n'.join(
    [
      f'# Study {chosen.name}',
      chosen.words,
      f'{written}{finished} of {len(found)} '
      f'runs finished. Commits: {", ".join(commits) or "unknown"}{changed}. Intervals: 95%, '
      f'percentile bootstrap over seeds, {comparison.RESAMPLES:,} resamples; of differences, '
      f'paired by seed. With few seeds they are too narrow; fewer than {comparison.FEWEST}, or '
      'values that are all equal, have none. The t interval of a difference, which decides, is at '
      f'1 - .05 / {chosen.study.num_comparisons}: all of the study together hold in 95% of cases.',
    ]
  )
