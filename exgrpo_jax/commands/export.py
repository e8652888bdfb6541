"""Write a run's policy or a model as a Hugging Face folder for transformers, vLLM or another run.

exgrpo export --checkpoint=/tmp/run --out=/tmp/policy
exgrpo export --model=model.gguf --out=/tmp/model
exgrpo export --checkpoint=/tmp/run --push=owner/name

LoRA adapters are merged into the model's weights. With --adapters, only the adapters are written.
With --push, the folder is also published on the Hugging Face Hub, with a model card.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator

import jax
from absl import flags
from etils import epath

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import (
  Experiment,
  RunConfig,
  load_weights,
  open_experiment,
  param_shapes,
)
from exgrpo_jax.huggingface import hub_checkpoint, weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.runtime import activity, console, hosts, hub
from exgrpo_jax.training import model_card
from exgrpo_jax.training.export import completed, write


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_checkpoint()
  command_line.define_model('Its weights are written unchanged.')
  command_line.define_path(
    'out', 'The output folder; it must be new or empty. With --push, this flag is optional.'
  )
  flags.DEFINE_string(
    'push',
    None,
    'The Hugging Face Hub repository (owner/name) to publish to. It is created as a private '
    'repository if it does not exist.',
  )
  flags.DEFINE_bool('public', False, 'With --push: create a public repository.')
  flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16', 'float16'],
    "The dtype of the weights; by default the original checkpoint's dtype. For a GGUF file, "
    'the default is float32, which stores dequantized values exactly.',
  )
  flags.DEFINE_bool(
    'adapters',
    False,
    'Write only the LoRA adapters, which PEFT can load onto the model in config.model.path.',
  )


def main(args: command_line.Args) -> None:
  """Export a run's checkpoint or a model, and publish it if --push is given."""
  source = command_line.chosen_policy(args)
  if args.public and not args.push:
    raise InputError('--public: nothing is published without --push. Add --push=owner/name.')
  with _folder(args) as out:
    description = _export(args, source, out)
    if args.out or not args.push:
      print(f'{out}: {description}', flush=True)
    if args.push and hosts.is_first():
      page = _publish(args, os.fspath(out))
      print(f'{page}: {description}, {"public" if args.public else "private"}')


@contextlib.contextmanager
def _folder(args: command_line.Args) -> Iterator[epath.Path]:
  """Yield the output folder, after checking that --push can succeed.

  The folder is temporary if --out is not set.
  """
  if args.push and '://' in (args.out or ''):
    raise InputError(
      f'--out={args.out}: with --push, the folder must be local. Choose a local folder, or '
      'remove --out.'
    )
  out = new_folder(args.out) if args.out or not args.push else None
  if args.push and hosts.is_first():
    hub.check_push(args.push, args.public)
  if out:
    yield out
    return
  with tempfile.TemporaryDirectory(prefix='exgrpo_export_') as folder:
    yield epath.Path(folder) / 'policy'


def _publish(args: command_line.Args, out: str) -> str:
  """Upload the exported folder and return the URL of its page."""
  files: dict[str, str | bytes] = {
    name: os.path.join(out, name) for name in sorted(os.listdir(out))
  }
  if model_card.FILE in files:
    files[model_card.FILE] = model_card.hub_card(out, args.push)
  try:
    with console.opened():
      return hub.publish(files, args.push, args.public, hub_checkpoint.FILES)
  except InputError as error:
    if not args.out or args.adapters:
      raise
    words = [*console.program(), 'export', f'--model={os.path.abspath(out)}', f'--push={args.push}']
    command = console.to_copy([*words, *['--public'] * args.public])
    why = f'{error} The export is complete. To publish it, run: {command}'
    raise InputError(why, error.status) from error


def _export(args: command_line.Args, source: policies.Source, out: epath.Path) -> str:
  """Write the policy to the folder, and return a description of it."""
  if source.kind == 'model':
    if args.adapters:
      raise InputError(
        f'--adapters: only runs have adapters, but --model={args.model} is not a run. Remove '
        '--adapters.'
      )
    return f'{source.path}, in {write_model(source.path, out, args.dtype)}'
  experiment = open_experiment(policies.run_config(args.checkpoint), args.checkpoint)
  if args.adapters:
    _check_adapters(experiment.config, args.dtype)
    if args.push and not hub_checkpoint.parse_repository(experiment.model_name):
      raise InputError(
        f'--push={args.push}: the base model {experiment.model_name} is not on the Hub, so nobody '
        'could load the adapters. Remove --adapters to publish the whole policy.'
      )
  with (
    jax.set_mesh(experiment.meshes.training),
    console.opened(),
    activity.doing(f'exporting {args.checkpoint}'),
    completed(out) as temporary_folder,
  ):
    if args.adapters:
      step = _write_adapters(experiment, temporary_folder, args.step)
    else:
      policy, step = policies.load_run_params(experiment, args.checkpoint, args.step)
      write(experiment, policy, temporary_folder, args.dtype)
    model_card.write(temporary_folder, experiment, step, adapters=args.adapters)
  return f'the {"adapters" if args.adapters else "policy"} after step {step}'


def new_folder(name: str | None) -> epath.Path:
  """Return the --out folder. Raises InputError if --out is unset or the folder is not empty."""
  if not name:
    raise InputError('--out is required. Set it to the output folder.')
  out = epath.Path(name).expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise InputError(
      f'--out={name}: this is not an empty folder. Choose a new or empty folder, so that the '
      "export is not mixed with another model's files."
    )
  return out


def write_model(path: str, out: epath.Path, dtype: str | None = None) -> str:
  """Export a model from a folder, a GGUF file or the Hub; return the dtype of the written weights.

  Copies the original folder's model card if there is one.
  """
  experiment = open_experiment(policies.suited_to(path), path)
  card = epath.Path(experiment.config.model.path) / model_card.FILE
  with (
    jax.set_mesh(experiment.meshes.training),
    console.opened(),
    activity.doing(f'exporting {path}'),
    completed(out) as temporary_folder,
  ):
    weight_dtype = write(experiment, load_weights(experiment), temporary_folder, dtype)
    if hosts.is_first() and card.exists():
      (epath.Path(temporary_folder) / model_card.FILE).write_bytes(card.read_bytes())
  return weight_dtype


def _check_adapters(config: RunConfig, dtype: str | None) -> None:
  """Raise InputError if the adapters cannot be exported on their own."""
  problem = None
  if not config.lora.rank:
    problem = 'this run trained the whole model (config.lora.rank=0) and has no adapters'
  elif not config.model.path or config.warm_start.num_updates:
    problem = 'the adapters need random or warm-started weights, which no model folder contains'
  elif config.model.extension.rope_theta:
    problem = "adapters cannot store the run's config.model.extension.rope_theta"
  elif dtype:
    problem = f'adapters are trained and written in float32, not in --dtype={dtype}'
  if problem:
    raise InputError(f'--adapters: {problem}. Remove --adapters to export the whole policy.')


def _write_adapters(experiment: Experiment, out: epath.PathLike, step: int | None) -> int:
  """Write a checkpoint's adapters and the tokenizer's files, and return the step."""
  config, shapes = experiment.config, param_shapes(experiment)
  adapters, step = checkpoint.restore_params(experiment.workdir, step, shapes)
  if hosts.is_first():
    experiment.tokenizer.save(out)
  repository = hub_checkpoint.parse_repository(experiment.model_name)
  base, commit = hub.as_known(repository)[1:] if repository else (experiment.model_name, None)
  weights.save_adapters(out, config.lora, experiment.model, adapters, base, commit)
  return step


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, on_all_hosts=True)
