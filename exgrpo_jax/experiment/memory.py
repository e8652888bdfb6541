"""Estimate a run's memory use, to reject configs that do not fit and to explain memory errors."""

import dataclasses
import math

import jax
import numpy as np
from rich.filesize import decimal

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import Experiment, RunConfig
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import settings
from exgrpo_jax.runtime import machine

# Bytes per token of a step's rows: token, mask, log-probability and weight, 4 bytes each.
_BATCH_BYTES = 16
# Bytes per parameter: the parameter and its gradient in float32, and AdamW's two moments, whose
# dtype is the key. With LoRA, only the frozen base in bfloat16 counts.
_TRAINED_BYTES, _FROZEN_BYTES = {'float32': 8 + 8, 'bfloat16': 8 + 4}, 2


@dataclasses.dataclass(frozen=True)
class Need:
  """An array that a run allocates, and the setting that determines its size."""

  setting: str  # e.g. config.rollout.max_response=8192
  what: str
  size: int  # bytes, on all devices combined or on the host
  is_on_host: bool = False
  is_certain: bool = True  # True if every run that reaches its limits needs the array


def needs(experiment: Experiment) -> list[Need]:
  """Return a run's large arrays. Their sizes are lower bounds, computed from formulas."""
  config, shape = experiment.config, experiment.model
  rollout = config.rollout
  num_rows, longest = rollout.questions * rollout.group_size, rollout.longest_row
  # The keys and values of a row in all layers, in bytes.
  row_bytes = 2 * sum(shape.layer_lengths(longest)) * shape.num_kv_heads * shape.head_size
  row_bytes *= np.dtype(shape.dtype).itemsize
  limits = 'max_prompt', 'max_response'
  num_cached = min(rollout.slots, num_rows)
  count = sum(
    math.prod(x.shape) for x in jax.tree.leaves(model.shapes(shape, experiment.meshes.training))
  )
  model_setting = f'config.model.path={config.model.path}' if config.model.path else 'config.model'
  param_bytes = _FROZEN_BYTES if config.lora.rank else _TRAINED_BYTES[config.optimizer.moment_dtype]
  logit_bytes = min(rollout.logit_chunk, num_rows * longest) * shape.vocab_size * 4
  return [
    Need(
      _largest(config, 'questions', 'group_size', *limits),
      f"a step's {num_rows:,} rows of {longest:,} tokens",
      num_rows * longest * _BATCH_BYTES,
      is_on_host=True,
    ),
    Need(
      _largest(config, *limits), f'the keys and values of one row of {longest:,} tokens', row_bytes
    ),
    Need(
      model_setting,
      f"the training state of the model's {count:,} parameters",
      count * param_bytes,
      is_certain=config.optimizer.name == 'adamw',
    ),
    Need(
      _largest(config, 'slots', *limits),
      f'the keys and values of {num_cached:,} rows of {longest:,} tokens',
      row_bytes * num_cached,
      is_certain=False,
    ),
    Need(
      _largest(config, 'logit_chunk'),
      f'logits over {shape.vocab_size:,} tokens',
      logit_bytes,
      is_certain=False,
    ),
  ]


def check(experiment: Experiment) -> None:
  """Raise InputError if an array needed by every run of the config does not fit in memory."""
  on_host = on_devices = machine.host_memory()
  if jax.default_backend() != 'cpu':
    stats = jax.local_devices()[0].memory_stats() or {}
    on_devices = stats.get('bytes_limit', 0) * jax.device_count()
  for need in needs(experiment):
    capacity = on_host if need.is_on_host else on_devices  # 0 if unknown
    if need.is_certain and capacity and need.size > capacity:
      raise InputError(
        f'{need.setting}: at least {decimal(need.size)} of memory is needed for {need.what}, but '
        f'this machine has only {decimal(capacity)}. Use a smaller value or model, or a larger '
        'machine.'
      )


def largest(experiment: Experiment) -> str:
  """Return a sentence that names the setting behind the largest array."""
  need = max(needs(experiment), key=lambda need: need.size)
  return f'{need.setting} needs the most memory: {decimal(need.size)} for {need.what}.'


def _largest(config: RunConfig, *names: str) -> str:
  """Return the rollout setting that exceeds its default by the largest factor."""
  defaults = {field.name: field.default for field in dataclasses.fields(settings.RolloutConfig)}
  name = max(names, key=lambda name: getattr(config.rollout, name) / defaults[name])
  return f'config.rollout.{name}={getattr(config.rollout, name)}'
