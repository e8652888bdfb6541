"""The page of `benchmark all`: what ran, on what, and how it came out, in Markdown."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.performance import gpus
from exgrpo_jax.performance.benchmark_parts import Part
from exgrpo_jax.performance.measurement import Measurement, rounded
from exgrpo_jax.performance.shapes import SHAPES


class Outcome(NamedTuple):
  """What came of one part."""

  part: Part
  measurements: Sequence[Measurement]
  seconds: float  # that it took
  note: str = ''  # how it was run otherwise than planned
  error: str = ''  # in one line

  @property
  def verdict(self) -> str:
    """One word."""
    if self.error:
      return 'FAILED'
    if not self.measurements:
      return 'skipped'
    return 'passed'


class _Goal(NamedTuple):
  """A share of the peak that is aimed at, on a GPU with the shape of Qwen2.5-1.5B."""

  meaning: str
  benchmark: str
  measurement: str
  share: float  # per cent


_GOALS = (
  _Goal(
    "decoding at half of the memory's bandwidth",
    'rollout',
    'share of bandwidth',
    100 * gpus.SHARE_OF_BANDWIDTH,
  ),
  _Goal(
    'an update at 40% of the peak FLOPs', 'update', 'share of FLOPs', 100 * gpus.SHARE_OF_FLOPS
  ),
)
_GOAL_SHAPE = 'qwen2_5_1_5b'


def text(
  facts: Mapping[str, Any],
  outcomes: Sequence[Outcome],
  waiting: Sequence[str],
  minutes: float,
  seconds: float,
) -> str:
  """The page.

  Args:
    facts: of the device, those of `device_facts.describe`; empty where it could not be asked.
    outcomes: of the parts so far.
    waiting: names of the parts that have not run yet.
    minutes: the time that all parts together may take.
    seconds: that they have taken so far.
  """
  lines = [
    f'# Benchmark: {facts.get("count", "?")} x {facts.get("kind", "unknown device")}',
    '',
    f'{summary(outcomes)} in {seconds / 60:.1f} of at most {minutes:g} minutes. Weights and data '
    'are random; machines are noisy, so compare figures within one page only.',
    '',
    *(f'**Not run yet**: {", ".join(waiting)}.\n' for _ in waiting[:1]),
    *_machine(facts),
    *_parts(outcomes),
    *_checks(outcomes),
    *_goals(facts, outcomes),
    *_figures(outcomes),
  ]
  return '\n'.join(lines).rstrip() + '\n'


def summary(outcomes: Sequence[Outcome]) -> str:
  """How many parts passed, failed and were skipped."""
  verdicts = [outcome.verdict for outcome in outcomes]
  counts = {name: verdicts.count(name) for name in ('passed', 'FAILED', 'skipped')}
  return f'{len(outcomes)} parts: ' + ', '.join(
    f'{count} {name}' for name, count in counts.items() if count
  )


def _machine(facts: Mapping[str, Any]) -> list[str]:
  if not facts:
    return ['The device could not be asked what it is.', '']
  memory = facts['memory']
  rows = {
    'device': f'{facts["count"]} x {facts["kind"]} ({facts["platform"]})',
    'device memory': f'{memory / 2**30:.1f} GiB for programs, all together' if memory else '',
    'driver': facts['driver'],
    'commit': facts['commit'] or 'none: an installed package',
    'versions': ', '.join(f'{name} {version}' for name, version in facts['versions'].items()),
    'host': f'{facts["host"]["name"]}, {facts["host"]["system"]}',
    'time': facts['time'],
  }
  return ['## Machine', '', *_table(('', ''), [row for row in rows.items() if row[1]])]


def _parts(outcomes: Sequence[Outcome]) -> list[str]:
  rows = [
    (outcome.part.name, outcome.verdict, f'{outcome.seconds:.0f}', _remark(outcome))
    for outcome in outcomes
  ]
  return ['## Parts', '', *_table(('part', 'verdict', 'seconds', 'remarks'), rows)]


def _remark(outcome: Outcome) -> str:
  """Why a part failed, or how it was run otherwise than planned."""
  layers = outcome.part.flags.get('layers')
  whole = SHAPES[outcome.part.flags['shape']].num_layers if layers else layers
  fewer = f'{layers} of {whole} layers, for the memory of the device' if layers != whole else ''
  return '; '.join(filter(None, (outcome.error, outcome.note, fewer)))


def _checks(outcomes: Sequence[Outcome]) -> list[str]:
  rows = [
    (
      outcome.part.name,
      measured.name,
      rounded(measured.value),
      f'{measured.limit:g}',
      measured.unit,
      'pass' if measured.passes else 'FAIL',
      measured.meaning,
    )
    for outcome in outcomes
    for measured in outcome.measurements
    if measured.limit is not None
  ]
  columns = ('part', 'check', 'value', 'limit', 'unit', 'verdict', 'meaning')
  return ['## Checks', '', *_table(columns, rows)]


def _goals(facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
  rows = []
  for goal in _GOALS:
    for outcome in outcomes:
      if outcome.part.benchmark == goal.benchmark:
        shares = [m for m in outcome.measurements if m.name == goal.measurement]
        measured = f'{rounded(shares[0].value)}%' if shares else 'not measured'
        reason = _inapplicable(facts, outcome)
        if shares and not reason:
          verdict = 'reached' if shares[0].value >= goal.share else 'missed'
        else:
          verdict = f'not applicable: {reason}' if reason else outcome.verdict
        rows.append((goal.meaning, f'{goal.share:g}%', measured, verdict))
  lines = _table(('goal', 'at least', 'measured', 'verdict'), rows)
  if not facts.get('is_known'):
    lines += [
      'No published peak of this device is known here. Shares are of what a plain product and a '
      'plain copy reach, which data that lie in a cache can exceed.',
      '',
    ]
  return ['## Goals', '', *lines]


def _inapplicable(facts: Mapping[str, Any], outcome: Outcome) -> str:
  """Why a goal does not hold for a part as it was run; '' where it does."""
  flags = outcome.part.flags
  if facts.get('platform') not in ('gpu', 'cuda'):
    return f'the goals are for a GPU, and this is a {facts.get("platform", "device unknown")}'
  if flags['shape'] != _GOAL_SHAPE or flags['layers'] != SHAPES[_GOAL_SHAPE].num_layers:
    return f'the goals are for all of {_GOAL_SHAPE}'
  if not facts.get('is_known'):
    return f'no peak of {facts["kind"]} is known, so the share is of a measured rate'
  return ''


def _figures(outcomes: Sequence[Outcome]) -> list[str]:
  lines = ['## Figures', '']
  for outcome in outcomes:
    rows = [
      (measured.name, rounded(measured.value), measured.unit, measured.meaning)
      for measured in outcome.measurements
      if measured.limit is None
    ]
    command = shlex.join(['python', *outcome.part.command[1:]])
    lines += [f'### {outcome.part.name}', '', f'`{command}`', '']
    if rows:
      lines += _table(('figure', 'value', 'unit', 'meaning'), rows)
    else:
      lines += ['None but its checks.' if outcome.measurements else 'None.', '']
  return lines


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  def line(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in cells)} |'

  return [line(columns), line(['---'] * len(columns)), *map(line, rows), '']
