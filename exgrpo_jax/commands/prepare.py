"""Makes the file of training questions of a public data set, in verl's columns.

exgrpo prepare --data=Elliott/Openr1-Math-46k-8192:train --out=openr1.parquet

Reads a folder's parquet and jsonl files, those that are named, or those of a split on the Hugging
Face Hub, with verl's columns or with `problem` and `answer`. Every row that is written has a prompt
and a ground truth; what is left out is counted.
"""

import collections
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.data import conflicts, progress, training_rows
from exgrpo_jax.data.tasks.embedded import Record
from exgrpo_jax.data.training_rows import SCHEMA, TARGET, Shard
from exgrpo_jax.errors import InputError

_GROUP = 1024  # rows that are written together


def define_flags() -> None:
  """Of this command."""
  flags.DEFINE_list(
    'data', None, 'Folders, files and splits of the Hub (owner/name:split) to read, in this order.'
  )
  command_line.define_out('The parquet file to write; it must not exist.')
  flags.DEFINE_bool(
    'keep_target',
    False,
    "Keeps worked solutions as the column 'target', for config.data.solution_field; ExGRPO needs "
    'none.',
  )


def main(args: command_line.Args) -> None:
  """Writes the file."""
  if not args.data or not args.out:
    raise InputError(
      "--data and --out are both needed: the data set's folder, and the parquet file to write."
    )
  out = pathlib.Path(args.out).expanduser()
  if out.suffix != '.parquet':
    raise InputError(f'--out={args.out} must end in .parquet: that is what is written.')
  if out.exists():
    raise InputError(f'--out={args.out} is there already; name another file, or delete it.')
  shards = training_rows.shards(args.data)
  _print_unused(shards, args.keep_target)
  unfinished = out.with_name(out.name + '.new')
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    kept, asked, left_out = _write(unfinished, shards, args.keep_target)
    if kept:
      os.replace(unfinished, out)
  except OSError as error:
    raise InputError(
      f'--out={args.out} cannot be written ({error}); name a place that can, with space for it.'
    ) from error
  finally:
    unfinished.unlink(missing_ok=True)
  for why, count in left_out.items():
    print(f'left out: {count:,} rows with {why}')
  if not kept:
    raise InputError(
      f'--data={",".join(args.data)}: no row is left, so {args.out} was not written.'
    )
  print(f'{args.out}: {kept:,} questions, {asked:,} of them different')


def _print_unused(shards: Sequence[Shard], keep_target: bool) -> None:
  """Which columns are not read."""
  used = {*training_rows.VERL, *([TARGET] if keep_target else [])}
  used |= {'problem', 'answer', *(['solution'] if keep_target else [])}
  unused = sorted({column for shard in shards for column in shard.columns} - used)
  if unused:
    print(f'columns left out: {", ".join(unused)}')


def _write(
  path: pathlib.Path, shards: Sequence[Shard], keep_target: bool
) -> tuple[int, int, dict[str, int]]:
  """Writes the rows; returns how many, with how many different prompts, and why how many not."""
  schema = SCHEMA.append(pa.field(TARGET, pa.string())) if keep_target else SCHEMA
  kept, asked, left_out = 0, set(), collections.Counter()
  conflicting = conflicts.find(_records(shards))
  report = progress.reporter(lambda done: f'{done:,} rows read')
  group: list[dict[str, Any]] = []
  with pq.ParquetWriter(path, schema) as writer:
    for shard in shards:
      before = kept + left_out.total()
      for row in training_rows.rows(shard, keep_target):
        report(kept + left_out.total())
        if isinstance(row, str):
          left_out[row] += 1
          continue
        question = conflicts.key(row['prompt'])
        if question in conflicting:
          left_out[f'{conflicts.REASON}, such as {next(iter(conflicting.values()))}'] += 1
          continue
        if row['extra_info']['index'] is None:
          row['extra_info']['index'] = kept
        asked.add(question)
        kept += 1
        group.append(row)
        if len(group) == _GROUP:
          writer.write_table(pa.Table.from_pylist(group, schema))
          group.clear()
      kind = "verl's columns" if shard.is_verl else 'problem and answer'
      print(f'{shard.path}: {kept + left_out.total() - before:,} rows, {kind}', flush=True)
    if group:
      writer.write_table(pa.Table.from_pylist(group, schema))
  return kept, len(asked), dict(left_out)


def _records(shards: Sequence[Shard]) -> Iterator[tuple[str, Record]]:
  """The place of each row that can be kept, with what `conflicts.find` reads of it."""
  for shard in shards:
    for number, row in enumerate(training_rows.rows(shard, keep_target=False)):
      if isinstance(row, dict):
        answer = row['reward_model']['ground_truth']
        yield (
          f'{shard.path}: row {number}',
          {'messages': row['prompt'], 'answer': answer, 'kind': 'math'},
        )


def run() -> None:
  """Run the command line."""
  command_line.run(main, define_flags)
