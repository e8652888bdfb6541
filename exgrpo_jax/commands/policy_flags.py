"""Which policy a command asks, and how, by its flags."""

import copy
from typing import Any

from ml_collections import ConfigDict, config_flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.policies import Source


def chosen(args: command_line.Args) -> Source:
  """What --checkpoint and --step, or --model, name; InputError where they name none or two."""
  if args.checkpoint and args.model:
    raise InputError(
      f'--checkpoint={args.checkpoint} and --model={args.model} both name a policy; leave one of '
      'them out.'
    )
  if not args.checkpoint and not args.model:
    raise InputError(
      "one of --checkpoint and --model is needed: a run's workdir, or a model, by its folder, its "
      'GGUF file or its name.'
    )
  if args.checkpoint:
    return Source('run', args.checkpoint, args.step)
  if args.step is not None:
    raise InputError(f'--step={args.step} is of a run, and --model={args.model} has no steps.')
  if 'model.path' in given_overrides(args):
    raise InputError(
      f'--config.model.path and --model={args.model} both name a model; leave one of them out.'
    )
  return Source('model', args.model)


def with_sampling(args: command_line.Args, values: ConfigDict) -> ConfigDict:
  """A copy of the config, sampled from as --temperature and --max_response say."""
  changed: Any = copy.deepcopy(values)
  with changed.unlocked():
    if args.temperature is not None:
      changed.evaluation.temperature = args.temperature
    changed.rollout.max_response = args.max_response or changed.rollout.max_response
  return changed


def given_overrides(args: command_line.Args) -> dict[str, Any]:
  """Dotted key -> value of what the command line changes in --config."""
  is_given = getattr(args, 'config', None)  # a command may have no such flag
  return config_flags.get_override_values(args['config']) if is_given else {}
