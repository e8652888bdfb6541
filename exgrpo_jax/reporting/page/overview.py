"""How a run goes, what it has to learn from, and what ran: the page's first view of it."""

import datetime
import importlib
import json
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import counted
from exgrpo_jax.reporting import alarms, runs, series
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.page import charts, curves
from exgrpo_jax.reporting.runs import Recorded
from exgrpo_jax.runtime import environment

_SIGNAL = (  # metric -> which share of a step's groups or tokens it is
  ('zero_variance', 'groups that taught nothing'),
  ('groups/solved_by_all', 'groups solved by all responses'),
  ('groups/solved_by_none', 'groups solved by none'),
  ('clip_share', 'fresh tokens clipped'),
)
_BASE = 'exgrpo_jax.configs.base'
_LOG, _WARNING = 'console.log', 'WARNING: '
_NAMED = re.compile(r'step (\d+):')
_PROGRESS = re.compile(r'step +(\d+)/\d+ \|')  # the line that follows a step's warnings


def describe(run: Recorded) -> dict[str, Any]:
  """Scores, learning signal, facts, curves, warnings and settings of a run, as far as recorded."""
  starts = environment.read(run.workdir)
  replays = bool(run.config['replay.ratio'])
  return {
    'facts': _facts(run, starts),
    'settings': _settings(run),
    'starts': [_start(start) for start in starts],
    'scores': _scores(run.metrics),
    'signal': _signal(run),
    'panels': curves.overview(run.metrics, replays),
    'replays': replays,
    'warnings': warnings_of(pathlib.Path(run.workdir)),
  }


def warnings_of(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """What the run printed as warnings, by step, as {'step', 'text'}; each warning once.

  The step is the one that the warning names or, where it names none, the one that was going on.
  """
  path = workdir / _LOG
  if not path.exists():
    return []
  found: set[tuple[int, str]] = set()
  waiting: list[str] = []
  step = 0  # the last one that was finished

  def place() -> None:
    for text in waiting:
      named = _NAMED.match(text)
      found.add((int(named[1]) if named else step, text))
    waiting.clear()

  with path.open(encoding='utf-8', errors='replace') as file:
    for line in file:
      if line.startswith(_WARNING):
        waiting.append(line.removeprefix(_WARNING).strip())
      elif match := _PROGRESS.match(line):
        step = int(match[1])
        place()
  place()
  return [{'step': step, 'text': text} for step, text in sorted(found)]


def _settings(run: Recorded) -> list[list[str]]:
  """[name, value in the base config, value of the run] of each setting that differs."""

  def shown(value: Any) -> str:
    return 'not set' if value is None else str(value)

  values = importlib.import_module(_BASE).get_config().to_dict()
  base = runs.flat(json.loads(json.dumps(values)))  # as a run's config.json holds them
  differing = [name for name, value in run.config.items() if base.get(name) != value]
  return [[name, shown(base.get(name)), shown(run.config[name])] for name in differing]


def _signal(run: Recorded) -> dict[str, Any] | None:
  """Means of what the last tenth of the steps, at least ten, had to learn from."""
  taken = [record for record in run.metrics if record['step'] > 0]
  recent = taken[-max(10, run.config['num_steps'] // 10) :]
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
    'skipped': round(sum(record.get('skipped_updates', 0.0) for record in taken)),
    'learning_rate': charts.numbers([recent[-1].get('learning_rate', float('nan'))])[0],
  }


def _facts(run: Recorded, starts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Pairs of what and how much, for a reader who has never seen the run."""
  config, records = run.config, run.metrics
  ratio = config['replay.ratio']
  seconds = sum(record.get('time/step', 0.0) for record in records)
  tokens = sum(record.get('length/total', 0.0) for record in records)
  model = (config['model.path'] or config.get('model.repository', '')) or (
    f'{counted(config["model.num_layers"], "layer")} of width {config["model.width"]}, from scratch'
  )
  facts = [
    ['method', f'ExGRPO, replay.ratio {ratio:g}' if ratio else 'GRPO (replay.ratio 0)'],
    ['steps', f'{records[-1]["step"]:.0f} of {config["num_steps"]}'],
    [
      'a step',
      f'{counted(config["rollout.questions"], "question")} × '
      f'{counted(config["rollout.samples"], "response")}',
    ],
    ['model', model],
    ['training data', str(config['data.train'])],
    ['time in steps', str(datetime.timedelta(seconds=round(seconds)))],
    ['tokens generated', f'{tokens:,.0f}'],
    ['seed', str(config['seed'])],
  ]
  if starts:
    device = starts[-1]['device']
    hosts = f', {starts[-1]["hosts"]} hosts' if starts[-1]['hosts'] > 1 else ''
    facts.append(['devices', f'{device["count"]} × {device["kind"]}{hosts}'])
    facts.append(['started', starts[0]['time'].replace('T', ' ')])
  return facts


def _start(start: Mapping[str, Any]) -> dict[str, Any]:
  """One start of the run, in words."""
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


def _scores(records: Run) -> list[dict[str, Any]]:
  """First, last and best score of each evaluation, with their 95% intervals."""
  found = []
  for source, name in runs.score_names([records]).items():
    points = [record for record in records if name in record]
    best = series.best(name, (record[name] for record in points))
    at_best = next((record for record in points if record[name] == best), points[-1])
    ends = {'first': points[0], 'last': points[-1], 'best': at_best}
    found.append(
      {'evaluation': source, 'measure': name.rpartition('/')[2]}
      | {end: _point(record, name) for end, record in ends.items()}
    )
  return found


def _point(record: Mapping[str, float], name: str) -> dict[str, float | None]:
  keys = {'step': 'step', 'value': name, 'low': f'{name}_low', 'high': f'{name}_high'}
  shown = charts.numbers([record.get(key, float('nan')) for key in keys.values()])
  return dict(zip(keys, shown))
