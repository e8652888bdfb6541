"""Writes docs/slices.md: the estimates of `exgrpo capacity` for the backbones on TPU slices.

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
# The table of a step's parts is for the paper's main backbone, with partial rollouts.
PARTED, PARTED_SLICES = 'qwen2_5_math_7b', ('v5e:8x8', 'v6e:8x8', 'v5p:4x4x4')
# Replaces the config's number of slots where this number does not fit, or where more slots fit.
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

Look up which TPU slices can train the paper's five backbones, and how long a step takes. **All
numbers are estimates. Nothing on this page was measured on a TPU.**

## What fits, and how long does a step take?

| config | slice | slots | GiB per chip | program | seconds per step | tokens/s | chip-hours |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_TAIL = """
- **Source.** A step's programs were compiled for each slice by `exgrpo capacity --config=…
  --topology=…` ({versions}). The command prints each part of a step and its
  assumptions.
- **A step** has 128 questions with 8 rows each, and as many replayed questions as possible. Its
  time includes a tenth of an evaluation with 2,259 responses, which runs every ten steps.
- **Response lengths** follow the default of `--lengths`. The lengths are lognormal with a median of
  1,024 tokens and a mean of about 1,400. At the limit of 8,192 tokens, 1% of the responses are
  truncated.
- **GiB per chip** is the peak memory, which is reached while the program in the next column runs.
  The number includes everything else that is in memory at that time.
- **Chip-hours** are for 100 steps.
- **Slots** is the number of slots (`--config.rollout.slots`). It differs from the config's own
  number if this number does not fit, or if more slots fit.

Run `python docs/slices.py` to update the table.
"""
_PARTS_HEAD = """
## Where does a step's time go?

The table shows how many seconds each part of a qwen2_5_math_7b step takes, with `rollout.partial`
and 1,024 slots. All other assumptions are the same as above. Run `python docs/slices.py parts` to
update the table.

"""
_PARTS_TAIL = """
## Why does a step on v5e:8x8 take 39 s?

| part | limited by | time |
| --- | --- | --- |
| update: a pass over 64 x 9,216 tokens | matrix products | 4.7 s |
| … operations that the compiler generates itself | | 3.5 s |
| … attention, assumed to run at half of peak | | 1.0 s |
| … gathering weights and summing gradients, where this does not overlap with computation | | .3 s |
| decode: one decode step | memory | 8.7 ms |
| … reading weights | | 4.7 ms |
| … reading the written part of the cache | | 2 ms |
| evaluation, every ten steps | the longest of 2,259 responses | 74 s |
| resume, packed: 1.02 tokens computed per real token | matrix products | 3.8 s |
| … with padded rows, for comparison: 1.63 tokens computed per real token | | 6.7 s |
| host | an assumption | 1.0 s |

- **update**: Recomputing the forward pass adds a third to the number of FLOPs. The products that
  `microbatch.remat=all_but_products` keeps in memory take 22 GB. With packing, 1.11 tokens are
  computed for each real token.
- **resume**: A sixth of the time is spent on sums over the tensor axis of four chips. The packing
  takes .1 s on a CPU.

## Why does speed not scale with a chip's FLOPs?

- **A v6e chip** has 4.7 times the FLOPs of a v5e chip, but only twice the memory bandwidth and
  twice the interconnect bandwidth. Heads of size 128 fill only half of the matrix unit. So the
  update runs at 23% of peak, counting only the necessary FLOPs. A decode step takes 4.3 ms and is
  still memory-bound.
- **A v5p chip** takes 4.2 ms for a decode step. Reading the weights takes 1.4 ms of this time, and
  the rest is not memory-bound.

## Which optimizations would not help much?

**A third sequence length in training.** The table shows what a third length, one eighth of the
longest, would save on 64 shards:

| median response length | reduction in the tokens computed per step |
| --- | --- |
| 1,024 | 4.2% |
| 768 and 1,500 | 2% |
| 512, 1,280, 2,048 and 3,000 | 0 |

- On 8 shards or one shard, the third length reduces the number of tokens by at most 1.1%.
- A pass with short sequences takes longer per token, because the weights are gathered for fewer
  tokens: .64 ms per token and chip instead of .50 ms. So the third length shortens an update by
  only 3.0%, 1.5% and 0% for the three rows of the table. It saves half a second at best and
  requires two more programs.
- A third length that is half of the longest length saves nothing if the median is below 2,048
  tokens, and 3 to 4% if it is above.
- If rows share their prompts, as they do on GPUs, adding a length of one eighth of the longest
  saves at most 1.2% on 8 shards. On 64 shards, adding a length of half the longest saves 13 to 19%
  at medians of 1,024 and 1,500, and nothing otherwise.

**Attention that skips the blocks of other rows.**

- JAX's splash kernel masks these blocks but skips only blocks that the static mask excludes. The
  kernel's block map is an array, so the map could be built from the segments. On average, half of
  the blocks would then be skipped.
- But the chips wait for each other in every layer. With one sequence on each of 64 chips, at least
  one chip has a response of 8,192 tokens and needs 90% of its blocks. So skipping blocks would save
  only a tenth of the 2.1 s that attention takes in an update.
- On 16 shards, the slowest chip needs half of its blocks, so skipping blocks would be worthwhile.
  According to the formula for attention, skipping blocks would shorten an update of the 1.5B
  backbone by about a sixth.

**Padding resumed rows to more lengths.** Packing computes 1.02 tokens for each real token. Padding
would compute 1.38 tokens, even with eight lengths to choose from.

The tables of a step's parts underestimate an update by half a second. They assume that the pass
with short sequences scales with its number of tokens, which would give 1.00 s. Compiled by itself,
this pass takes 1.15 s, because the time spent waiting for other chips does not shrink with the
number of tokens.
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
  """Return the table of a step's parts with a column per slice; '' if no parts are known."""
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
  """Return the page with these rows, sorted by slice and model size."""
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
  """Return the rows saved in `path`, by default FILE; [] if the file does not exist."""
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
  """Update the rows of these slices, by default all; ['parts'] updates the parts of a step."""
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
