"""Look at a dataset before you train on it, or keep only the questions worth training on.

exgrpo data show gsm8k_train.jsonl --model=Qwen/Qwen2.5-Math-1.5B
exgrpo data show x.parquet --config=base --config.data.question_field=ask
exgrpo data prefilter --config=one_gpu --samples=8 --out=filtered

For the flags of each subcommand, see `exgrpo data show --help` and `exgrpo data prefilter --help`.
"""

import sys

from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError, check_given
from exgrpo_jax.evaluation import preview
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import model_name, parse_config, with_folders
from exgrpo_jax.experiment.policies import Source
from exgrpo_jax.training import prefilter


def _define_show() -> None:
  command_line.define_config()
  command_line.define_path(
    'model',
    "The folder or name of a Hugging Face model to use instead of the config's model. Its "
    "tokenizer counts the tokens. Without --config, prompts use the model's chat template.",
  )


def _show(args: command_line.Args, *specs: str) -> None:
  values = args.config or (policies.suited_to(args.model) if args.model else policies.base_config())
  config = parse_config(values)
  config = with_folders(config, args.model or model_name(config))
  path = config.tokenizer.path or config.model.path
  text_tokenizer = tokenizer.load(path) if path else None
  for spec in specs:
    print(preview.describe(spec, config, text_tokenizer))


def _define_prefilter() -> None:
  command_line.define_config()
  command_line.define_checkpoint()
  command_line.define_path('out', 'The output folder.')
  flags.DEFINE_integer('samples', 8, 'The number of responses per question.', lower_bound=2)
  flags.DEFINE_float('above', 0.0, 'Keep questions with a pass rate above this value.', 0.0, 1.0)
  flags.DEFINE_float('below', 1.0, 'Keep questions with a pass rate below this value.', 0.0, 1.0)


def _prefilter(args: command_line.Args) -> None:
  """Sample responses to all training questions, and write the questions that are kept."""
  check_given(
    {'--out': args.out, '--config or --checkpoint': args.config or args.checkpoint},
    '--config=one_gpu --out=filtered',
  )
  if args.step is not None and not args.checkpoint:
    raise InputError(
      f'--step={args.step}: only runs have steps. Set --checkpoint, or remove --step.'
    )
  rates = (count / args.samples for count in range(args.samples + 1))
  if not any(args.above < rate < args.below for rate in rates):
    raise InputError(
      f'--above={args.above} and --below={args.below}: with {args.samples} responses, no possible '
      'pass rate falls between these bounds. Choose bounds that are farther apart, or increase '
      '--samples.'
    )
  source = Source('run', args.checkpoint, args.step) if args.checkpoint else None
  values = policies.config_values(source, args.config) if source else args.config
  prefilter.filter_questions(values, source, args.out, args.samples, args.above, args.below)


def run() -> None:
  """Run the subcommand named by the first word."""
  word = sys.argv[1] if len(sys.argv) > 1 else ''
  if word not in ('show', 'prefilter', '--help', '-h'):
    command_line.refuse(
      InputError(f"'{word}': 'data' must be followed by 'show' or 'prefilter'. See --help.")
    )
  if not word.startswith('-'):
    del sys.argv[1]
  if word == 'prefilter':
    command_line.run(_prefilter, _define_prefilter)
  else:
    command_line.run(_show, _define_show, metavar='data spec')
