"""Which policy a command evaluates: a run's checkpoint, or a Hugging Face folder without a run."""

import os
from typing import Any

import jax
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import cli, config_files
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Experiment, parse_config
from exgrpo_jax.huggingface import weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.runtime import activity
from exgrpo_jax.runtime.workdir import check_workdir, read_config


def config_values(args: cli.Args) -> ConfigDict:
  """The config to evaluate with: --config, else the run's own, or one for a model without a run.

  Raises InputError where the flags name no policy or two, or the run has another config.
  """
  if bool(args.checkpoint) == bool(args.model):
    raise InputError(
      "one of --checkpoint and --model is needed: a run's workdir, or a Hugging Face folder."
    )
  if args.config:
    parse_config(args.config)
  if args.checkpoint:
    run = read_config(args.checkpoint)
    if not args.config:
      return ConfigDict(run)
    check_workdir(args.config, args.checkpoint, ('model', 'tokenizer', 'prompt'))
    return args.config
  if args.step is not None:
    raise InputError(f'--step={args.step} is of a run, and --model={args.model} has no steps.')
  if 'model.path' in overrides(args):
    raise InputError(
      f'--config.model.path and --model={args.model} both name a model; leave one of them out.'
    )
  values: Any = args.config
  if not values:
    values = config_files.load(config_files.shipped_path('base', config_files.CONFIGS, 'config'))
    values.prompt.template = 'paper'
    values.data.evaluation = ()
  with values.unlocked():
    values.model.path = args.model
  return values


def overrides(args: cli.Args) -> dict[str, Any]:
  """Dotted key -> value of what the command line changes in --config."""
  return config_flags.get_override_values(args['config']) if args.config else {}


def origin(args: cli.Args) -> dict[str, str]:
  """What the policy is, 'run' or 'model', and where that lies."""
  path = args.checkpoint or args.model
  kind = 'run' if args.checkpoint else 'model'
  return {kind: path if '://' in path else os.path.abspath(path)}


def restore(args: cli.Args, experiment: Experiment) -> tuple[model.Params, int]:
  """The policy's parameters, and the step of the run after which it has them; 0 of a model."""
  if args.checkpoint:
    like = model.shapes(experiment.model, experiment.meshes.training)
    return checkpoint.restore_params(args.checkpoint, args.step, like)
  with activity.doing(f'reading the weights of {args.model}'):
    params = weights.load(args.model, experiment.model, experiment.meshes.training)
  return jax.block_until_ready(params), 0
