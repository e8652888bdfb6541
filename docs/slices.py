"""Writes docs/slices.md: the backbones on TPU slices, by the estimates of `exgrpo capacity`.

python docs/slices.py                    # all rows: an hour and a half on two cores
python docs/slices.py v5e:8x8 v6e:4x8    # those of some slices; the others stay

Needs libtpu. Rows are kept in docs/slices.csv, each as soon as it is known.
"""

import concurrent.futures
import csv
import dataclasses
import multiprocessing
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata

import jax

from exgrpo_jax.capacity import chips, examination
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config

FILE = pathlib.Path(__file__).with_name('slices.csv')
PAGE = FILE.with_suffix('.md')

# Configs of one row have the same shape of model and the same meshes.
BACKBONES = {
  'qwen2_5_math_1_5b': ('qwen2_5_math_1_5b',),
  'qwen2_5_math_7b': ('qwen2_5_math_7b', 'qwen2_5_7b_instruct'),
  'llama3_1_8b': ('llama3_1_8b', 'llama3_1_8b_instruct'),
}
SLICES = ('v5e:4x4', 'v5e:8x8', 'v6e:4x8', 'v5p:4x4x4')
# Where the config's own slots do not fit, or leave room for more.
SLOTS = {
  ('qwen2_5_math_1_5b', 'v5e:8x8'): 1024,
  ('qwen2_5_math_1_5b', 'v6e:4x8'): 1024,
  ('qwen2_5_math_1_5b', 'v5p:4x4x4'): 1024,
  ('qwen2_5_math_7b', 'v5e:4x4'): 128,
  ('llama3_1_8b', 'v5e:4x4'): 64,
  ('llama3_1_8b', 'v5p:4x4x4'): 1024,
}

_HEAD = """\
# Slices

<!-- Written by docs/slices.py from docs/slices.csv; change it there, then renew this page. -->

For whoever rents a slice: what the paper's five backbones need of it, and how long a step
takes there. **These are estimates; nothing here was measured on a TPU.** The programs of a step
were compiled for each slice
by `exgrpo capacity --config=… --topology=…`, which prints each part of a step and
what is assumed, with {versions}.

Lengths of responses are the default of `--lengths`: lognormal, median 1,024 tokens, 1% cut at the
limit of 8,192, mean about 1,400. A step has 128 questions x 8, replay in full, and its share of an
evaluation of 2,259 responses every ten steps. Memory is that of the program that needs most, with
all that is resident beside it; chip-hours are of 100 steps.

| config | slice | slots | GiB per chip | program | seconds a step | tokens/s | chip-hours |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_TAIL = """
Slots are those of the config where these fit and no more would, else those that do
(`--config.rollout.slots`). `python docs/slices.py` renews the table.
"""

Row = dict[str, str]
COLUMNS: tuple[str, ...] = (
  'config',
  'slice',
  'slots',
  'memory',
  'program',
  'seconds',
  'tokens',
  'hours',
  'versions',
)


def examined(name: str, topology: str) -> Row:
  """A row of the table; compiles all programs of a step."""
  config = parse_config(config_files.load_config(name))
  slots = SLOTS.get((name, topology), config.rollout.slots)
  config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, slots=slots))
  found = examination.examine(config, topology, '', examination.EVALUATED)
  fullest = max(found.peaks, key=lambda program: found.peaks[program], default='')
  row = {
    'config': name,
    'slice': topology,
    'slots': f'{slots:,}',
    'memory': 'does not fit',
    'program': fullest,
    'versions': f'libtpu {metadata.version("libtpu")}, JAX {jax.__version__}',
  }
  if found.fits and found.speed:
    limit = chips.chip_of(topology).memory
    row |= {
      'memory': f'{found.peaks[fullest] / chips.GIB:.1f} of {limit / chips.GIB:.1f}',
      'seconds': f'{found.speed.seconds:.0f}',
      'tokens': f'{found.speed.tokens_per_second:,.0f}',
      'hours': f'{found.speed.chip_hours:,.0f}',
    }
  return row


def page(rows: Sequence[Row]) -> str:
  """The page of these rows, by slice and size of the model."""
  order = {name: index for index, name in enumerate((*SLICES, *BACKBONES))}
  versions = sorted({row['versions'] for row in rows})
  lines = []
  for row in sorted(rows, key=lambda row: (order[row['slice']], order[row['config']])):
    names = ', '.join(BACKBONES[row['config']])
    values = [names, *(row.get(column) or '—' for column in COLUMNS[1:-1])]
    lines.append(f'| {" | ".join(values)} |')
  known = {(row['config'], row['slice']) for row in rows}
  absent = [
    f'{name} on {topology}'
    for topology in SLICES
    for name in BACKBONES
    if (name, topology) not in known
  ]
  missing = textwrap.fill(f'Not yet compiled: {", ".join(absent)}.', 100) if absent else ''
  head = _HEAD.format(versions='; '.join(versions))
  return head + '\n'.join(lines) + '\n' + (f'\n{missing}\n' if missing else '') + _TAIL


def read() -> list[Row]:
  """The rows that are kept."""
  with FILE.open(encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def write(rows: Sequence[Row]) -> None:
  """Keeps the rows, and writes the page."""
  with FILE.open('w', encoding='utf-8', newline='') as file:
    writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
  PAGE.write_text(page(rows), encoding='utf-8')


def main(topologies: Sequence[str]) -> None:
  """Renews the rows of some slices, or of all."""
  rows = {(row['config'], row['slice']): row for row in (read() if FILE.exists() else [])}
  # A process for each row: libtpu compiles for one generation in a process.
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context('spawn'), max_tasks_per_child=1
  ) as pool:
    for topology in topologies or SLICES:
      for name in BACKBONES:
        rows[name, topology] = pool.submit(examined, name, topology).result()
        write(list(rows.values()))


if __name__ == '__main__':
  main(sys.argv[1:])
