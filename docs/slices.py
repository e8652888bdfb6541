"""Writes docs/slices.md: the backbones on TPU slices, by the estimates of `exgrpo capacity`.

python docs/slices.py                    # all rows: an hour and a half on two cores
python docs/slices.py v5e:8x8 v6e:4x8    # those of some slices; the others stay
python docs/slices.py parts              # a step's parts, on three slices: a quarter of an hour

Needs libtpu. Rows are kept in docs/slices.csv and docs/slices_parts.csv, each as soon as it is
known.
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

from exgrpo_jax.capacity import devices, examination, step
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config

FILE = pathlib.Path(__file__).with_name('slices.csv')
PARTS_FILE = FILE.with_name('slices_parts.csv')
PAGE = FILE.with_suffix('.md')

# Configs of one row have the same shape of model and the same meshes.
BACKBONES = {
  'qwen2_5_math_1_5b': ('qwen2_5_math_1_5b',),
  'qwen2_5_math_7b': ('qwen2_5_math_7b', 'qwen2_5_7b_instruct'),
  'llama3_1_8b': ('llama3_1_8b', 'llama3_1_8b_instruct'),
}
SLICES = ('v5e:4x4', 'v5e:8x8', 'v6e:4x8', 'v5p:4x4x4')
# Where the parts of a step are shown, with partial rollouts; of the paper's main backbone.
PARTED, PARTED_SLICES = 'qwen2_5_math_7b', ('v5e:8x8', 'v6e:8x8', 'v5p:4x4x4')
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
_PARTS_HEAD = """
## Where a step's time goes

One step of qwen2_5_math_7b with `rollout.partial`, 1,024 slots, everything else as above: seconds
of each part.
`python docs/slices.py parts` renews the table.

"""
_PARTS_TAIL = """
Why the 39 s on v5e:8x8 are not fewer:

- **update**: matrix products. Of a pass of 64 x 9,216 tokens, 4.7 s, the compiler's own operations
  are 3.5, attention at the assumed half of peak 1.0, and what is not hidden of gathering weights
  and summing gradients .3. Recomputing the forward pass is another third of the FLOPs counted; the
  products that `microbatch.remat=all_but_products` keeps are 22 GB. Packing computes 1.11 tokens
  for each.
- **decode**: memory. A step of 8.7 ms reads weights in 4.7 and what is written of the cache in 2.
- **evaluation**: waiting for the longest of 2,259 responses, 74 s every ten steps.
- **resume**: matrix products; a sixth is sums over the tensor axis of four chips. In padded rows
  it took 6.7 s, with 1.63 tokens computed for each; packed it takes 3.8, with 1.02. The packing
  itself takes .1 s of a CPU.
- **host**: assumed.

A v6e chip has 4.7 times the FLOPs of a v5e, but twice its memory's bandwidth and its links', and
heads of 128 fill half of its matrix unit; so the update is at 23% of peak by the FLOPs that it
needs, and a decode step, 4.3
ms, is still bound by memory. On v5p one takes 4.2 ms, of which reading the weights is 1.4: what
remains is not bound by memory.

Three things that would not shorten it by much:

- **A third length of the sequences in training**, an eighth, makes the tokens computed in a step
  4.2% fewer at a median of 1,024, 2% at 768 and 1,500 and no fewer at 512, 1,280, 2,048 and 3,000;
  on 8 shards, or one, at most 1.1%. With its weights gathered for fewer tokens a pass takes .64 ms
  a token of each chip, in place of .50, and so an update is 3.0%, 1.5% and 0% shorter: half a
  second at best, for two more programs. A half in place of the eighth does nothing below 2,048,
  and 3 to 4% above. Where rows share their prompts (GPUs), at most 1.2% on 8 shards; on 64 it is
  13 to 19% for a half at 1,024 and 1,500, and none at other medians.
- **Attention that skips blocks of other rows.** JAX's splash kernel masks them: it skips what the
  static mask excludes. Its map of blocks could come from the segments, for it is an array. Half of
  the blocks would be skipped on average. But chips wait for each other in every layer, and with
  one sequence on each of 64 chips one of them holds a response of 8,192 tokens, which needs .9 of
  its blocks: a tenth of the 2.1 s that attention takes in an update. On 16 shards, where the
  slowest chip needs half of its blocks, it would be worth it: for the 1.5B backbone, about a sixth
  of an update, by formula.
- **Better lengths to pad resumed rows to**: with eight of them 1.38 tokens are computed for each.

Compiled by itself, the pass of short sequences takes 1.15 s, not the 1.00 that its tokens suggest,
for what waits for other chips does not shrink with them; an update is half a second longer than
the table has it.
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
PART_COLUMNS = ('slice', 'part', 'seconds')


def examined(name: str, topology: str) -> Row:
  """A row of the table; compiles all programs of a step."""
  config = parse_config(config_files.load_config(name))
  slots = SLOTS.get((name, topology), config.rollout.slots)
  config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, slots=slots))
  found = examination.examine(config, topology, '', step.EVALUATED)
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
    limit = devices.chip_of(topology).memory
    row |= {
      'memory': f'{found.peaks[fullest] / devices.GIB:.1f} of {limit / devices.GIB:.1f}',
      'seconds': f'{found.speed.seconds:.0f}',
      'tokens': f'{found.speed.tokens_per_second:,.0f}',
      'hours': f'{found.speed.chip_hours:,.0f}',
    }
  return row


def parted(topology: str) -> list[Row]:
  """The parts of a step of `PARTED` with partial rollouts, and their sum; compiles its programs."""
  config = parse_config(config_files.load_config(PARTED))
  config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, partial=True))
  speed = examination.examine(config, topology, '', step.EVALUATED).speed
  assert speed, topology
  rows = [
    {'slice': topology, 'part': part.name, 'seconds': f'{part.seconds:.2f}'}
    for part in speed.parts
    if part.seconds >= 0.005
  ]
  return [*rows, {'slice': topology, 'part': 'sum', 'seconds': f'{speed.seconds:.1f}'}]


def parts_section(rows: Sequence[Row]) -> str:
  """A table of the parts of a step, a column for each slice; empty where none is known."""
  known = {(row['slice'], row['part']): row for row in rows}
  slices = [name for name in PARTED_SLICES if (name, 'sum') in known]
  if not slices:
    return ''

  def cell(topology: str, part: str) -> str:
    row = known.get((topology, part))
    return row['seconds'] if row else '—'

  lines = [f'| part | {" | ".join(slices)} |', '| --- |' + ' --- |' * len(slices)]
  for part in dict.fromkeys(row['part'] for row in rows):
    lines.append(f'| {part} | {" | ".join(cell(topology, part) for topology in slices)} |')
  return _PARTS_HEAD + '\n'.join(lines) + '\n' + _PARTS_TAIL


def page(rows: Sequence[Row], parts: Sequence[Row] = ()) -> str:
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
  table = _HEAD.format(versions='; '.join(versions)) + '\n'.join(lines) + '\n'
  return table + (f'\n{missing}\n' if missing else '') + _TAIL + parts_section(parts)


def read(path: pathlib.Path | None = None) -> list[Row]:
  """The rows that are kept, of FILE or of another file; none where there is no file."""
  path = path or FILE
  if not path.exists():
    return []
  with path.open(encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def write(rows: Sequence[Row], parts: Sequence[Row] = ()) -> None:
  """Keeps the rows, and writes the page."""
  for path, columns, kept in ((FILE, COLUMNS, rows), (PARTS_FILE, PART_COLUMNS, parts)):
    with path.open('w', encoding='utf-8', newline='') as file:
      writer: csv.DictWriter[str] = csv.DictWriter(file, columns, lineterminator='\n')
      writer.writeheader()
      writer.writerows(kept)
  PAGE.write_text(page(rows, parts), encoding='utf-8')


def main(topologies: Sequence[str]) -> None:
  """Renews the rows of some slices, or of all; or, for 'parts', a step's parts."""
  rows = {(row['config'], row['slice']): row for row in read()}
  parts = {(row['slice'], row['part']): row for row in read(PARTS_FILE)}
  # A process for each row: libtpu compiles for one generation in a process.
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context('spawn'), max_tasks_per_child=1
  ) as pool:
    if list(topologies) == ['parts']:
      for topology in PARTED_SLICES:
        found = pool.submit(parted, topology).result()
        parts = {key: row for key, row in parts.items() if key[0] != topology}
        parts |= {(topology, row['part']): row for row in found}
        write(list(rows.values()), list(parts.values()))
      return
    for topology in topologies or SLICES:
      for name in BACKBONES:
        rows[name, topology] = pool.submit(examined, name, topology).result()
        write(list(rows.values()), list(parts.values()))


if __name__ == '__main__':
  main(sys.argv[1:])
