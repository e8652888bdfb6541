"""The door through which every command enters: ConfigDict -> Settings -> Experiment.

Here alone a ConfigDict is read. `settings` turns it into frozen Configs or refuses;
`open_experiment` adds what they describe: tokenizer, mesh, model shape.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import config
from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.config import setting
from exgrpo_jax.data import prompt, questions, tokenizer
from exgrpo_jax.datatypes import Question
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.learner import checkpoint, gradients, optimizer
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations, hosts

CONFIG = config_flags.DEFINE_config_file('config', None, 'The experiment, e.g. configs/smoke.py.')
# Of those that make one, train and sweep.
WORKDIR = flags.DEFINE_string('workdir', None, 'Everything the run writes; resumed if it exists.')
# Of the commands that read a run.
CHECKPOINT = flags.DEFINE_string('checkpoint', None, "A run's workdir.")
STEP = flags.DEFINE_integer('step', None, 'Which checkpoint of it; the newest by default.')
OUT = flags.DEFINE_string('out', None, 'Where the command writes.')

TOKENIZER_TEXTS = 20_000  # questions whose text trains a tokenizer, at most


@dataclasses.dataclass(frozen=True)
class ModelConfig(model.Config):
  """The policy: a checkpoint's weights, or random ones of the shape given here."""

  path: str = setting(
    None,
    "a Hugging Face checkpoint's folder, whose weights, shape and "
    "tokenizer are taken; '' is a model from scratch",
  )
  repository: str = setting(
    None, "what must be at `path`: its shape is compared with the one given here; '' allows any"
  )
  extension: architecture.Extension


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  num_updates: int = setting('[0, inf)', 'supervised updates before reinforcement learning')
  data: str = setting(None, 'the questions whose written solutions are learnt')
  batch_size: int = setting('[1, inf)', 'solutions in an update')
  learning_rate: float = setting('[0, inf)', 'peak of a rate that warms up, then falls to 0')
  enough: float = setting(
    '(0, 1]',
    'it ends early once this share of CHECK_ROWS responses to '
    'config.data.train is right; 1 trains to the end',
  )
  path: str = setting(None, "where the result is kept and looked for; '' is the run's workdir")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  every: int = setting('[1, inf)', 'steps between evaluations; the first and last always have one')
  samples: int = setting('[1, inf)', 'responses to each question (k of avg@k)')
  temperature: float = setting('[0, inf)', 'of sampling; 0 is greedy')
  top_k: int = setting('[0, inf)', 'only the k most probable tokens; 0 is all')
  top_p: float = setting('(0, 1]', 'only the most probable tokens that together have this share')
  min_p: float = setting(
    '[0, 1]', "only tokens of at least this share of the most probable one's probability"
  )


@dataclasses.dataclass(frozen=True)
class ExportConfig:
  """What training leaves as Hugging Face folders."""

  best: bool = setting(
    None,
    'workdir/export/best: of the evaluations from the first step on, the '
    'one with the highest mean over the data sources',
  )
  last: bool = setting(None, 'workdir/export/last: the policy after the last step')


@dataclasses.dataclass(frozen=True)
class Settings:
  """A whole configuration, checked. Field names are the ConfigDict's."""

  seed: int = setting('[0, inf)', 'the run repeats bit for bit with the same seed')
  num_steps: int = setting('[0, inf)', 'steps of reinforcement learning')
  compilation_cache: str = setting(
    None, "a folder that keeps compiled programs for the next start; '' is JAX's own setting"
  )
  rollout: stages.Config
  replay: replay.Config
  objective: objective.Config
  optimizer: optimizer.Config
  gradient: gradients.Config
  model: ModelConfig
  mesh: sharding.Config
  prompt: prompt.Config
  tokenizer: tokenizer.Config
  data: questions.Config
  verifier: verifier.Config
  grading: pool.Config
  warm_start: WarmStartConfig
  evaluation: EvaluationConfig
  parity: stages.ParityConfig
  checkpoint: checkpoint.Config
  export: ExportConfig
  metrics: metrics.Config


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Settings and what they describe; never changes during a run."""

  settings: Settings
  workdir: str
  tokenizer: tokenizer.Tokenizer
  mesh: jax.sharding.Mesh
  model: model.Config  # the checkpoint's, or with the tokenizer's vocabulary size where none is set


def run_command(
  main: Callable[..., None], choices: Sequence[str] = (), on_all_hosts: bool = False
) -> None:
  """Runs a command's `main`; what the user got wrong becomes one line and exit status 2.

  Where there are `choices`, `main` gets the one that stands behind the command. With
  `on_all_hosts` it is run as one of the hosts that work together, where there are several.
  """

  def guarded(argv):
    logging.set_verbosity(logging.ERROR)  # orbax and TFDS tell their lives below it
    words = argv[1:]
    try:
      if choices and (len(words) != 1 or words[0] not in choices):
        raise InputError(f'behind the command must stand one of: {", ".join(choices)}.')
      if words and not choices:
        raise InputError(f"'{words[0]}' is no flag; flags begin with --.")
      with hosts.joined() if on_all_hosts else contextlib.nullcontext():
        main(*words)
    except InputError as error:
      _refuse(error)

  app.run(guarded, flags_parser=_parse_flags)


def settings(values: ConfigDict) -> Settings:
  """Frozen, checked settings; InputError names the first key that cannot be."""
  checked = config.build(Settings, values, 'config')
  num_questions, minibatches = checked.rollout.questions, checked.optimizer.minibatches
  if num_questions % minibatches:
    raise InputError(
      f'config.optimizer.minibatches={minibatches} must divide '
      f'config.rollout.questions={num_questions}: a minibatch is made of whole '
      'groups, as many in each.'
    )
  if checked.export.best and not checked.data.evaluation:
    raise InputError(
      'config.export.best=True needs config.data.evaluation: the best policy is the '
      'one that evaluates best.'
    )
  if checked.gradient.drop_zero_advantage:
    for name in ('entropy_bonus', 'kl_coefficient'):
      value = getattr(checked.objective, name)
      if value:
        raise InputError(
          f'config.gradient.drop_zero_advantage=True needs config.objective.{name}'
          f'=0, not {value}: that term pulls at rows of advantage 0 too.'
        )
  return checked


def open_experiment(values: ConfigDict, workdir: str) -> Experiment:
  """What a command needs; the tokenizer comes from a file, the workdir, or is trained."""
  checked = settings(values)
  if checked.model.repository and not checked.model.path:
    name = checked.model.repository
    raise InputError(
      f'config.model.path is not set, and this config starts from {name}. Fetch it with '
      f"'pip install huggingface_hub' and 'hf download {name} --local-dir "
      f"{name.split('/')[-1]}' (after 'hf auth login' where its licence asks for it), and give "
      f'--config.model.path={name.split("/")[-1]}.'
    )
  shape = model_shape(checked)
  with hosts.first_host_first('tokenizer'):  # it may make one, which the others then read
    words = _tokenizer(checked, workdir)
  vocab_size = shape.vocab_size or words.vocab_size
  if vocab_size < words.vocab_size:
    raise InputError(
      f"config.model.vocab_size={vocab_size} must be at least the tokenizer's "
      f'{words.vocab_size}: every token needs an embedding. 0 takes the '
      "tokenizer's."
    )
  compilations.keep(checked.compilation_cache)
  mesh = sharding.make_mesh(checked.mesh)
  jax.set_mesh(mesh)  # what sharding.constrain refers to, from here on
  shape = dataclasses.replace(shape, vocab_size=vocab_size)
  model.check_mesh(shape, mesh)
  return Experiment(checked, workdir, words, mesh, shape)


@functools.lru_cache(maxsize=16)
def load_questions(
  experiment: Experiment, spec: str
) -> tuple[tuple[Question, ...], tuple[np.ndarray, ...]]:
  """The questions of a data spec and their prompts as int32 token arrays; read once.

  Prompts over `step.max_prompt` are refused or left out, as `data.overlong` says.
  """
  checked, words = experiment.settings, experiment.tokenizer
  with hosts.first_host_first('load_questions'):  # what is prepared may lie in a shared folder
    loaded = list(questions.load(checked.data, spec))
  prompts = [
    np.array(words.encode(words.render(question.messages, checked.prompt.template)), np.int32)
    for question in loaded
  ]
  kept = questions.check_prompts(
    spec,
    np.array([len(prompt) for prompt in prompts]),
    checked.rollout.max_prompt,
    checked.data.overlong,
  )
  # Rows are numbered anew: the stream and the buffer find questions by place.
  rows = [dataclasses.replace(loaded[row], row=place) for place, row in enumerate(kept)]
  prompts = [prompts[row] for row in kept]
  hosts.check_same(
    spec,
    'the questions',
    lambda: repr(rows).encode() + b''.join(prompt.tobytes() for prompt in prompts),
  )
  return tuple(rows), tuple(prompts)


def model_shape(checked: Settings) -> model.Config:
  """The checkpoint's where there is one, else what the config says."""
  config = checked.model
  given = model.Config(
    **{field.name: getattr(config, field.name) for field in dataclasses.fields(model.Config)}
  )
  if not config.path:
    return given
  place, values = os.path.join(config.path, 'config.json'), architecture.read_json(config.path)
  found = architecture.parse(values, place, config.dtype)
  if config.repository and found != given:
    name = next(name for name, value in vars(given).items() if value != getattr(found, name))
    raise InputError(
      f'{place}: {name} is {getattr(found, name)}, where config.model.{name} of '
      f'{config.repository} is {getattr(given, name)}; name its folder, or set '
      "config.model.repository='' to train another."
    )
  values = architecture.extended(values, config.extension)
  longest = checked.rollout.max_prompt + checked.rollout.max_response
  limit = values.get('max_position_embeddings', longest)
  if longest > limit:
    raise InputError(
      f'config.rollout.max_prompt + config.rollout.max_response = {longest} tokens '
      f'exceed max_position_embeddings={limit} of {place}; lower them, or give '
      'config.model.extension a longer context.'
    )
  return architecture.parse(values, place, config.dtype)


def _tokenizer(checked: Settings, workdir: str) -> tokenizer.Tokenizer:
  if checked.tokenizer.path or checked.model.path:
    return tokenizer.load(checked.tokenizer.path or checked.model.path)
  path = os.path.join(workdir, 'tokenizer.model')
  # Without a config.json it is what a refused start left, perhaps of other texts.
  stands = os.path.exists(path) and os.path.exists(os.path.join(workdir, 'config.json'))
  if hosts.is_first() and not stands:
    specs = dict.fromkeys([checked.warm_start.data, checked.data.train])
    texts = (
      text
      for spec in specs
      for question in itertools.islice(questions.load(checked.data, spec), TOKENIZER_TEXTS)
      for text in (prompt.render(question.messages, checked.prompt.template), question.solution)
    )
    tokenizer.train(texts, checked.tokenizer.vocab_size, path)
  return tokenizer.load(path)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError):  # an override of a name that the config does not have
    try:
      _check_overrides([arg.lstrip('-') for arg in argv])
    except InputError as error:
      _refuse(error)
    raise


def _check_overrides(words: list[str]) -> None:
  """Names the override that the config file does not have; dashes are stripped."""
  paths = [word.partition('=')[2] for word in words if word.startswith('config=')]
  paths += [after for word, after in zip(words, words[1:]) if word == 'config']
  for path in paths:
    values = runpy.run_path(path)['get_config']()
    for word in words:
      if word.startswith('config.'):
        _check_override(values, word.partition('=')[0].split('.'))


def _check_override(values: Any, names: list[str]) -> None:
  for depth, name in enumerate(names[1:], start=1):
    config.check_known(name, list(values), '.'.join(names[:depth]))
    values = values[name]


def _refuse(error: InputError) -> None:
  print(f'error: {error}', file=sys.stderr, flush=True)
  sys.exit(2)
