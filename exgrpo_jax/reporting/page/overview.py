"""How a run goes, why it goes no further, and what ran: the page's first view of it."""

import datetime
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.reporting import curves, direction, plateau
from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Recorded
from exgrpo_jax.reporting.page import charts, warnings_log
from exgrpo_jax.reporting.records import Run
from exgrpo_jax.runtime import environment

_SIGNAL = (  # metric -> what it is of the groups or tokens of a step
  ('zero_variance', 'groups that taught nothing'),
  ('groups/solved_by_all', 'groups solved by all responses'),
  ('groups/solved_by_none', 'groups solved by none'),
  ('clip_share', 'fresh tokens clipped'),
)

Difference = tuple[str, Any, Any]  # a setting's name, its value in the base config, that of the run


def describe(run: Recorded, differences: Sequence[Difference]) -> dict[str, Any]:
  """Scores, learning signal, facts, curves, warnings and settings of a run.

  Args:
    run: as far as it is recorded.
    differences: what its config has otherwise than the base config.
  """
  starts = environment.read(run.workdir)
  replays = bool(run.config['replay.ratio'])
  found = plateau.latest(run.metrics, run.config['num_steps'])
  panels = {
    'score': curves.score_panels(run.metrics),
    'signal': curves.signal_panels(run.metrics),
    'training': curves.training_panels(run.metrics),
    'replay': curves.replay_panels(run.metrics) if replays else [],
  }
  return {
    'facts': _facts(run, starts),
    'settings': [[name, _shown(base), _shown(own)] for name, base, own in differences],
    'starts': [_start(start) for start in starts],
    'scores': _scores(run.metrics),
    'plateau': found and {'step': found.step, 'text': found.text},
    'signal': _signal(run.metrics, plateau.num_judged(run.config['num_steps']) // 2),
    'panels': {name: [charts.describe(panel) for panel in own] for name, own in panels.items()},
    'replays': replays,
    'warnings': warnings_log.read(pathlib.Path(run.workdir)),
  }


def _signal(records: Run, num_recent: int) -> dict[str, Any] | None:
  """What the last steps had to learn from, as means; None before the first step."""
  taken = [record for record in records if record['step'] > 0]
  recent = taken[-num_recent:]
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
    'skipped': round(sum(record.get('skipped_updates', 0.0) for record in taken)),
    'learning_rate': charts.numbers([recent[-1].get('learning_rate', float('nan'))])[0],
  }


def _facts(run: Recorded, starts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Pairs of what and how much, for a reader who has never seen the run."""
  config, records = run.config, run.metrics
  ratio = config['replay.ratio']
  seconds = sum(record.get('time/step', 0.0) for record in records)
  tokens = sum(record.get('length/total', 0.0) for record in records)
  facts = [
    ['method', f'ExGRPO, replay.ratio {ratio:g}' if ratio else 'GRPO (replay.ratio 0)'],
    ['steps', f'{records[-1]["step"]:.0f} of {config["num_steps"]}'],
    ['a step', f'{config["rollout.questions"]} questions × {config["rollout.samples"]} responses'],
    ['model', _model(config)],
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


def _model(config: Mapping[str, Any]) -> str:
  return (config['model.path'] or config.get('model.repository', '')) or (
    f'{config["model.num_layers"]} layers of width {config["model.width"]}, from scratch'
  )


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
    best = direction.best(name, (record[name] for record in points))
    ends = {
      'first': points[0],
      'last': points[-1],
      'best': next((record for record in points if record[name] == best), points[-1]),
    }
    found.append(
      {
        'evaluation': source,
        'measure': name.rpartition('/')[2],
        **{end: _point(record, name) for end, record in ends.items()},
      }
    )
  return found


def _point(record: Mapping[str, float], name: str) -> dict[str, float | None]:
  values = (record['step'], record[name], record.get(f'{name}_low'), record.get(f'{name}_high'))
  shown = charts.numbers([float('nan') if value is None else value for value in values])
  return dict(zip(('step', 'value', 'low', 'high'), shown))


def _shown(value: Any) -> str:
  """A setting as one writes it on the command line."""
  return 'not set' if value is None else str(value)
