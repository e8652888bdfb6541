"""A run's policy as a Hugging Face folder, for transformers, vLLM, or another run.

python -m exgrpo_jax.export --checkpoint=/tmp/run --out=/tmp/policy

With LoRA, adapters are merged into the model's weights, or written alone for PEFT: --adapters.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags
from etils import epath

from exgrpo_jax import cli, policies
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Config, Experiment, open_experiment, state_shapes
from exgrpo_jax.huggingface import adapters, architecture, hub_checkpoint, weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import write_json

_SCORE = 'evaluation.json'  # of workdir/export/best: which step it is of, and its score


def define_flags() -> None:
  """Of this command."""
  cli.define_checkpoint()
  cli.define_out('The folder to write; it must be new or empty.')
  flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16', 'float16'],
    "Of the weights; the original checkpoint's by default.",
  )
  flags.DEFINE_bool(
    'adapters',
    False,
    "LoRA's adapters alone, for PEFT to load onto the model of config.model.path.",
  )


def main(args: cli.Args) -> None:
  """Exports a checkpoint of a run."""
  if not args.checkpoint or not args.out:
    raise InputError(
      "--checkpoint and --out are both needed: a run's workdir, and the folder to write."
    )
  out = epath.Path(args.out).expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise InputError(
      f'--out={args.out} is not empty; name a new folder, so that no file of '
      'another model stays in it.'
    )
  values: Any = policies.run_config(args.checkpoint)
  # This machine's devices, not the run's.
  values.mesh = dict(training=dict(data=1, fsdp=-1, tensor=1), decoding=dict(data=-1, tensor=1))
  experiment = open_experiment(values, args.checkpoint)
  if args.adapters:
    _check_adapters(experiment.config, args.dtype)
  with jax.set_mesh(experiment.meshes.training), _completed(out) as unfinished:
    if args.adapters:
      step = _write_adapters(experiment, unfinished, args.step)
    else:
      policy, step = policies.of_run(experiment, args.checkpoint, args.step)
      write(experiment, policy, unfinished, args.dtype)
  print(f'{out}: the {"adapters" if args.adapters else "policy"} after step {step}')


def _check_adapters(config: Config, dtype: str | None) -> None:
  """InputError where adapters alone would be of no use."""
  problem = None
  if not config.lora.rank:
    problem = 'this run trained the whole model (config.lora.rank=0) and has none'
  elif not config.model.path or config.warm_start.num_updates:
    problem = 'what they belong to is no folder that others have, but random or a warm start'
  elif config.model.extension.rope_theta:
    problem = "they would come without the run's config.model.extension.rope_theta"
  elif dtype:
    problem = f'they are written as they were trained, in float32, and not in --dtype={dtype}'
  if problem:
    raise InputError(f'--adapters: {problem}; leave it out, and the whole policy is written.')


def _write_adapters(experiment: Experiment, out: epath.PathLike, step: int | None) -> int:
  """Writes a checkpoint's adapters and the tokenizer's files; returns the checkpoint's step."""
  config, like = experiment.config, state_shapes(experiment).params
  trained, step = checkpoint.restore_params(experiment.workdir, step, like)
  if hosts.is_first():
    experiment.tokenizer.save(out)
  named = hub_checkpoint.named(experiment.model_name)
  base = named.name if named else experiment.model_name
  adapters.save(out, config.lora, experiment.model, trained, base)
  return step


def write(
  experiment: Experiment, params: model.Params, out: epath.PathLike, dtype: str | None = None
) -> None:
  """Writes weights, config.json, generation_config.json and the tokenizer's files.

  Keeps what the original checkpoint has in its config.json. `dtype` is by default that of the
  original, or float32 for a model from scratch. config.json is written last: a folder that
  has it is complete.
  """
  config, tokenizer = experiment.config, experiment.tokenizer
  if config.model.path:
    values = architecture.extended(
      architecture.read_json(config.model.path), config.model.extension
    )
  else:
    values = architecture.to_json(experiment.model, config.rollout.longest_row)
  if hosts.is_first():
    tokenizer.save(out)
    if 'generation_config.json' not in tokenizer.files:
      (epath.Path(out) / 'generation_config.json').write_text(
        json.dumps({'eos_token_id': list(tokenizer.eos_ids)})
      )
  original = values.get('dtype') or values.get('torch_dtype') or 'float32'
  weights.save(out, experiment.model, params, values, dtype or original)


def keep_best(experiment: Experiment, params: model.Params, step: int, score: float) -> None:
  """Exports to workdir/export/best if `score` is above that of the policy already there."""
  folder = os.path.join(experiment.workdir, 'export', 'best')
  if hosts.broadcast_from_first(_score(folder)) >= score:
    return
  with _completed(folder) as unfinished:
    write(experiment, params, unfinished)
    write_json(os.path.join(unfinished, _SCORE), {'step': step, 'score': score})


def keep_last(experiment: Experiment, params: model.Params) -> None:
  """Exports to workdir/export/last, in place of what is there."""
  with _completed(os.path.join(experiment.workdir, 'export', 'last')) as unfinished:
    write(experiment, params, unfinished)


@contextlib.contextmanager
def _completed(folder: epath.PathLike) -> Iterator[str]:
  """A folder to write into, beside `folder`, whose place it takes at the end of the block.

  A kill or an error leaves what was there. What cannot be renamed, such as a bucket's folder, is
  written in place: there config.json, or that of adapters, comes last.
  """
  name = os.fspath(folder)
  if '://' in name or os.path.ismount(name) or os.path.realpath(name) == os.getcwd():
    yield name
    return
  name = os.path.realpath(name)
  unfinished = name + '.new'
  _remove(unfinished)  # of an export that was killed
  yield unfinished
  _remove(name)
  if hosts.is_first():
    os.replace(unfinished, name)


def _score(folder: str) -> float:
  try:
    with open(os.path.join(folder, _SCORE)) as file:
      return json.load(file)['score']
  except FileNotFoundError:
    return float('-inf')


def _remove(folder: str) -> None:
  if hosts.is_first():
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
