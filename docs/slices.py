"""Writes docs/slices.md: the backbones on TPU slices, by the estimates of `exgrpo capacity`.

python docs/slices.py                    # all rows: an hour and a half on two cores
python docs/slices.py v5e:8x8 v6e:4x8    # the rows of some slices; the others stay
python docs/slices.py parts              # a step's parts, on three slices: a quarter of an hour

Needs libtpu. Each row is saved as soon as it is known, in docs/slices.csv or docs/slices_parts.csv.
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

# The configs of a row have the same model shape and the same meshes.
BACKBONES = {
  'qwen2_5_math_1_5b': ('qwen2_5_math_1_5b',),
  'qwen2_5_math_7b': ('qwen2_5_math_7b', 'qwen2_5_7b_instruct'),
  'llama3_1_8b': ('llama3_1_8b', 'llama3_1_8b_instruct'),
}
SLICES = ('v5e:4x4', 'v5e:8x8', 'v6e:4x8', 'v5p:4x4x4')
# The config and slices for the table of a step's parts, with partial rollouts: the paper's main
# backbone.
PARTED, PARTED_SLICES = 'qwen2_5_math_7b', ('v5e:8x8', 'v6e:8x8', 'v5p:4x4x4')
# Slots where the config's own do not fit, or where more fit.
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

Look up what the paper's five backbones need of a TPU slice, and how long a step takes there.
**These are estimates; nothing here was measured on a TPU.**

## What fits, and how long does a step take?

| config | slice | slots | GiB per chip | program | seconds a step | tokens/s | chip-hours |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_TAIL = """
- **Source.** The programs of a step were compiled for each slice by `exgrpo capacity --config=…
  --topology=…`, with {versions}. The command prints each part of a step and what it assumes.
- **A step** has 128 questions x 8, replay in full, and its share of an evaluation of 2,259
  responses every ten steps.
- **Lengths of responses** are the default of `--lengths`: lognormal, median 1,024 tokens, 1% cut at
  the limit of 8,192, mean about 1,400.
- **Memory** is for the program that needs most, named in the next column, with everything resident
  next to it. **Chip-hours** are for 100 steps.
- **Slots** (`--config.rollout.slots`) are the config's if these fit and no more would, otherwise
  the number that fits.

`python docs/slices.py` renews the table.
"""
_PARTS_HEAD = """
## Where does a step's time go?

Seconds of each part of one step of qwen2_5_math_7b, with `rollout.partial`, 1,024 slots and
everything else as above. `python docs/slices.py parts` renews the table.

"""
_PARTS_TAIL = """
## Why does a step on v5e:8x8 take 39 s?

| part | what it waits for | time |
| --- | --- | --- |
| update: a pass of 64 x 9,216 tokens | matrix products | 4.7 s |
| … the compiler's operations | | 3.5 s |
| … attention, at the assumed half of peak | | 1.0 s |
| … gathering weights and summing gradients, the part that is not hidden | | .3 s |
| decode: a step | memory | 8.7 ms |
| … reading weights | | 4.7 ms |
| … reading the written part of the cache | | 2 ms |
| evaluation, every ten steps | the longest of 2,259 responses | 74 s |
| resume, packed, with 1.02 tokens computed for each | matrix products | 3.8 s |
| … in padded rows, as before, with 1.63 | | 6.7 s |
| host | assumed | 1.0 s |

- **update**: recomputing the forward pass is another third of the FLOPs counted. The products that
  `microbatch.remat=all_but_products` keeps are 22 GB. Packing computes 1.11 tokens for each.
- **resume**: a sixth of it is sums over the tensor axis of four chips. The packing takes .1 s of a
  CPU.

## Why is a faster chip not faster by its FLOPs?

- **v6e** has 4.7 times the FLOPs of a v5e, but only twice the bandwidth of its memory and its
  links. Heads of 128 fill half of its matrix unit. So the update runs at 23% of peak, counting the
  FLOPs that it needs. A decode step, 4.3 ms, is still bound by memory.
- **v5p** takes 4.2 ms for a decode step. Reading the weights is 1.4 ms of that; the rest is not
  bound by memory.

## What would not shorten it by much?

**A third length of the sequences in training**, an eighth. On 64 shards:

| median length | tokens computed in a step, fewer by |
| --- | --- |
| 1,024 | 4.2% |
| 768 and 1,500 | 2% |
| 512, 1,280, 2,048 and 3,000 | 0 |

- On 8 shards, or one, it saves at most 1.1%.
- A pass takes longer per token, because its weights are gathered for fewer tokens: .64 ms a token
  of each chip, not .50. So an update is 3.0%, 1.5% and 0% shorter: half a second at best, for two
  more programs.
- A half instead of the eighth saves nothing below a median of 2,048, and 3 to 4% above.
- If rows share their prompts (GPUs), it saves at most 1.2% on 8 shards. On 64 shards a half saves
  13 to 19% at 1,024 and 1,500, and nothing at other medians.

**Attention that skips blocks of other rows.**

- JAX's splash kernel masks them, and skips only what the static mask excludes. Its map of blocks is
  an array, so it could be made from the segments. Half of the blocks would be skipped on average.
- But chips wait for each other in every layer. With one sequence on each of 64 chips, one chip
  holds a response of 8,192 tokens, which needs .9 of its blocks. That saves a tenth of the 2.1 s
  that attention takes in an update.
- On 16 shards the slowest chip needs half of its blocks, and it would be worth it: about a sixth of
  an update for the 1.5B backbone, by formula.

**Better lengths to pad resumed rows to.** With eight lengths, 1.38 tokens are computed for each.

One error is known. Compiled by itself, the pass of short sequences takes 1.15 s, not the 1.00 that
its tokens suggest. Waiting for other chips does not shrink with the tokens. So an update is half a
second longer than in the table.
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
  """Compile all programs of a step and return the table's row."""
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
  """Compile a step of `PARTED` with partial rollouts; return its parts and their sum."""
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
  """Return the table of a step's parts, a column for each slice; empty if none is known."""
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
  """Return the page of these rows, by slice and model size."""
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
  table = _HEAD + '\n'.join(lines) + '\n' + (f'\n{missing}\n' if missing else '')
  return table + _TAIL.format(versions='; '.join(versions)) + parts_section(parts)


def read(path: pathlib.Path | None = None) -> list[Row]:
  """Read the saved rows from FILE or another file; none if there is no file."""
  path = path or FILE
  if not path.exists():
    return []
  with path.open(encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def write(rows: Sequence[Row], parts: Sequence[Row] = ()) -> None:
  """Save the rows and write the page."""
  for path, columns, kept in ((FILE, COLUMNS, rows), (PARTS_FILE, PART_COLUMNS, parts)):
    with path.open('w', encoding='utf-8', newline='') as file:
      writer: csv.DictWriter[str] = csv.DictWriter(file, columns, lineterminator='\n')
      writer.writeheader()
      writer.writerows(kept)
  PAGE.write_text(page(rows, parts), encoding='utf-8')


def main(topologies: Sequence[str]) -> None:
  """Compute the rows of some or all slices again, or for 'parts' the parts of a step."""
  rows = {(row['config'], row['slice']): row for row in read()}
  parts = {(row['slice'], row['part']): row for row in read(PARTS_FILE)}
  # One process for each row, because libtpu compiles for only one generation in a process.
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
