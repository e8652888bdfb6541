"""A run's policy as a Hugging Face directory, for transformers, vLLM, or another run.

python -m exgrpo_jax.weights --checkpoint=/tmp/run --out=/tmp/policy
"""

import json
import os
import shutil

from absl import flags
from etils import epath
from ml_collections import ConfigDict

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import (
  CHECKPOINT,
  OUT,
  STEP,
  Experiment,
  open_experiment,
  run_command,
)
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import read_config, write_json

_SCORE = 'evaluation.json'  # of workdir/export/best: which step it is of, and how good
_DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  ['float32', 'bfloat16', 'float16'],
  "Of the weights; the original checkpoint's by default.",
)


def main() -> None:
  """Exports a checkpoint of a run."""
  if not CHECKPOINT.value or not OUT.value:
    raise InputError(
      "--checkpoint and --out are both needed: a run's workdir, and the folder to write."
    )
  out = epath.Path(OUT.value).expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise InputError(
      f'--out={OUT.value} is not empty; name a new folder, so that no file of '
      'another model stays in it.'
    )
  values = ConfigDict(read_config(CHECKPOINT.value))
  values.mesh.update(dict(data=1, fsdp=-1, tensor=1))  # this machine's devices, not the run's
  experiment = open_experiment(values, CHECKPOINT.value)
  like = model.shapes(experiment.model, experiment.mesh)
  params, step = checkpoint.restore_params(CHECKPOINT.value, STEP.value, like)
  write(experiment, params, out, _DTYPE.value)
  print(f'{out}: the policy after step {step}')


def write(experiment: Experiment, params, out: epath.PathLike, dtype: str | None = None) -> None:
  """Writes weights, config.json, generation_config.json and the tokenizer's files.

  What a checkpoint of Hugging Face brought in config.json is kept; `dtype` is its own
  unless one is given, or float32 for a model from scratch. config.json comes last: a
  folder that has it is whole.
  """
  settings, words = experiment.settings, experiment.tokenizer
  if settings.model.path:
    values = architecture.extended(
      architecture.read_json(settings.model.path), settings.model.extension
    )
  else:
    longest = settings.rollout.max_prompt + settings.rollout.max_response
    values = architecture.to_json(experiment.model, longest)
  if hosts.is_first():
    words.save(out)
    if 'generation_config.json' not in words.files:
      (epath.Path(out) / 'generation_config.json').write_text(
        json.dumps({'eos_token_id': list(words.eos_ids)})
      )
  weights.save(
    out,
    experiment.model,
    params,
    values,
    dtype or values.get('dtype') or values.get('torch_dtype') or 'float32',
  )


def keep_best(experiment: Experiment, params, step: int, score: float) -> None:
  """Exports to workdir/export/best if `score` is above that of what is there."""
  folder = os.path.join(experiment.workdir, 'export', 'best')
  if hosts.broadcast_from_first(_score(folder)) >= score:
    return
  unfinished = folder + '.new'
  _remove(unfinished)  # of a run that was killed here
  write(experiment, params, unfinished)
  write_json(os.path.join(unfinished, _SCORE), {'step': step, 'score': score})
  _remove(folder)
  if hosts.is_first():
    os.replace(unfinished, folder)


def keep_last(experiment: Experiment, params) -> None:
  """Exports to workdir/export/last, in place of what is there."""
  folder = os.path.join(experiment.workdir, 'export', 'last')
  _remove(folder)
  write(experiment, params, folder)


def _score(folder):
  try:
    with open(os.path.join(folder, _SCORE)) as file:
      return json.load(file)['score']
  except FileNotFoundError:
    return float('-inf')


def _remove(folder):
  if hosts.is_first():
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  run_command(main, on_all_hosts=True)
