"""An experiment: a checked config with its tokenizer, meshes and model shape.

This module also loads the experiment's weights and questions, and builds its update spec.
"""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterable

import jax
import numpy as np
from ml_collections import ConfigDict

from exgrpo_jax.data import prompt, questions, tokenizer
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.environments import pool
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.settings import RunConfig, parse_config
from exgrpo_jax.huggingface import architecture, hub_checkpoint, weights
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import lora, model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.policy.shape import check_meshes
from exgrpo_jax.runtime import activity, compilations, hosts, hub, machine
from exgrpo_jax.runtime.workdir import read_config, stored_dtype

TOKENIZER_TEXTS = 20_000  # maximum number of questions whose text trains a tokenizer
# A file in a warm start's folder: the settings that determined its result. Written last.
ORIGIN = 'origin.json'


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A config and the objects built from it, constant during a run."""

  config: RunConfig
  workdir: str
  tokenizer: Tokenizer
  meshes: sharding.Meshes
  # From the checkpoint or the config. The vocabulary size defaults to the tokenizer's size.
  model: model.ShapeConfig
  model_name: str  # the checkpoint: config.model.path as the user wrote it; '' if none


def model_name(config: RunConfig) -> str:
  """Return the folder or Hub name of the checkpoint that the run starts from, or '' if none."""
  return config.model.path or config.model.repository


def with_folders(config: RunConfig, model: str) -> RunConfig:
  """Replace Hub names of the model and the tokenizer in the config with local folders.

  Fetches config and tokenizer files, but no weights. All hosts must call this. `model` is the
  model's name or folder, or ''. Raises InputError if a name cannot be fetched.
  """
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, path=hub_checkpoint.folder(model, 'config.model.path')),
    tokenizer=dataclasses.replace(
      config.tokenizer, path=hub_checkpoint.folder(config.tokenizer.path, 'config.tokenizer.path')
    ),
  )


def with_dtype(config: RunConfig, workdir: str = '', platform: str = '') -> RunConfig:
  """Resolve a `model.dtype` of 'auto' in the config. All hosts must call this.

  The run in `workdir` keeps its dtype. A new run that reuses a warm start takes the warm start's
  dtype. Otherwise, the dtype depends on the `platform` that the model will run on ('' means JAX's
  default backend).
  """
  if config.model.dtype != 'auto':
    return config
  dtype = _recorded_dtype(config, workdir)
  if dtype == 'auto':
    is_slow = (platform or jax.default_backend()) == 'cpu' and not machine.has_fast_bfloat16()
    dtype = 'float32' if is_slow else 'bfloat16'
  model = dataclasses.replace(config.model, dtype=hosts.broadcast_from_first(dtype))
  return dataclasses.replace(config, model=model)


def _recorded_dtype(config: RunConfig, workdir: str) -> str:
  """Return the dtype recorded by the run in `workdir` or by a reused warm start; else 'auto'."""
  is_run = bool(workdir) and os.path.exists(os.path.join(workdir, 'config.json'))
  dtype = stored_dtype(read_config(workdir)) if is_run else 'auto'
  if dtype == 'auto' and config.warm_start.num_updates and (is_run or config.warm_start.path):
    origin = pathlib.Path(warm_start_folder(config, workdir), ORIGIN)
    return stored_dtype(json.loads(origin.read_text())) if origin.exists() else 'auto'
  return dtype


def warm_start_folder(config: RunConfig, workdir: str) -> str:
  """Return the folder for the warm start's result."""
  return os.path.expanduser(config.warm_start.path) or os.path.join(workdir, 'warm_start')


def open_experiment(values: ConfigDict, workdir: str) -> Experiment:
  """Check a config and open its experiment. Loads the tokenizer, or trains one in the workdir.

  If there is a run in `workdir`, Hub names resolve to the commits that the run used, and a dtype of
  'auto' resolves to the run's dtype.

  Run model code inside `with jax.set_mesh(experiment.meshes.training)`; `SlotEngine.generate`
  enters the decoding mesh itself.
  """
  hub.recall(workdir)
  config = parse_config(values)
  name = model_name(config)
  config = with_folders(with_dtype(config, workdir), name)
  shape = model_config(config)
  if not config.tokenizer.path and not config.model.path:  # a tokenizer will be trained
    questions.settle(config.data, _tokenizer_data(config))
  with hosts.first_host_first('tokenizer'):  # the first host may train it for the others
    text_tokenizer = _open_tokenizer(config, workdir)
  vocab_size = shape.vocab_size or text_tokenizer.vocab_size
  if vocab_size < text_tokenizer.vocab_size and not config.model.path:
    raise InputError(
      f'config.model.vocab_size={vocab_size}: the tokenizer has {text_tokenizer.vocab_size} '
      'tokens, and every token needs an embedding. Increase the value, or set it to 0 to use the '
      "tokenizer's size."
    )
  compilations.keep(compilations.folder(config.compilation_cache, workdir))
  meshes = sharding.make_meshes(config.mesh)
  shape = dataclasses.replace(shape, vocab_size=vocab_size)
  check_meshes(shape, meshes)
  check_model(config, shape)
  return Experiment(
    config=config,
    workdir=workdir,
    tokenizer=text_tokenizer,
    meshes=meshes,
    model=shape,
    model_name=name,
  )


def check_model(config: RunConfig, shape: model.ShapeConfig) -> None:
  """Raise InputError if the model lacks the experts or sizes that a setting needs."""
  settings = {
    'objective.balance_coefficient': config.objective.balance_coefficient,
    'rollout.router_replay': config.rollout.router_replay,
  }
  for name, value in settings.items():
    if value and not shape.num_experts:
      raise InputError(
        f'config.{name}={value}: this setting needs a model with experts, but '
        'config.model.num_experts=0. Choose another model, or reset this setting to its default.'
      )
  lora.shapes(config.lora, model.shapes(shape, sharding.WITHOUT_DEVICES))  # checks the rank


def model_config(config: RunConfig) -> model.ShapeConfig:
  """Return the model's shape, from the checkpoint if there is one, otherwise from the config.

  The config's dtype must not be 'auto'; see `with_dtype`.
  """
  settings = config.model
  config_shape = model.ShapeConfig(
    **{field.name: getattr(settings, field.name) for field in dataclasses.fields(model.ShapeConfig)}
  )
  if not settings.path:
    return config_shape
  file, values = os.path.join(settings.path, 'config.json'), architecture.read_json(settings.path)
  checkpoint_shape = architecture.parse(values, file, settings.dtype)
  if settings.repository and checkpoint_shape != config_shape:
    name = next(
      name for name, value in vars(config_shape).items() if value != getattr(checkpoint_shape, name)
    )
    raise InputError(
      f'{file}: {name} is {getattr(checkpoint_shape, name)}, but config.model.{name} is '
      f'{getattr(config_shape, name)} for {settings.repository}. Set config.model.path to the '
      "folder of that model, or set config.model.repository='' to train a different model."
    )
  values = architecture.extended(values, settings.extension)
  longest = config.rollout.longest_row
  limit = values.get('max_position_embeddings', longest)
  if longest > limit:
    raise InputError(
      f'config.rollout.max_prompt + config.rollout.max_response = {longest} tokens '
      f'exceeds max_position_embeddings={limit} in {file}. Lower one of these settings, or extend '
      'the context with config.model.extension.'
    )
  return architecture.parse(values, file, settings.dtype)


def load_weights(experiment: Experiment, frozen: bool = False) -> model.Params:
  """Load the weights of the checkpoint that the run starts from. May fetch them from the Hub.

  For `frozen`, see `weights.load`.
  """
  name = experiment.model_name
  folder = hub_checkpoint.folder(name, 'config.model.path', weights=True)
  with activity.doing(f'reading the weights of {name}'):
    params = weights.load(folder, experiment.model, experiment.meshes.training, frozen=frozen)
    return jax.block_until_ready(params)


def load_questions(experiment: Experiment, spec: str) -> QuestionSet:
  """Load the questions of a data spec, with their prompts.

  `data.on_overlong` determines whether prompts that are too long are dropped or cause an error.
  """
  config, tokenizer = experiment.config, experiment.tokenizer
  max_prompt = config.rollout.max_prompt
  data = questions.load_set(config.data, spec, tokenizer, config.prompt, max_prompt)
  if config.environment.name:
    environments, overlong = pool.shared_pool(config.environment), config.data.on_overlong
    data = pool.with_prompts(data, environments, tokenizer, config.prompt, max_prompt, overlong)
    hosts.check_same(spec, "the environment's prompts", lambda: b''.join(map(bytes, data.prompts)))
  check_embedded(experiment, data.prompts, f'{spec}: a prompt')
  return data


def check_embedded(experiment: Experiment, rows: Iterable[np.ndarray], text: str) -> None:
  """Raise InputError if a token in a row has no embedding; `text` describes the row in the message.

  A checkpoint's tokenizer may have more tokens than its model. Example: Gemma 3 1B's image token.
  """
  vocab_size, tokenizer = experiment.model.vocab_size, experiment.tokenizer
  if vocab_size >= tokenizer.vocab_size:
    return
  for token_T in rows:
    if missing := [int(token) for token in token_T if token >= vocab_size]:
      raise InputError(
        f'{text} contains {tokenizer.decode(missing[:1], special=True)!r}, which is token '
        f'{missing[0]}, but {experiment.model_name} has only {vocab_size} embeddings. Remove the '
        'token from the text, or choose a model that has an embedding for it.'
      )


def with_counted_length(config: RunConfig) -> RunConfig:
  """Return the config with `num_steps` filled in, for commands that do not otherwise load data.

  With num_epochs, reads the training questions and prints the number of steps, which is an upper
  bound if `data.on_overlong` drops questions. Raises InputError if the data cannot be read.
  """
  if not config.num_epochs:
    return config
  spec = config.data.train
  questions.settle(config.data, spec)
  count = len(questions.load(config.data, spec))
  config = config.with_length(count)
  bound = ', fewer if long prompts are dropped' if config.data.on_overlong == 'drop' else ''
  print(f'{config.length}{bound}: {counted(count, "question")} from {spec}', flush=True)
  return config


def load_evaluations(experiment: Experiment) -> tuple[QuestionSet, ...]:
  """Load the questions of config.data.validation, then config.data.evaluation.

  Raises InputError if config.export.best_without leaves no questions to compare policies on, and
  warns about names in it that are not sources.
  """
  config = experiment.config
  data, excluded_sources = config.data, config.export.best_without
  question_sets = tuple(load_questions(experiment, spec) for spec in data.evaluated)
  if not (config.export.best or config.evaluation.patience):
    return question_sets
  validation = question_sets[: len(data.validation)]
  sources = sorted({row.source for question_set in validation for row in question_set.questions})
  if unknown := [name for name in excluded_sources if name not in sources]:
    hosts.warn(
      f'config.export.best_without={excluded_sources}: no question in config.data.validation='
      f'{data.validation} has the source {" or ".join(unknown)}. Choose from {", ".join(sources)}.'
    )
  if set(sources) <= set(excluded_sources):
    raise InputError(
      f'config.export.best_without={excluded_sources}: this setting leaves out every source of '
      f'config.data.validation={data.validation}. Keep at least one source, so that the policies '
      'can be compared.'
    )
  return question_sets


def update_spec(
  config: RunConfig, shape: model.ShapeConfig, mesh: jax.sharding.Mesh
) -> gradients.UpdateSpec:
  """Return the static settings of a run's updates."""
  return gradients.UpdateSpec(
    microbatch=config.microbatch,
    objective=config.objective,
    optimizer=config.optimizer,
    model=shape,
    lora=config.lora,
    mesh=mesh,
    num_updates=config.num_updates,
    temperature=config.rollout.temperature,
    longest_row=config.rollout.longest_row,
    max_response=config.rollout.max_response,
    logit_chunk=config.rollout.logit_chunk,
  )


def param_shapes(experiment: Experiment) -> Params:
  """Return the shapes and shardings of a run's trained parameters, without allocating anything."""
  config = experiment.config
  return gradients.trained_shapes(update_spec(config, experiment.model, experiment.meshes.training))


def state_shapes(experiment: Experiment) -> optimizer.TrainState:
  """Return the shapes and shardings of a run's train state, without allocating anything."""
  config = experiment.config
  return optimizer.shapes(config.optimizer, config.num_updates, param_shapes(experiment))


def _open_tokenizer(config: RunConfig, workdir: str) -> Tokenizer:
  if config.tokenizer.path or config.model.path:
    return tokenizer.load(config.tokenizer.path or config.model.path)
  path = os.path.join(workdir, 'tokenizer.model')
  # Without config.json, this is a rejected start's tokenizer, perhaps trained on other texts.
  is_valid = os.path.exists(path) and os.path.exists(os.path.join(workdir, 'config.json'))
  if hosts.is_first() and not is_valid:
    data = questions.load(config.data, _tokenizer_data(config))
    texts = (
      text
      for question in itertools.islice(data, TOKENIZER_TEXTS)
      for text in (prompt.render(question.messages, config.prompt), question.solution)
    )
    tokenizer.train(texts, config.tokenizer.vocab_size, path)
  return tokenizer.load(path)


def _tokenizer_data(config: RunConfig) -> str:
  """Return the spec of the data that the tokenizer is trained on.

  With a warm start, the tokenizer does not depend on config.data.train, so that runs with different
  training data can share the warm start.
  """
  return config.warm_start.data if config.warm_start.num_updates else config.data.train
