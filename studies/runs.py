"""A study's runs: their scores, and the questions, tokens and time used up to each score."""

import csv
import dataclasses
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.runtime import environment
from exgrpo_jax.runtime.clock import NO_TRAINING
from exgrpo_jax.runtime.replacement import replacing

# The costs of training up to an evaluation, as fields of Evaluation, and their units.
COSTS = {
  'step': 'training step',
  'fresh_questions': 'fresh questions read',
  'generated_tokens': 'tokens generated',
  'training_seconds': 'training seconds',
}

# Metrics of training steps that explain the scores, and prefixes of further metrics.
EXPLAINING = (
  'entropy',
  'pass_rate/replay',
  'replay/rows',
  'replay/times_mean',
  'replay/effective_sample_size',
)
EXPLAINING_GROUPS = ('alignment/', 'environment/')
_APART = (*NO_TRAINING, 'alignment')  # 'alignment' was the callback's name in earlier versions


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The scores after one step of a run, and the cost of training up to this step."""

  step: int
  fresh_questions: int  # visits to questions, not counting replays
  generated_tokens: int
  training_seconds: float  # duration of the steps, without warm start and clock.NO_TRAINING
  # Number of distinct questions in the steps so far, including replayed questions; None if a step's
  # records are missing.
  distinct_questions: int | None
  # Mean of each metric that explains the scores, over the steps since the last evaluation in which
  # the metric was recorded. Metrics that were not recorded in any of these steps are left out.
  explaining: Mapping[str, float]
  scores: Mapping[str, float]  # by metric name, 'eval/…'


@dataclasses.dataclass(frozen=True)
class StudyRun:
  """The recorded results of one of a study's runs."""

  setting: str
  arm: str
  seed: int
  command: str
  commits: tuple[str, ...]  # the commits of its starts; '+' marks uncommitted changes
  warm_start: str  # digest of the parameters after the warm start; '' if not recorded
  is_finished: bool
  evaluations: tuple[Evaluation, ...]  # by step


def evaluations(workdir: str, questions: int) -> tuple[Evaluation, ...]:
  """Read the evaluations of a run with `questions` per step, or () if the run has not begun.

  Scores that only `exgrpo evaluate` measured, such as avg@32, are added to the last evaluation.
  """
  found, fresh, tokens, seconds = [], 0, 0, 0.0
  distinct, since = _distinct_questions(workdir), []
  for record in metrics.read(workdir):
    if 'replay/rows' in record:  # a training step; step 0 is the evaluation before the first one
      # In earlier versions, each replayed question had a replayed row.
      planned = questions - record.get('replay/questions', record['replay/rows'])
      fresh += int(record.get('groups/drawn', planned))  # dynamic sampling may draw more
      tokens += int(record['length/total'])
      apart = sum(record.get(f'time/{phase}', 0.0) for phase in _APART)
      seconds += record['time/step'] - apart
      since.append(record)
    scores = {name: value for name, value in record.items() if name.startswith('eval/')}
    if scores:
      step = int(record['step'])
      found.append(
        Evaluation(step, fresh, tokens, seconds, distinct.get(step), _explaining(since), scores)
      )
      since = []
  if found:
    later = metrics.read_evaluations(workdir, found[-1].step)
    added = itertools.chain.from_iterable(line['scores'].items() for line in later)
    found[-1] = dataclasses.replace(found[-1], scores={**dict(added), **found[-1].scores})
  return tuple(found)


def _explaining(steps: Run) -> dict[str, float]:
  """Average each metric over the steps in which it was recorded."""
  names = {
    name
    for step in steps
    for name in step
    if name in EXPLAINING or name.startswith(EXPLAINING_GROUPS)
  }
  return {name: statistics.fmean(s[name] for s in steps if name in s) for name in names}


def _distinct_questions(workdir: str) -> dict[int, int]:
  """Count the distinct questions up to each step, until a step's records are missing."""
  seen, count = set(), {0: 0}
  for table in step_records.tables(workdir, 'questions'):
    for step, question in zip(table['step'].to_pylist(), table['question'].to_pylist()):
      if step - 1 not in count:  # an earlier file is missing
        return count
      seen.add(question)
      count[step] = len(seen)
  return count


def commits(workdir: str) -> tuple[str, ...]:
  """List the distinct commits of a run's starts, or () if the run was not started from a clone."""
  found = [start['commit'] for start in environment.read(workdir) if start.get('commit')]
  names = [c['hash'] + '+' * c['has_uncommitted_changes'] for c in found]
  return tuple(dict.fromkeys(names))


def warm_start(workdir: str) -> str:
  """Read the digest of a run's initial parameters, or '' if it was not recorded."""
  found = [start.get(environment.PARAMETERS, '') for start in environment.read(workdir)]
  return next(filter(None, found), '')


def finished(
  runs: Sequence[StudyRun], setting: str, arm: str, measure: str
) -> dict[int, tuple[Evaluation, ...]]:
  """Return seed -> evaluations with the measure, for finished runs of the arm in the setting.

  Raises InputError if a finished run has no evaluation with the measure.
  """
  found = {}
  for run in runs:
    if run.is_finished and (run.setting, run.arm) == (setting, arm):
      found[run.seed] = tuple(one for one in run.evaluations if measure in one.scores)
      if not found[run.seed]:
        names = sorted({name for one in run.evaluations for name in one.scores})
        raise InputError(
          f"measure='{measure}' was not measured by the run '{setting},{arm},seed={run.seed}'. "
          f'In a new study, with another --workdir, use one of these: {", ".join(names)}.'
        )
  return found


def compared(
  evaluations: Mapping[int, Sequence[Evaluation]], measure: str, tokens: int = 0
) -> dict[int, float]:
  """Return seed -> the measure's last value, or its mean over the first `tokens` generated tokens.

  The mean is the area under the curve of the measure against tokens, divided by `tokens`. The
  curve is linear between evaluations and constant after the last evaluation.
  """
  if not tokens:
    return {seed: found[-1].scores[measure] for seed, found in evaluations.items()}
  return {
    seed: _mean_over(
      [one.generated_tokens for one in found], [one.scores[measure] for one in found], tokens
    )
    for seed, found in evaluations.items()
  }


def _mean_over(at: Sequence[int], values: Sequence[float], tokens: int) -> float:
  corners = [0, *(one for one in at if 0 < one < tokens), tokens]
  return float(np.trapezoid(np.interp(corners, at, values), corners)) / tokens


def write_csv(path: str | os.PathLike, runs: Sequence[StudyRun]) -> None:
  """Write a row for each evaluation of each run, finished or not. Replaces the file atomically.

  A run's first row also contains its warm start, commits and command. Numbers have six
  significant digits.
  """
  written = [evaluation for run in runs for evaluation in run.evaluations]
  explaining = sorted({*EXPLAINING, *itertools.chain(*(one.explaining for one in written))})
  names = sorted(set(itertools.chain(*(one.scores for one in written))))
  head = ['setting', 'arm', 'seed', 'finished', *COSTS, 'distinct_questions', *explaining, *names]
  with (
    replacing(path) as unfinished,
    unfinished.open('w', encoding='utf-8', newline='') as file,
  ):
    writer = csv.DictWriter(file, [*head, 'warm_start', 'commit', 'command'])
    writer.writeheader()
    writer.writerows(_rows(runs))


def _rows(runs: Sequence[StudyRun]) -> Iterator[dict[str, object]]:
  for run in runs:
    of_run = {
      'warm_start': run.warm_start,
      'commit': ' '.join(run.commits),
      'command': run.command,
    }
    for place, evaluation in enumerate(run.evaluations):
      numbers = {**evaluation.explaining, **evaluation.scores}
      yield {
        'setting': run.setting,
        'arm': run.arm,
        'seed': run.seed,
        'finished': run.is_finished,
        **{name: getattr(evaluation, name) for name in COSTS},
        'training_seconds': round(evaluation.training_seconds, 2),
        'distinct_questions': evaluation.distinct_questions,
        **{name: f'{value:.6g}' for name, value in numbers.items()},
        **(of_run if place == 0 else {}),
      }


def read_csv(path: str | os.PathLike) -> list[StudyRun]:
  """Read the runs from a CSV of `write_csv`, with the digits that the file contains."""
  with open(path, encoding='utf-8', newline='') as file:
    rows = list(csv.DictReader(file))
  of_run: dict[tuple[str, str, int], list[dict[str, str]]] = {}
  for row in rows:
    of_run.setdefault((row['setting'], row['arm'], int(row['seed'])), []).append(row)
  return [
    StudyRun(
      *place,
      command=own[0]['command'],
      commits=tuple(own[0]['commit'].split()),
      warm_start=own[0].get('warm_start', ''),
      is_finished=own[0]['finished'] == 'True',
      evaluations=tuple(map(_evaluation, own)),
    )
    for place, own in of_run.items()
  ]


def _evaluation(row: Mapping[str, str]) -> Evaluation:
  told = {name: float(text) for name, text in row.items() if '/' in name and text}
  told |= {name: float(row[name]) for name in EXPLAINING if row.get(name)}
  distinct = row.get('distinct_questions')
  return Evaluation(
    step=int(row['step']),
    fresh_questions=int(row['fresh_questions']),
    generated_tokens=int(row['generated_tokens']),
    training_seconds=float(row['training_seconds']),
    distinct_questions=int(distinct) if distinct else None,
    explaining={name: value for name, value in told.items() if not name.startswith('eval/')},
    scores={name: value for name, value in told.items() if name.startswith('eval/')},
  )
