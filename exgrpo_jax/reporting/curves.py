"""Curves of one run: its metrics over steps, as curves.png and curves.svg in its workdir.

exgrpo reporting.curves WORKDIR draws curves.png at low priority; artist.py starts it.
"""

import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import panels, records
from exgrpo_jax.reporting.panels import HeatMap, Line, Lines, Panel, Stack
from exgrpo_jax.reporting.records import Run

# What each panel of lines shows: title, unit, {metric: label}, and what else is true of it.
_SCORE = (
  ('Reward', 'mean over responses', {'reward': 'reward'}, {}),
  (
    'Pass rate',
    'share of responses',
    {'pass_rate/fresh': 'fresh questions', 'pass_rate/replay': 'replayed questions'},
    {'share': True},
  ),
)
_SIGNAL = (
  (
    'Groups that teach nothing',
    'share of groups',
    {
      'zero_variance': 'equal rewards',
      'groups/solved_by_all': 'solved by all',
      'groups/solved_by_none': 'solved by none',
    },
    {'share': True},
  ),
  ('Clipped tokens', 'share of fresh tokens', {'clip_share': 'clipped'}, {'share': True}),
  ('Skipped updates', 'updates of a step', {'skipped_updates': 'skipped'}, {'smooth': False}),
  ('Learning rate', 'mean over updates', {'learning_rate': 'learning rate'}, {'smooth': False}),
)
_TRAINING = (
  ('Gradient norm', 'L2 norm, log scale', {'gradient_norm': 'gradient norm'}, {'log': True}),
  ('Entropy', 'nats per token', {'entropy': 'entropy'}, {}),
  ('Response length', 'tokens', {'length/mean': 'mean'}, {}),
  ('Truncated responses', 'share of responses', {'length/truncated': 'truncated'}, {'share': True}),
  (
    'Importance ratio of carried tokens',
    'ratio, log scale',
    {'carry/ratio_mean': 'mean', 'carry/ratio_max': 'max'},
    {'log': True},
  ),
)
_REPLAY = (
  (
    'Replay buffer',
    'questions',
    {'buffer/questions': 'in the buffer', 'buffer/retired': 'retired'},
    {'smooth': False},
  ),
  (
    'Importance ratio of replayed tokens',
    'ratio, log scale',
    {'replay/ratio_mean': 'mean', 'replay/ratio_max': 'max'},
    {'log': True},
  ),
  (
    'Effective sample size of replay',
    'share of replayed tokens',
    {'replay/effective_sample_size': 'effective sample size'},
    {'share': True},
  ),
  ('Age of replayed trajectories', 'steps', {'replay/age_mean': 'mean'}, {}),
)
_EVALUATIONS = {  # kind of score -> title, unit
  'pass@1': ('Evaluation: pass@1, 95% interval', 'share correct'),
  'valid_steps': ('Evaluation: valid steps', 'share of responses'),
}
_ABSENT_AT_ZERO = ('Skipped updates', 'Replay buffer')  # counts of what never happened
OUTCOMES = {  # of verdicts, from the bottom: metric -> colour
  'grading/correct': '#2e8b57',
  'grading/wrong': '#e07b39',
  'grading/no_answer': '#b0b0b0',
  'grading/timed_out': '#7b5ea7',
  'grading/crashed': '#222222',
}
_PHASES = 6  # the longest ones have a layer of their own
_NO_PHASES = ('time/step', 'time/device_wait', 'time/compile_total')


def draw(workdir: str | os.PathLike, kinds: Sequence[str] = ('png', 'svg')) -> list[str]:
  """Draws what a run has recorded so far; returns the files that it wrote.

  Lines connect the records that have their metric; panels without a finite value are left out.
  With several kinds the last is complete only when all are.

  Raises:
    InputError: no panel is left.
  """
  run = records.read(workdir)
  drawn = all_panels(run)
  paths = [os.path.join(workdir, f'curves.{kind}') for kind in kinds]
  if not drawn:
    raise InputError(
      f'{paths[0]}: nothing to draw: none of the {len(run)} records has a finite value of a metric '
      'that is plotted.'
    )
  from exgrpo_jax.reporting import drawing

  drawing.save(drawn, paths, title(pathlib.Path(workdir), run), (run[0]['step'], run[-1]['step']))
  return paths


def all_panels(run: Run) -> list[Panel]:
  """The panels for which the run has data."""
  return [
    *score_panels(run),
    *signal_panels(run),
    *training_panels(run),
    *replay_panels(run),
  ]


def score_panels(run: Run) -> list[Lines]:
  """How often responses are right: those of evaluations, and those of training."""
  return [*evaluation_panels(run, ('pass@1',)), *_all_lines(run, _SCORE)]


def signal_panels(run: Run) -> list[Lines]:
  """How much there is to learn from in a step, and what becomes of it in the update."""
  return _all_lines(run, _SIGNAL)


def training_panels(run: Run) -> list[Panel]:
  """What the responses are like, and what a step takes."""
  lines = [*evaluation_panels(run, ('valid_steps',)), *_all_lines(run, _TRAINING)]
  made = [*lines, _outcomes(run), _phases(run)]
  return [panel for panel in made if panel]


def replay_panels(run: Run) -> list[Panel]:
  """The buffer, and what was replayed of it."""
  lines = _all_lines(run, _REPLAY)
  buckets = bucket_panel(run)
  return [*lines[:1], *([buckets] if buckets else []), *lines[1:]]


def _all_lines(run: Run, rows: Sequence[tuple[Any, ...]]) -> list[Lines]:
  """A panel of each of these rows for which the run has data."""
  return [panel for panel in (_lines(run, *row) for row in rows) if panel]


def _points(run: Run, log: bool, *names: str) -> tuple[list[float], ...]:
  """Steps, and the values of each name, of the records where all of them can be drawn."""

  def can_be_drawn(value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not log)

  rows = [
    (record['step'], *(record[name] for name in names))
    for record in run
    if all(name in record and can_be_drawn(record[name]) for name in names)
  ]
  return tuple(map(list, zip(*rows))) if rows else ([],) * (len(names) + 1)


def _lines(
  run: Run, title: str, unit: str, labels: dict[str, str], traits: dict[str, bool]
) -> Lines | None:
  lines = []
  for name, label in labels.items():
    steps, values = _points(run, traits.get('log', False), name)
    if steps:
      lines.append(Line(label, steps, values))
  if title in _ABSENT_AT_ZERO and not any(any(line.values) for line in lines):
    return None
  options = {'smooth': True, 'legend': False} | traits
  return Lines(title, unit, tuple(lines), **options) if lines else None


def evaluation_panels(run: Run, kinds: Sequence[str] = ('pass@1', 'valid_steps')) -> list[Lines]:
  """A panel per kind of evaluation, with a line per data source."""
  names = {name for record in run for name in record}
  made = []
  for kind in kinds:
    matches = (re.fullmatch(f'eval/(.+)/{kind}', name) for name in names)
    lines = []
    for source in sorted(match[1] for match in matches if match):
      name = f'eval/{source}/{kind}'
      steps, values = _points(run, False, name)
      band_steps, low, high = _points(run, False, f'{name}_low', f'{name}_high')
      if steps:
        band = (band_steps, low, high) if band_steps else None
        lines.append(Line(source, steps, values, band))
    if lines:
      made.append(Lines(*_EVALUATIONS[kind], tuple(lines), share=True))
  return made


def _outcomes(run: Run) -> Stack | None:
  """Shares of the verdicts' outcomes, of those that occur."""
  steps, *shares = _points(run, False, *OUTCOMES)
  kept = {name: values for name, values in zip(OUTCOMES, shares) if any(values)}
  if not kept:
    return None
  return Stack(
    title='Outcomes',
    unit='share of responses',
    steps=steps,
    layers={
      name.partition('/')[2].replace('_', ' '): _smoothed_if_long(values)
      for name, values in kept.items()
    },
    colors=[OUTCOMES[name] for name in kept],
    top=1.0,
  )


def bucket_panel(run: Run) -> HeatMap | None:
  """The buffer's questions by bucket."""
  names = []
  while any(f'buffer/bucket_{len(names)}' in record for record in run):
    names.append(f'buffer/bucket_{len(names)}')
  steps, *counts = _points(run, False, *names)
  if not names or not np.any(counts):
    return None
  return HeatMap(
    title='Replay buffer by bucket',
    unit=f'bucket: successes of {len(names)}',
    steps=steps,
    counts_KS=np.array(counts),
    what='questions',
  )


def _phases(run: Run) -> Stack | None:
  """Seconds of a step by phase: the longest phases, and all the rest as one.

  The axis ends where few steps reach, for the first ones compile and take far longer.
  """
  timed = [record for record in run if 'time/step' in record]
  if not timed:
    return None
  names = {name for record in timed for name in record if name.startswith('time/')}
  seconds = {
    name: np.array([record.get(name, 0.0) for record in timed])
    for name in sorted(names.difference(_NO_PHASES))
  }
  longest = sorted(seconds, key=lambda name: -seconds[name].sum())[:_PHASES]
  total = np.array([record['time/step'] for record in timed])
  layers = {name.removeprefix('time/').replace('_', ' '): seconds[name] for name in longest}
  # What a phase takes after the clock has been read counts in the next step.
  rest = np.maximum(total - sum(layers.values()), 0.0)
  return Stack(
    title='Time of a step by phase',
    unit='seconds',
    steps=[record['step'] for record in timed],
    layers=layers | {'other, compiling': rest},
    colors=[*(f'C{index}' for index in range(len(layers))), '#b0b0b0'],
    top=1.1 * float(np.percentile(total, 98)),
  )


def _smoothed_if_long(values: list[float]) -> np.ndarray:
  return panels.smoothed(values) if len(values) >= panels.SMOOTHED_FROM else np.array(values)


def title(workdir: pathlib.Path, run: Run) -> str:
  """The workdir's name, and what its config says, as far as the run has written it down."""
  parts = [workdir.resolve().name]
  steps = f'step {run[-1]["step"]}'
  if (workdir / 'environment.json').exists():
    command = json.loads((workdir / 'environment.json').read_text())[-1]['command']
    if config := re.search(r'--config[= ]([^\s\']+)', command):
      parts.append(f'config {pathlib.Path(config[1]).stem}')
  if (workdir / 'config.json').exists():
    values = json.loads((workdir / 'config.json').read_text())
    ratio, rollout = values['replay']['ratio'], values['rollout']
    parts += [
      f'ExGRPO, replay {ratio:g}' if ratio else 'GRPO',
      f'{rollout["questions"]} × {rollout["samples"]} rollouts',
      f'seed {values["seed"]}',
    ]
    steps += f' of {values["num_steps"]}'
  return ' · '.join([*parts, steps])


if __name__ == '__main__':
  if hasattr(os, 'nice'):
    os.nice(19)
  draw(sys.argv[1], ('png',))
