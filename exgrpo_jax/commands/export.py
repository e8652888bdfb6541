"""Write a run's policy or a model as a Hugging Face folder for transformers, vLLM or another run.

exgrpo export --checkpoint=/tmp/run --out=/tmp/policy
exgrpo export --model=model.gguf --out=/tmp/model

LoRA adapters are merged into the model's weights. With --adapters, only the adapters are written.
"""

import dataclasses
import shlex
from typing import Any

import jax
from absl import flags
from etils import epath

from exgrpo_jax.commands import command_line
from exgrpo_jax.data import prompt
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import (
  Experiment,
  RunConfig,
  load_weights,
  open_experiment,
  state_shapes,
)
from exgrpo_jax.huggingface import architecture, hub_checkpoint, weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import sharding
from exgrpo_jax.runtime import activity, console, hosts
from exgrpo_jax.training.export import completed, write


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_checkpoint()
  command_line.define_model('Its weights are written unchanged.')
  command_line.define_path('out', 'The folder to write; it must be new or empty.')
  flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16', 'float16'],
    "The dtype of the weights; by default the original checkpoint's dtype. For a GGUF file, "
    'the default is float32, which stores dequantised values exactly.',
  )
  flags.DEFINE_bool(
    'adapters',
    False,
    'Write only the LoRA adapters, which PEFT can load onto the model in config.model.path.',
  )


def main(args: command_line.Args) -> None:
  """Export a run's checkpoint, or a model."""
  source = command_line.chosen_policy(args)
  out = new_folder(args.out)
  if source.kind == 'model':
    if args.adapters:
      raise InputError(
        f'--adapters: only runs have adapters, but --model={args.model} is not a run. Leave '
        '--adapters out.'
      )
    print(f'{out}: {source.path}, in {write_model(source.path, out, args.dtype)}')
    return
  values: Any = policies.run_config(args.checkpoint)
  # Use this machine's devices, not the run's.
  values.mesh = dataclasses.asdict(sharding.MeshConfig())
  experiment = open_experiment(values, args.checkpoint)
  if args.adapters:
    _check_adapters(experiment.config, args.dtype)
  with (
    jax.set_mesh(experiment.meshes.training),
    console.opened(),
    activity.doing(f'exporting {args.checkpoint}'),
    completed(out) as unfinished,
  ):
    if args.adapters:
      step = _write_adapters(experiment, unfinished, args.step)
    else:
      policy, step = policies.of_run(experiment, args.checkpoint, args.step)
      write(experiment, policy, unfinished, args.dtype)
  print(f'{out}: the {"adapters" if args.adapters else "policy"} after step {step}')
  for line in _left_out(experiment.config.prompt, out):
    print(line)


def _left_out(prompts: prompt.PromptConfig, out: epath.Path) -> list[str]:
  """Return a line for each prompt setting that a server needs but the folder does not contain."""
  lines = []
  if keywords := prompts.template_kwargs:
    serve = f'vllm serve {out} --default-chat-template-kwargs {shlex.quote(keywords)}'
    lines.append(f'config.prompt.template_kwargs is not in the folder; serve it with: {serve}')
  if prompts.system:
    message = f'begin each chat with this system message: {prompts.system!r}'
    lines.append(f'config.prompt.system is not in the folder; {message}')
  return lines


def new_folder(name: str | None) -> epath.Path:
  """Return the folder given by --out. Raises InputError if it is missing or not empty."""
  if not name:
    raise InputError('--out is required. Set it to the output folder.')
  out = epath.Path(name).expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise InputError(
      f'--out={name}: this is not an empty folder. Choose a new or empty folder, so that the '
      'export does not mix with files of another model.'
    )
  return out


def write_model(path: str, out: epath.Path, dtype: str | None = None) -> str:
  """Write a model from a folder, a GGUF file or the Hub, and return its weights' dtype."""
  experiment = open_experiment(policies.suited_to(path), path)
  with (
    jax.set_mesh(experiment.meshes.training),
    console.opened(),
    activity.doing(f'exporting {path}'),
    completed(out) as unfinished,
  ):
    write(experiment, load_weights(experiment), unfinished, dtype)
  return architecture.read_json(out)['dtype']


def _check_adapters(config: RunConfig, dtype: str | None) -> None:
  """Raise InputError if the adapters alone would be useless."""
  problem = None
  if not config.lora.rank:
    problem = 'this run trained the whole model (config.lora.rank=0) and has no adapters'
  elif not config.model.path or config.warm_start.num_updates:
    problem = "the adapters' base is random weights or a warm start, which no other folder contains"
  elif config.model.extension.rope_theta:
    problem = "adapters cannot store the run's config.model.extension.rope_theta"
  elif dtype:
    problem = (
      f'adapters are always written in float32, as they were trained, not in --dtype={dtype}'
    )
  if problem:
    raise InputError(f'--adapters: {problem}. Leave --adapters out to export the whole policy.')


def _write_adapters(experiment: Experiment, out: epath.PathLike, step: int | None) -> int:
  """Write a checkpoint's adapters and the tokenizer's files, and return the step."""
  config, like = experiment.config, state_shapes(experiment).params
  trained, step = checkpoint.restore_params(experiment.workdir, step, like)
  if hosts.is_first():
    experiment.tokenizer.save(out)
  named = hub_checkpoint.named(experiment.model_name)
  base = named.name if named else experiment.model_name
  weights.save_adapters(out, config.lora, experiment.model, trained, base)
  return step


def run() -> None:
  """Run the command line."""
  command_line.run(main, define_flags, on_all_hosts=True)
