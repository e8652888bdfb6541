"""The HTML page of a long run: its size, and the time and memory to write it.

The benchmark trains a short run, and repeats its steps and questions up to the paper's numbers.
"""

import json
import pathlib
import shutil
import tempfile
import time

import numpy as np
import pyarrow as pa
from pyarrow import compute

from benchmarks import smoke
from benchmarks.frame import Bench, Figure, in_own_process, peak_bytes
from exgrpo_jax.reporting import metrics, report, step_records

_STEPS, _ROWS = 700, 1024  # the paper's numbers of steps, and of responses per step
_FILE_STEPS = step_records.STEPS_PER_FILE
# Limits for a page, which should be small enough to email.
_MAX_PAGE, _MAX_MEMORY = 15, 1000  # MB
_SHORT = 4  # steps


def measure(bench: Bench) -> list[Figure]:
  """Train a short run, lengthen it, and write its page."""
  steps = max(2 * _SHORT, round(bench.size.scale * _STEPS))
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as name:
    folder = pathlib.Path(name)
    smoke.train(str(folder / 'run'), (*smoke.TINY, f'num_steps={_SHORT}'))
    lengthen(folder / 'run', steps)
    seconds, memory = in_own_process(_write_page, folder)
    size = (folder / 'report.html').stat().st_size
  return [
    Figure('page', 1e-6 * size, 'MB', f'{steps} steps of {_ROWS} responses', limit=_MAX_PAGE),
    Figure('writing', seconds, 's'),
    Figure('memory', 1e-6 * memory, 'MB', 'peak while writing the page', limit=_MAX_MEMORY),
  ]


def lengthen(run: pathlib.Path, steps: int) -> None:
  """Repeat a run's steps until there are `steps`, each with the paper's number of rows."""
  for name in ('questions', 'responses', 'tokens'):
    whole = pa.concat_tables(step_records.tables(run, name))
    step_N = whole['step'].to_numpy()
    of_steps = [whole.filter(pa.array(step_N == step)) for step in range(1, _SHORT + 1)]
    for path in step_records.files(run, name):
      path.unlink()
    for first in range(1, steps + 1, _FILE_STEPS):
      several = range(first, min(first + _FILE_STEPS, steps + 1))
      tables = [_moved(of_steps[(step - 1) % _SHORT], step, name != 'tokens') for step in several]
      step_records.write_file(step_records.path_of(run, name, first), pa.concat_tables(tables))
  *_, last = rows = metrics.read(run)[-_SHORT:]
  repeated = [
    rows[step % _SHORT] | {'step': step, 'timestamp': last['timestamp'] + 150.0 * step}
    for step in range(1, steps + 1)
  ]
  metrics.write_rows(run / metrics.FILE, repeated)
  for path in list((run / 'evaluation').glob(f'step_{_SHORT:06d}_*')):
    for step in range(_FILE_STEPS, steps + 1, _FILE_STEPS):
      shutil.copy(path, path.with_name(path.name.replace(f'{_SHORT:06d}', f'{step:06d}', 1)))
  config = json.loads((run / 'config.json').read_text())
  (run / 'config.json').write_text(json.dumps(config | {'num_steps': steps}))


def _moved(table: pa.Table, step: int, repeat: bool) -> pa.Table:
  """Renumber a table as step `step`. With `repeat`, repeat its rows under new question numbers."""
  groups = 1 + table['group'].to_numpy().max()
  copies = max(1, _ROWS // (groups * 8)) if repeat else 1
  long = pa.concat_tables([table] * copies)
  copy = np.repeat(np.arange(copies), len(table))
  shift = step - table['step'][0].as_py()
  changes = {
    'step': shift,
    'policy_step': shift,
    'retired_step': shift,
    'group': copy * groups,
    'question': copy * 1000,
  }
  for place, field in enumerate(table.schema):
    if field.name in changes:
      added = pa.array(np.broadcast_to(changes[field.name], len(long)))
      column = compute.call_function('add', [long[field.name], added])
      long = long.set_column(place, field, column.cast(field.type))
  return long


def _write_page(folder: pathlib.Path) -> tuple[float, int]:
  """Write the page; return the seconds and the peak memory in bytes."""
  start = time.perf_counter()
  report.write_report([str(folder / 'run')], folder / 'report.html')
  return time.perf_counter() - start, peak_bytes()
