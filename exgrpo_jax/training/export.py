"""Export a run's policy to a Hugging Face folder for transformers, vLLM or another run."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import Experiment, RunConfig
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import model
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.replacement import replacing, restored
from exgrpo_jax.runtime.workdir import write_json
from exgrpo_jax.training import model_card

_SCORE = 'evaluation.json'  # in workdir/export/best: step and score of the exported policy


def write(
  experiment: Experiment, params: model.Params, out: epath.PathLike, dtype: str | None = None
) -> str:
  """Write weights, config.json, generation_config.json and the tokenizer's files.

  Keeps all entries of the original checkpoint's config.json. `dtype` defaults to the original
  dtype, or to float32 if there is no original checkpoint. config.json is written last, so a
  folder that contains it is complete. Returns the dtype. Only the first host writes.
  """
  tokenizer, values = experiment.tokenizer, _config_json(experiment.config, experiment.model)
  if hosts.is_first():
    tokenizer.save(out)
    ends = {'eos_token_id': [*tokenizer.eos_ids]}  # transformers stops only at these tokens
    generation = json.loads(tokenizer.files.get('generation_config.json', '{}')) | ends
    (epath.Path(out) / 'generation_config.json').write_text(json.dumps(generation, indent=2))
  weight_dtype = dtype or values.get('dtype') or values.get('torch_dtype') or 'float32'
  weights.save(out, experiment.model, params, values, weight_dtype)
  return weight_dtype


def check(config: RunConfig, shape: model.ShapeConfig) -> None:
  """Raise InputError if an export is configured but no Hugging Face family supports the model."""
  if config.export.best or config.export.last:
    _config_json(config, shape)


def is_possible(experiment: Experiment) -> bool:
  """Return True if a Hugging Face model family supports the experiment's model."""
  try:
    _config_json(experiment.config, experiment.model)
  except InputError:
    return False
  return True


def _config_json(config: RunConfig, shape: model.ShapeConfig) -> dict[str, Any]:
  if path := config.model.path:
    return architecture.extended(architecture.read_json(path), config.model.extension)
  return architecture.to_json(shape, config.rollout.longest_row)


def keep_best(
  experiment: Experiment, params: model.Params, step: int, scores: Mapping[str, float]
) -> None:
  """Export the policy to workdir/export/best if it beats the policy stored there.

  `scores` contains the step's evaluation metrics. Policies are compared by 'validation/score'.
  """
  score = scores['validation/score']
  folder = os.path.join(experiment.workdir, 'export', 'best')
  best_score = float('-inf')
  if hosts.is_first() and (score_file := restored(os.path.realpath(folder)) / _SCORE).exists():
    best_score = json.loads(score_file.read_text())['score']
  if hosts.broadcast_from_first(best_score) >= score:
    return
  with completed(folder) as temporary_folder:
    write(experiment, params, temporary_folder)
    model_card.write(temporary_folder, experiment, step, scores)
    write_json(os.path.join(temporary_folder, _SCORE), {'step': step, 'score': score})


def keep_last(experiment: Experiment, params: model.Params, step: int) -> None:
  """Export the policy to workdir/export/last, replacing any earlier export."""
  with completed(os.path.join(experiment.workdir, 'export', 'last')) as temporary_folder:
    write(experiment, params, temporary_folder)
    model_card.write(temporary_folder, experiment, step)


@contextlib.contextmanager
def completed(folder: epath.PathLike) -> Iterator[str]:
  """Yield a temporary folder that replaces `folder` at the end of the block.

  If the block fails or the process is killed, the old folder stays unchanged. A folder that cannot
  be renamed, such as one in a bucket, is written in place, with config.json (or
  adapter_config.json) last.
  """
  name = os.fspath(folder)
  if '://' in name or os.path.ismount(name) or os.path.realpath(name) == os.getcwd():
    yield name
    return
  context = replacing(os.path.realpath(name)) if hosts.is_first() else contextlib.nullcontext(name)
  with context as temporary_folder:
    yield os.fspath(temporary_folder)
