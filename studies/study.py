"""A study's trials, planned according to its protocol, and its results."""

import hashlib
import json
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.data.questions import spec_name
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import scores
from exgrpo_jax.experiment import config_files, policies, warm_start
from exgrpo_jax.experiment.experiment import model_config, parse_config, with_dtype, with_folders
from exgrpo_jax.reporting import comparison, metrics
from exgrpo_jax.sweeps import sweep
from exgrpo_jax.sweeps.sweep import Trial
from studies import drawing, protocol, results_figures, runs, tables
from studies.protocol import Cell, Protocol
from studies.runs import StudyRun

MEASURED = pathlib.Path(__file__).parent / 'measured'  # results.csv of each completed study


def plan(chosen: Protocol, workdir: str) -> tuple[ConfigDict, Mapping[Cell, Trial]]:
  """Plan and check a study's config and trials. An InputError names the first invalid trial."""
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
        f"study {chosen.name}: trial '{trial.name}': measure='{measure}' is not a measure of "
        "the run's evaluation data. Use a measure that begins with one of: "
        f'{", ".join(f"eval/{name}/" for name in names) or "(config.data.evaluation is empty)"}.'
      )
  return values, planned


def _aligned(trial: Trial, every: int) -> Trial:
  """Return the trial, using the studies' `train` command if the trial compares gradients."""
  if not every:
    return trial
  flags = trial.arguments[1 + len(sweep.TRAINER) :]
  return trial._replace(arguments=['-m', 'studies', 'train', *flags, f'--align_every={every}'])


def _shared_warm_start(
  values: ConfigDict, overrides: Mapping[str, Any], workdir: str
) -> dict[str, str]:
  """Return an override of config.warm_start.path that lets runs share equal warm starts.

  Returns {} if a run has no warm start, sets the path itself, or has an invalid config.
  """
  try:
    parsed = parse_config(config.overridden(values, overrides))
  except InputError:
    return {}  # planning the trials rejects this run by name
  if not parsed.warm_start.num_updates or parsed.warm_start.path:
    return {}
  shape = model_config(with_folders(with_dtype(parsed), parsed.model.path))
  origin = warm_start.origin(parsed, shape)
  # Earlier versions had no empty entries. Without them, older warm starts keep their digest.
  origin = {name: value for name, value in origin.items() if value != {}}
  digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:12]
  return {'warm_start.path': str(pathlib.Path(workdir, 'warm_starts', digest))}


def evaluate_last(chosen: Protocol, planned: Mapping[Cell, Trial]) -> None:
  """Evaluate the last policy of each finished run on the study's `last_data`.

  Runs that already have this evaluation are skipped, so an interrupted study continues.
  """
  samples = chosen.study.last_samples
  for cell, trial in planned.items():
    spec, folder = chosen.study.last_data_of(cell.setting), trial.workdir
    if not spec or not sweep.is_finished(trial):
      continue
    recorded = metrics.read_evaluations(folder, parse_config(trial.values).num_steps)
    if (spec, samples) not in [(line['data'], line['samples']) for line in recorded]:
      values = config.overridden(trial.values, {'evaluation.samples': samples})
      policy, out = policies.at(folder), os.path.join(folder, 'evaluation')
      scores.evaluate_policy(policy, *scores.prepare_policy(policy, values, [spec]), out)


def report(chosen: Protocol, planned: Mapping[Cell, Trial], workdir: str) -> None:
  """Print the finished runs' results, and write them and their curves to `workdir`."""
  evaluate_last(chosen, planned)
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
  """Read a study's measured runs. Raises InputError if the study has not been run."""
  path = MEASURED / f'{name}.csv'
  if not path.is_file():
    raise InputError(
      f'{name}: studies/measured/{path.name} does not exist, so there is nothing to draw.'
    )
  return runs.read_csv(path)


def write(
  chosen: Protocol, found: Sequence[StudyRun], out: pathlib.Path, written: str = ''
) -> None:
  """Print the tables of these runs, and write them and the figures to a folder.

  `written` is a sentence about when the protocol was written.
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
  """Return the text above the tables: the protocol, and the commits of the runs."""
  finished = sum(run.is_finished for run in found)
  commits = dict.fromkeys(commit for run in found for commit in run.commits)
  changed = ' (+: with uncommitted changes)' if any(c.endswith('+') for c in commits) else ''
  return '\n\n'.join(
    [
      f'# Study {chosen.name}',
      chosen.words,
      f'{written}{finished} of {len(found)} '
      f'runs finished. Commits: {", ".join(commits) or "unknown"}{changed}. Intervals are 95% '
      f'percentile bootstrap intervals over seeds, with {comparison.RESAMPLES:,} resamples. '
      'Differences are paired by seed. With few seeds, bootstrap intervals are too narrow. There '
      f'is no interval for fewer than {comparison.FEWEST} values or for values that are all equal. '
      "The verdict depends on a difference's t interval. Its confidence level is 1 - .05 / "
      f'{chosen.study.num_comparisons}, so that all t intervals of the study together hold in 95% '
      'of cases.',
    ]
  )
