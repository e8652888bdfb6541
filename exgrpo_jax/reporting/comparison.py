"""Runs side by side: mean and spread over the seeds of each setting."""

import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from exgrpo_jax.reporting import plots

Run = Sequence[Mapping[str, float]]  # records of metrics.jsonl, oldest first

_MEASURES = re.compile(r'eval/.+/(pass@\d+|avg@\d+|valid_steps)')  # of which more is better
_TRAINING = ('reward', 'entropy', 'length/mean')


def table(runs: Mapping[str, Sequence[Run]], wanted: Mapping[str, int]) -> str:
  """Final and best of every evaluation, mean ± standard deviation over seeds, in Markdown.

  Final is a run's last value, best its highest finite one, that before step 1 included. The
  deviation is that of a sample (n - 1), and absent for one seed.

  Args:
    runs: by setting, its finished runs.
    wanted: by setting, in the order of the rows, how many runs there should be.
  """
  rows = [('evaluation', 'setting', 'seeds', 'final', 'best')]
  for name in _measures(runs):
    for setting, number in wanted.items():
      series = [[record[name] for record in run if name in record] for run in runs.get(setting, ())]
      series = [values for values in series if values]
      found = len(series)
      rows.append(
        (
          name.removeprefix('eval/'),
          setting,
          str(found) if found == number else f'{found} of {number}',
          _spread([values[-1] for values in series]),
          _spread([max(filter(math.isfinite, values), default=math.nan) for values in series]),
        )
      )
  widths = [max(map(len, column)) for column in zip(*rows)]
  rows.insert(1, tuple('-' * width for width in widths))
  return '\n'.join('| ' + ' | '.join(map(str.ljust, row, widths)) + ' |' for row in rows)


def picture(runs: Mapping[str, Sequence[Run]], path: str | os.PathLike) -> None:
  """The curves of every evaluation and of training by setting, as a PNG at `path`."""
  plots.comparison(runs, (*_measures(runs), *_TRAINING), path)


def _measures(runs) -> list[str]:
  return sorted(
    {
      name
      for seeds in runs.values()
      for run in seeds
      for record in run
      for name in record
      if _MEASURES.fullmatch(name)
    }
  )


def _spread(values: Sequence[float]) -> str:
  if not values:
    return '-'
  deviation = f' ± {np.std(values, ddof=1):.4f}' if len(values) > 1 else ''
  return f'{np.mean(values):.4f}{deviation}'
