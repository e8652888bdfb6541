"""A run's overview, the first page: scores, learning signal, settings, and how it was started."""

import datetime
import itertools
import math
import os
import pathlib
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import counted
from exgrpo_jax.reporting import alarms, comparison, messages, runs
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.page import charts, evaluations
from exgrpo_jax.reporting.page.evaluations import Benchmark, Shares
from exgrpo_jax.reporting.runs import Recorded
from exgrpo_jax.runtime import console, environment

_SIGNAL = (  # metric and label; shares of a step's groups or tokens
  ('groups/zero_advantage', 'groups without a learning signal'),
  ('groups/solved_by_all', 'groups solved by all responses'),
  ('groups/solved_by_none', 'groups solved by no response'),
  ('policy/clip_fraction', 'fresh tokens clipped'),
)
_LOG, _WARNING = 'console.log', 'WARNING: '
_NAMED = re.compile(r'step (\d+):')
_PROGRESS = re.compile(r'step +(\d+)/\d+ \|')  # the line that follows a step's warnings


def describe(run: Recorded, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
  """Return a run's scores, learning signal, facts, curves, warnings and settings.

  `benchmarks` come from `evaluations.describe` for this run. Anything without records is left out.
  """
  # Earlier versions also recorded a start when a finished run had no steps left.
  starts = [
    start for start in environment.read(run.workdir) if start['first_step'] <= run.last_step
  ]
  replays = bool(run.config['replay.ratio'])
  scores = _scores(run.metrics, benchmarks)
  return {
    'facts': _facts(run, starts),
    # Each setting that differs from the base config: name, base value, the run's value.
    'settings': [
      [name, *('not set' if setting is None else str(setting) for setting in (default, value))]
      for name, default, value in runs.departures(run.config)
    ],
    'starts': list(map(_start, starts)),
    'scores': scores,
    'next': _next_actions(run, starts, scores),
    'signal': _signal(run),
    'panels': charts.overview(run.metrics, replays),
    'replays': replays,
    'warnings': warnings_of(pathlib.Path(run.workdir)),
  }


def warnings_of(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Return the run's printed warnings as {'step', 'text'}, sorted by step, without duplicates.

  A warning that names no step is assigned to the step during which it was printed.
  """
  path = workdir / _LOG
  if not path.exists():
    return []
  warnings: set[tuple[int, str]] = set()
  pending_texts: list[str] = []  # warnings that name no step
  step = 0  # the last finished step
  with path.open(encoding='utf-8', errors='replace') as file:
    for line in file:
      if line.startswith(_WARNING):
        text = line.removeprefix(_WARNING).strip()
        if match := _NAMED.match(text):
          warnings.add((int(match[1]), text))
        else:
          pending_texts.append(text)
      elif match := _PROGRESS.match(line):
        step = int(match[1])
        warnings.update((step, text) for text in pending_texts)
        pending_texts.clear()
  warnings.update((step, text) for text in pending_texts)
  return [{'step': step, 'text': text} for step, text in sorted(warnings)]


def _signal(run: Recorded) -> dict[str, Any] | None:
  """Return the mean learning signal over the last tenth of `num_steps`, but at least ten steps."""
  training_records = [record for record in run.metrics if record['step'] > 0]
  recent = training_records[-max(10, run.config['num_steps'] // 10) :]
  if not recent:
    return None
  means = [
    [label, *charts.numbers([statistics.mean(record[name] for record in recent)])]
    for name, label in _SIGNAL
    if all(name in record for record in recent)
  ]
  return {
    'from': recent[0]['step'],
    'to': recent[-1]['step'],
    'shares': means,
    'note': alarms.silent_groups(recent),
    'skipped': round(sum(record.get('optimizer/skipped', 0.0) for record in training_records)),
    'learning_rate': charts.numbers([recent[-1].get('learning_rate', math.nan)])[0],
  }


def _facts(run: Recorded, starts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Return [name, value] pairs for a reader who has never seen the run."""
  config, records = run.config, run.metrics
  ratio = config['replay.ratio']
  speeds = [
    record['perf/tokens_per_second'] for record in records if 'perf/tokens_per_second' in record
  ]
  tokens = sum(record.get('length/total', 0.0) for record in records)
  model = (config['model.path'] or config.get('model.repository', '')) or (
    f'{counted(config["model.num_layers"], "layer")} of width {config["model.width"]}, from scratch'
  )
  questions = counted(config['rollout.questions'], 'question')
  responses = counted(config['rollout.group_size'], 'response')
  facts = [
    ['method', f'ExGRPO, replay.ratio {ratio:g}' if ratio else 'GRPO (replay.ratio 0)'],
    ['steps', f'{records[-1]["step"]:.0f} of {config["num_steps"]}'],
    ['per step', f'{questions} × {responses}'],
    ['duration', _duration_text(records, starts)],
    ['tokens generated', f'{tokens:,.0f}'],
  ]
  if speeds:
    facts.append(['tokens per second, median', f'{statistics.median(speeds):,.0f}'])
  facts += [
    ['model', model],
    ['training data', str(config['data.train'])],
    ['seed', str(config['seed'])],
  ]
  if starts:
    device = starts[-1]['device']
    hosts = f', {starts[-1]["hosts"]} hosts' if starts[-1]['hosts'] > 1 else ''
    facts.append(['devices', f'{device["count"]} × {device["kind"]}{hosts}'])
    facts.append(['started', starts[0]['time'].replace('T', ' ')])
  return facts


def _duration_text(records: Run, starts: Sequence[Mapping[str, Any]]) -> str:
  """Format the run's duration, and the part of it that was spent in steps.

  The duration is the time from each start to the last record of that start, summed over all starts.
  Steps that a later start repeated are not counted, because their old records are dropped.
  """

  def format_seconds(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))

  in_steps = format_seconds(sum(record.get('time/step', 0.0) for record in records))
  start_times = [datetime.datetime.fromisoformat(start['time']).timestamp() for start in starts]
  record_times = [record['timestamp'] for record in records if 'timestamp' in record]
  seconds = 0.0
  for start, end in itertools.pairwise([*start_times, math.inf]):
    seconds += max((time - start for time in record_times if start <= time < end), default=0.0)
  return (
    f'{format_seconds(seconds)}, {in_steps} of it in steps' if seconds else f'{in_steps} in steps'
  )


def _next_actions(
  run: Recorded, starts: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
  """Return [advice, command] pairs; the command is '' if the advice needs none."""
  words = shlex.split(starts[-1]['command']) if starts else []
  command = console.to_copy(words, os.path.abspath(run.workdir)) if words else ''
  steps_left = run.last_step - round(run.metrics[-1]['step'])
  if steps_left > 0:
    verb = 'is' if steps_left == 1 else 'are'
    text = f'{counted(steps_left, "step")} {verb} left. If the run has stopped, resume it with:'
    return [[text, command]]

  def sources_with(name: str, sign: int) -> str:
    changes = [(score['evaluation'], score[name]) for score in scores]
    return ' and '.join(source for source, change in changes if change and change['sign'] == sign)

  advice = []
  if names := sources_with('change', -1):
    advice.append([f'The score fell on {names}. docs/not_learning.md lists what to check.', ''])
  if names := sources_with('change', 0):
    text = (
      f'On {names}, the change may be due to chance. Narrow the interval with more questions in '
      'config.data.evaluation or a larger config.evaluation.samples.'
    )
    advice.append([text, ''])
  if names := sources_with('latest', 1):
    text = f'Between the last two evaluations, the score was still rising on {names}.'
    epochs = run.config.get('num_epochs', 0)
    length = f'num_epochs={2 * epochs:g}' if epochs else f'num_steps={2 * run.last_step}'
    # Drop the old value.
    base_command = re.sub(r' --config\.num_(steps|epochs)[= ]\S+', '', command)
    # Other schedules depend on the run's length, so such a run cannot be resumed with more steps.
    # A run that stopped early would stop again.
    is_constant = run.config.get('optimizer.schedule', 'constant') == 'constant'
    if is_constant and run.last_step == run.config['num_steps']:
      advice.append([f'{text} To train longer:', command and f'{base_command} --config.{length}'])
    else:
      advice.append([text, ''])
  if names := sources_with('latest', -1):
    text = (
      f'Between the last two evaluations, the score fell on {names}. config.export.best=True keeps '
      'the best policy.'
    )
    advice.append([text, ''])
  is_saved = run.metrics[-1]['step'] > 0
  commands = messages.next_commands(run.workdir, ['exgrpo'], is_saved and bool(scores), is_saved)
  text = 'The run is finished.' + ' Next, you can run:' * bool(commands)
  return [*advice, [text, '\n'.join(commands)]]


def _start(start: Mapping[str, Any]) -> dict[str, Any]:
  commit = start.get('commit')
  changed = ' and uncommitted changes' if commit and commit['has_uncommitted_changes'] else ''
  return {
    'time': start['time'].replace('T', ' '),
    'first_step': start['first_step'],
    'command': start['command'],
    'commit': f'{commit["hash"][:10]}{changed}' if commit else '',
    'versions': ', '.join(f'{name} {version}' for name, version in start['packages'].items()),
    'python': start['python'],
    'system': start['first_host']['system'],
  }


def _scores(records: Run, benchmarks: Sequence[Benchmark]) -> list[dict[str, Any]]:
  """Return the first, last and best score on each evaluation source, with 95% intervals.

  'change' is the paired difference between the first and last evaluations; 'latest' is the paired
  difference between the last two.
  """
  scores = []
  for source, name in runs.score_names([records]).items():
    points = [record for record in records if name in record]
    ends = {'first': points[0], 'last': points[-1], 'best': comparison.at_best(name, points)}
    score: dict[str, Any] = {'evaluation': source, 'measure': name.rpartition('/')[2]}
    for end, record in ends.items():
      keys = {'step': 'step', 'value': name, 'low': f'{name}_low', 'high': f'{name}_high'}
      values = charts.numbers([record.get(key, math.nan) for key in keys.values()])
      score[end] = dict(zip(keys, values))
    scores.append(score | _changes(evaluations.by_step(benchmarks, source)))
  return scores


def _changes(by_step: Mapping[int, Shares]) -> dict[str, dict[str, Any] | None]:
  """Return 'change' and 'latest' for `_scores`; each is None if there is nothing to compare."""
  steps = sorted(by_step)

  def between(first: int, last: int) -> dict[str, Any] | None:
    _, questions, estimate = comparison.compare(by_step[first], by_step[last], of_questions=True)
    if questions < 2:
      return None
    sign = (estimate.low > 0) - (estimate.high < 0)  # 0 if the 95% interval includes 0
    values = charts.numbers(estimate)
    return {'from': first, 'estimate': values, 'questions': questions, 'sign': sign}

  if len(steps) < 2:
    return {'change': None, 'latest': None}
  return {'change': between(steps[0], steps[-1]), 'latest': between(*steps[-2:])}
