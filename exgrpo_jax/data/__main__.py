"""What a data set is to a model, before anything is trained on it.

python -m exgrpo_jax.data show gsm8k_train.jsonl --model=Qwen2.5-Math-1.5B
python -m exgrpo_jax.data show x.parquet --config=base --config.data.question_field=ask
python -m exgrpo_jax.data prefilter --config=one_gpu --samples=8 --out=filtered
"""

import sys

from exgrpo_jax import cli, prefilter, preview
from exgrpo_jax.errors import InputError

COMMANDS = {'show': preview, 'prefilter': prefilter}


def main() -> None:
  """Runs the command that the first word names."""
  word = sys.argv[1] if len(sys.argv) > 1 else ''
  if word in COMMANDS:
    del sys.argv[1]
  elif word not in ('--help', '-h'):
    cli.refuse(
      InputError(
        f"'{word}': the first word must be one of: {', '.join(COMMANDS)}; --help says more."
      )
    )
  command = COMMANDS.get(word, preview)
  several = 'data spec' if command is preview else ''
  cli.run(command.main, command.define_flags, several=several)


if __name__ == '__main__':
  main()
