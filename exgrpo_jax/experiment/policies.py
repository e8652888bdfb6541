"""The policy that a command samples from: a run's checkpoint or a Hugging Face model."""

import copy
import dataclasses
import numbers
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError, check_argument
from exgrpo_jax.experiment import config_files, warm_start
from exgrpo_jax.experiment.experiment import (
  Experiment,
  load_weights,
  model_config,
  open_experiment,
  param_shapes,
  parse_config,
  with_dtype,
  with_folders,
)
from exgrpo_jax.huggingface import architecture, hub_checkpoint
from exgrpo_jax.learner import checkpoint, storage
from exgrpo_jax.policy import lora, model, sharding
from exgrpo_jax.runtime import activity, hub
from exgrpo_jax.runtime.workdir import check_policy, is_model, read_config

# Limits for a model without a config: tokens per prompt and per response, and bytes of the cache.
# The cache size determines how many responses are decoded together.
_LONGEST = 2048
_CACHE_BYTES = 4 * 2**30


class Source(NamedTuple):
  """The location of a policy."""

  kind: str  # 'run' or 'model'
  path: str  # the run's workdir, or the model's folder or name on the Hub
  step: int | None = None  # the step of a run's checkpoint; None is the newest

  def describe(self) -> dict[str, str]:
    """Return {kind: location}, which identifies the policy in evaluations.jsonl and in tables.

    For a model on the Hub, this includes the commit once it is known.
    """
    if '://' in self.path or hub_checkpoint.is_shipped(self.path):
      return {self.kind: self.path}
    repository = self.kind == 'model' and hub_checkpoint.parse_repository(self.path)
    return {self.kind: str(hub.as_known(repository)) if repository else os.path.abspath(self.path)}


@dataclasses.dataclass(frozen=True)
class Policy:
  """A language model that is ready to sample from."""

  source: Source
  experiment: Experiment
  decode_params: model.Params  # in the decode layout; the training layout is not kept
  step: int  # the run's step that the parameters come from; 0 for a model


def at(path: str) -> Source:
  """Return a Source: a run if `path` is a workdir, otherwise a Hugging Face model."""
  is_run = os.path.exists(os.path.join(path, 'config.json')) and not is_model(read_config(path))
  return Source('run' if is_run else 'model', path)


def config_values(
  source: Source, user_config: ConfigDict | None = None, max_response: int | None = None
) -> ConfigDict:
  """Return the config for sampling from `source`: a copy of `user_config`, if it is given.

  Without `user_config`, returns the run's own config or, for a model, the config that `suited_to`
  makes with `max_response`. Raises InputError if the run's model, LoRA, tokenizer or prompt
  settings differ from the settings in `user_config`.
  """
  values: Any = copy.deepcopy(user_config)
  if values:
    parse_config(values)
  if source.kind == 'run':
    run_values = run_config(source.path)
    if not values:
      parse_config(run_values)
      return run_values
    check_policy(values, source.path, ('model', 'lora', 'tokenizer', 'prompt'))
    return values
  if not values:
    return suited_to(source.path, max_response)
  with values.unlocked():
    values.model.path = source.path
  return values


def run_config(workdir: str) -> ConfigDict:
  """Read a run's config, and use the default meshes if its meshes do not fit this machine.

  Raises InputError if the folder isn't a run with a checkpoint.
  """
  values = read_config(workdir)
  if is_model(values):
    raise InputError(
      f"--checkpoint={workdir}: the value must be a run's workdir, but this folder contains a "
      'Hugging Face model. generate, evaluate and export accept it as '
      f'--model={os.path.abspath(workdir)}.'
    )
  if not checkpoint.steps(workdir):
    raise InputError(
      f'--checkpoint={workdir}: the run has no checkpoint yet, so it has no policy. Wait for its '
      'first checkpoint, or choose another run.'
    )
  try:
    sharding.make_meshes(config.build(sharding.MeshConfig, values['mesh'], 'config.mesh'))
  except InputError:
    values['mesh'] = dataclasses.asdict(sharding.MeshConfig())
  # The run's own config file may have added functions, which sampling does not need.
  for section in ('objective', 'replay', 'optimizer'):
    for name, value in values[section].items():
      values[section][name] = config.RecordedChoice(value) if isinstance(value, str) else value
  return ConfigDict(values)


def suited_to(path: str, max_response: int | None = None) -> ConfigDict:
  """Make a sampling config for a model, with no more slots than fit in _CACHE_BYTES."""
  values: Any = base_config()
  values.model.update(path=path, dtype='auto')
  folder = hub_checkpoint.folder(path, '--model')
  limit = architecture.read_json(folder).get('max_position_embeddings') or 2 * _LONGEST
  longest = max_response or min(_LONGEST, limit // 2)
  values.prompt.template = 'chat' if tokenizer.load(folder).chat.template else 'plain'
  prompt = max(1, min(_LONGEST, limit // 2, limit - longest))
  values.rollout.update(dict(max_prompt=prompt, max_response=longest))
  shape = model_config(with_folders(with_dtype(parse_config(values)), path))
  token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
  row_bytes = (prompt + longest) * token_bytes * jnp.dtype(shape.dtype).itemsize
  values.rollout.slots = max(1, min(values.rollout.slots, _CACHE_BYTES // row_bytes))
  return values


def base_config() -> ConfigDict:
  """Load configs/base.py without its evaluation data."""
  values: Any = config_files.load_config('base')
  values.data.evaluation = ()
  return values


def open_policy(
  path: str | os.PathLike, overrides: Mapping[str, Any] | None = None, step: int | None = None
) -> Policy:
  """Load a policy and its parameters from a run's workdir or a Hugging Face model.

  Args:
    path: the workdir, or the model's folder or name on the Hub.
    overrides: settings to change in the run's config or the model's default config (dotted key ->
      value), e.g. {'evaluation.temperature': 0.0}.
    step: the step of the checkpoint to load; the newest by default.

  Raises InputError if the policy doesn't exist or is damaged, or if a setting doesn't exist.
  """
  requirement = "a run's workdir, or the folder or name of a Hugging Face model"
  check_argument('path', path, (str, os.PathLike), requirement)
  check_argument('step', step, (numbers.Integral, type(None)), "a step's number, or None")
  path = os.fspath(path)
  source = at(path)._replace(step=step)
  if step is not None and source.kind == 'model':
    raise InputError(f'step={step}: {path} is not a run and has no checkpoints. Omit step.')
  values = config.overridden(config_values(source), overrides or {})
  return restore(source, open_experiment(values, path))


def check(policy: object) -> None:
  """Raise InputError if a library function's argument is not a Policy."""
  check_argument('policy', policy, Policy, "a Policy, which open_policy('/tmp/run') returns")


def restore(source: Source, experiment: Experiment) -> Policy:
  """Load the policy at `source` for sampling; `experiment` is the one opened for it."""
  with jax.set_mesh(experiment.meshes.training), activity.doing(f'loading {source.path}'):
    if source.kind == 'run':
      params, step = load_run_params(experiment, source.path, source.step)
    else:
      params, step = load_weights(experiment, frozen=True), 0
    decode_params = model.into_decode_layout(experiment.model, params, experiment.meshes)
    return Policy(source, experiment, decode_params, step)


def load_run_params(
  experiment: Experiment, workdir: str, step: int | None
) -> tuple[model.Params, int]:
  """Load the policy from a checkpoint (the newest by default); return its parameters and step.

  Raises InputError if there is no checkpoint, or if its adapters belong to a different base model.
  """
  config, shapes = experiment.config, param_shapes(experiment)
  if not config.lora.rank:
    return checkpoint.restore_params(workdir, step, shapes)
  base = warm_start.initial_params(experiment)
  adapters, step = checkpoint.restore_params(workdir, step, shapes, storage.base_checksums(base))
  return lora.joined(config.lora, base, adapters), step
