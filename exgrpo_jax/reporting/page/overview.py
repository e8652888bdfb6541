"""What ran, on what, and how it went: the page's first view of a run."""

import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.reporting import curves, direction
from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Recorded
from exgrpo_jax.reporting.page import charts, warnings_log
from exgrpo_jax.reporting.records import Run
from exgrpo_jax.runtime import environment

Difference = tuple[str, Any, Any]  # a setting's name, its value in the base config, that of the run


def describe(run: Recorded, differences: Sequence[Difference]) -> dict[str, Any]:
  """Facts, settings, scores, curves and warnings of a run.

  Args:
    run: as far as it is recorded.
    differences: what its config has otherwise than the base config.
  """
  starts = environment.read(run.workdir)
  return {
    'facts': _facts(run, starts),
    'settings': [[name, _shown(base), _shown(own)] for name, base, own in differences],
    'starts': [_start(start) for start in starts],
    'scores': _scores(run.metrics),
    'panels': [charts.describe(panel) for panel in curves.all_panels(run.metrics)],
    'warnings': warnings_log.read(pathlib.Path(run.workdir)),
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
