"""The runs of a study: what each has scored, and what it had read, generated and taken by then."""

import csv
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import records
from exgrpo_jax.runtime import environment
from exgrpo_jax.runtime.clock import NO_TRAINING

# What is spent on training up to an evaluation, and its unit: the fields of an Evaluation.
COSTS = {
  'step': 'training step',
  'fresh_questions': 'fresh questions read',
  'generated_tokens': 'tokens generated',
  'training_seconds': 'training seconds',
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The scores of one step of a run, and what training had cost until then."""

  step: int
  fresh_questions: int  # visits of questions that were not replayed
  generated_tokens: int
  training_seconds: float  # of steps, without warm start and clock.NO_TRAINING
  scores: Mapping[str, float]  # by the name of the metric, 'eval/…'


@dataclasses.dataclass(frozen=True)
class StudyRun:
  """A run of a study, as far as it has been recorded."""

  setting: str
  arm: str
  seed: int
  command: str
  commits: tuple[str, ...]  # that it ran on, '+' behind one with uncommitted changes
  is_finished: bool
  evaluations: tuple[Evaluation, ...]  # by step


def evaluations(workdir: str, questions: int) -> tuple[Evaluation, ...]:
  """Those of a run whose steps work on so many questions; none where it has not begun."""
  found, fresh, tokens, seconds = [], 0, 0, 0.0
  for record in records.read(workdir):
    if 'replay/rows' in record:  # a training step; evaluation before the first is step 0
      fresh += questions - int(record['replay/rows'])
      tokens += int(record['length/total'])
      apart = sum(record.get(f'time/{phase}', 0.0) for phase in NO_TRAINING)
      seconds += record['time/step'] - apart
    scores = {name: value for name, value in record.items() if name.startswith('eval/')}
    if scores:
      found.append(Evaluation(int(record['step']), fresh, tokens, seconds, scores))
  return tuple(found)


def commits(workdir: str) -> tuple[str, ...]:
  """Of all starts of a run, each once; none where it was not started from a clone."""
  found = [start['commit'] for start in environment.read(workdir) if start.get('commit')]
  names = [c['hash'] + '+' * c['has_uncommitted_changes'] for c in found]
  return tuple(dict.fromkeys(names))


def finished(
  runs: Sequence[StudyRun], setting: str, arm: str, measure: str
) -> dict[int, tuple[Evaluation, ...]]:
  """Seed -> the evaluations with the measure, of every finished run of the arm in the setting.

  Raises InputError where a finished run has none.
  """
  found = {}
  for run in runs:
    if run.is_finished and (run.setting, run.arm) == (setting, arm):
      found[run.seed] = tuple(one for one in run.evaluations if measure in one.scores)
      if not found[run.seed]:
        names = sorted({name for one in run.evaluations for name in one.scores})
        raise InputError(
          f"measure='{measure}' was not measured by '{setting},{arm},seed={run.seed}'; there are: "
          f'{", ".join(names)}. A new study, in another --workdir, can name one of them.'
        )
  return found


def last(evaluations: Mapping[int, Sequence[Evaluation]], measure: str) -> dict[int, float]:
  """Seed -> the measure at the last evaluation."""
  return {seed: found[-1].scores[measure] for seed, found in evaluations.items()}


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> np.ndarray:
  """The differences to the baseline [N], of the seeds that both have."""
  return np.array([values[seed] - baseline[seed] for seed in values if seed in baseline])


def write_csv(path: str | os.PathLike, runs: Sequence[StudyRun]) -> None:
  """A row for each evaluation of each run, unfinished ones included; written atomically."""
  scored = itertools.chain(*(run.evaluations for run in runs))
  names = sorted({name for evaluation in scored for name in evaluation.scores})
  head = ['setting', 'arm', 'seed', 'finished', *COSTS, *names, 'commit', 'command']
  with open(f'{path}.new', 'w', encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, head)
    writer.writeheader()
    writer.writerows(_rows(runs))
  os.replace(f'{path}.new', path)


def _rows(runs: Sequence[StudyRun]) -> Iterator[dict[str, object]]:
  for run in runs:
    for evaluation in run.evaluations:
      yield {
        'setting': run.setting,
        'arm': run.arm,
        'seed': run.seed,
        'finished': run.is_finished,
        **{name: getattr(evaluation, name) for name in COSTS},
        **evaluation.scores,
        'commit': ' '.join(run.commits),
        'command': run.command,
      }
