"""Messages that a run prints at the start, after each step, and at the end."""

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import counted
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import comparison, runs
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.rollout.stages import RolloutSetup
from exgrpo_jax.runtime import console


def banner(
  rollout: RolloutSetup,
  evaluations: Sequence[QuestionSet],
  every: int,
  num_done: int,
  length: str,
  workdir: str,
) -> str:
  """Return the opening message: method, devices, model, data, steps and workdir.

  `every` is the number of steps between evaluations, `num_done` is the number of finished steps,
  and `length` is the number of steps as text.
  """
  mesh = rollout.meshes.training
  kind = mesh.devices.flat[0].device_kind
  shape, config = rollout.score_spec.model, rollout.config
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes(shape, mesh)))
  ratio = rollout.replay_config.ratio
  rows = [
    ('method', f'ExGRPO, replay.ratio={ratio:g}' if ratio else 'plain GRPO, replay.ratio=0'),
    ('device', f'{counted(mesh.size, kind)}, {counted(jax.process_count(), "host")}'),
    ('mesh', f'{_axes(mesh)} in training'),
    ('', f'{_axes(rollout.meshes.decoding)} in decoding'),
    (
      'model',
      f'{count:,} parameters, {shape.dtype}: {counted(shape.num_layers, "layer")} of width '
      f'{shape.width}, a vocabulary of {shape.vocab_size:,}',
    ),
    ('training', _size(rollout.data)),
    (
      'each step',
      f'{counted(config.questions, "question")}, {counted(config.group_size, "response")} each',
    ),
    *[('evaluation', _size(questions)) for questions in evaluations],
    *[('', f'at the start, every {counted(every, "step")} and at the end')] * bool(evaluations),
    ('steps', length + (f' ({num_done:,} already done)' if num_done else '')),
    ('workdir', workdir),
  ]
  return _columns(rows)


def progress_line(
  step: int, num_steps: int, metrics: Mapping[str, float], seconds_left: float | None
) -> str:
  """Format a step as one line with columns of fixed width; '-' marks an unknown value.

  On a narrow terminal, the least important columns are left out.
  """

  def show(name: str, spec: str, width: int) -> str:
    return (format(metrics[name], spec) if name in metrics else '-').rjust(width)

  time_left = '-'
  if seconds_left is not None:
    minutes, seconds = divmod(round(seconds_left), 60)
    time_left = f'{minutes // 60}:{minutes % 60:02d}:{seconds:02d}'
  memory = 'memory/device_peak'  # unknown on a CPU
  columns = [
    f'step {step:>{len(str(num_steps))}}/{num_steps}',
    f'reward {show("reward", ".3f", 6)}',
    f'pass {show("pass_rate/fresh", ".3f", 5)}',
    f'entropy {show("entropy", ".3f", 6)}',
    f'length {show("length/mean", ".0f", 5)}',
    f'buffer {show("buffer/questions", ".0f", 5)}',
    f'retired {show("buffer/retired", ".0f", 5)}',
    f'{show("perf/tokens_per_second", ",.0f", 7)} tok/s',
    *([f'{show(memory, ".1f", 5)} GiB'] if memory in metrics else []),
    f'{time_left:>8} left',
  ]
  width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
  for name in ('GiB', 'retired', 'buffer', 'tok/s', 'entropy', 'length'):
    if len(' | '.join(columns)) > width:
      columns = [column for column in columns if name not in column]
  return ' | '.join(columns)


def finished(workdir: str, num_done: int, length: str) -> str:
  """Return the message for a run that has taken more steps than `RunConfig.length` allows."""
  return (
    f'{workdir}: the run is already finished. It has taken {counted(num_done, "step")}, and '
    f'{length}. Nothing was changed. Set a larger --{length.partition("=")[0]} to continue the run.'
  )


def ended_early(step: int, num_steps: int, patience: int) -> str:
  """Return the message for a run that stopped early."""
  return (
    f'ended after step {step} of {num_steps}: validation/score has not improved in '
    f'{counted(patience, "evaluation")} in a row (config.evaluation.patience). Set a larger '
    'patience, or 0, to continue the run.'
  )


def farewell(
  records: Run,
  workdir: str,
  program: Sequence[str],
  *,
  can_evaluate: bool = True,
  can_export: bool = True,
) -> str:
  """Return the closing message: results, output files and suggested next commands.

  `program` lists the words that start a command, such as ['exgrpo']. `can_evaluate` and
  `can_export` determine whether `evaluate` and `export` are among the suggestions.
  """
  files = {
    'report': 'report.html',
    'metrics': 'metrics.jsonl',
    'responses': 'samples',
    'evaluations': 'evaluation',
    'policies': 'export',
    'this output': 'console.log',
  }
  paths = [(name, os.path.join(workdir, file)) for name, file in files.items()]
  outputs = _columns([(name, path) for name, path in paths if os.path.exists(path)])
  commands = next_commands(workdir, program, can_evaluate, can_export)
  next_text = '\n  '.join(['next:', *commands]) if commands else ''
  return '\n'.join(
    filter(None, (summary_table(records), _evaluation_table(records), outputs, next_text))
  )


def summary_table(run: Run) -> str:
  """Return a text table of the first, last and best values of a run's metrics and evaluations.

  'first' and 'last' are means over the first and last tenth of the records that contain the metric
  (at least one record). 'best' is the value of `comparison.best`, followed by its step; entropy and
  length have no best value. Metrics that appear in no record are left out.
  """
  names = {name for record in run for name in record if name.startswith('eval/')}
  evaluations = [
    name for name in sorted(names) if not name.endswith(('_low', '_high', '/questions'))
  ]
  without_best = ('entropy', 'length/mean')
  rows: list[tuple[str, ...]] = [('', 'first', 'last', 'best', 'at step')]
  for name in ('reward', 'pass_rate/fresh', 'pass_rate/replay', *without_best, *evaluations):
    points = [(record['step'], record[name]) for record in run if name in record]
    if points:
      values = [value for _, value in points]
      tenth = max(1, len(values) // 10)
      first, last = float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))
      best = math.nan if name in without_best else comparison.best(name, values)
      best_step = next((str(step) for step, value in points if value == best), '-')
      best_text = '-' if math.isnan(best) else _format_value(best)
      rows.append((name, _format_value(first), _format_value(last), best_text, best_step))
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
    '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
  )


def _format_value(value: float) -> str:
  return f'{value:.3f}' if abs(value) < 100 else f'{value:,.0f}'


def _axes(mesh: Mesh) -> str:
  return ', '.join(f'{name}={size}' for name, size in mesh.shape.items())


def _evaluation_table(records: Run) -> str:
  """List each source's first and last score with 95% intervals; '' if there are no evaluations.

  The score is avg@k, or pass@1 if each question has one response.
  """
  evaluations = [record for record in records if runs.score_names([[record]])]
  if not evaluations:
    return ''
  last, rows = evaluations[-1], []
  scores = set(runs.score_names([[last]]).values())
  for name in last:
    if name not in scores:
      continue
    source, _, measure = name.removeprefix('eval/').rpartition('/')
    first = next(record for record in evaluations if name in record)
    points = [
      f'{record[name]:.3f} ({record[f"{name}_low"]:.3f} to {record[f"{name}_high"]:.3f}) '
      f'after step {record["step"]:.0f}'
      for record in ([first] if first is last else [first, last])
    ]
    rows.append((f'{measure} on {source}', '  ->  '.join(points)))
  return f'evaluation, first and last, with 95% intervals:\n{_columns(rows)}'


def next_commands(
  workdir: str, program: Sequence[str], can_evaluate: bool = True, can_export: bool = True
) -> list[str]:
  """Return suggested commands for a finished run; see `farewell` for the arguments."""
  out = os.path.join(workdir, 'export', 'last')
  checkpoint = f'--checkpoint={workdir}'
  # The shell finds the script only if the environment is activated.
  script = shutil.which('tensorboard')
  viewer = ['tensorboard'] if script else [sys.executable, '-m', 'tensorboard.main']
  commands = list[list[str]]()
  if script or importlib.util.find_spec('tensorboard'):  # it is not a dependency
    commands.append([*viewer, f'--logdir={os.path.join(workdir, "tensorboard")}'])
  if can_evaluate:
    commands.append([*program, 'evaluate', checkpoint, '--samples=4'])
  if can_export and not os.path.exists(out):
    commands.append([*program, 'export', checkpoint, f'--out={out}'])
  return [console.to_copy(command) for command in commands]


def _size(data: QuestionSet) -> str:
  return f'{counted(len(data.questions), "question")} from {data.spec}'


def _columns(rows: Sequence[tuple[str, str]]) -> str:
  width = max((len(name) for name, _ in rows), default=0)
  return '\n'.join(f'  {name:<{width}}  {value}' for name, value in rows)
