"""Checks before a run starts: flags, config, data files, rewards, agreement between hosts."""

import functools
import hashlib
import json
import os
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from exgrpo_jax.algorithm import advantages, losses, question_rules, replay, trajectory_rules
from exgrpo_jax.data import questions, row_files
from exgrpo_jax.datatypes import QuestionSet, ReplayScores, Trajectory
from exgrpo_jax.environments import pool as environments
from exgrpo_jax.errors import InputError, check_given, counted
from exgrpo_jax.experiment.settings import RunConfig, parse_config, steps_of
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations, environment, hub
from exgrpo_jax.runtime.environment import QUESTIONS
from exgrpo_jax.runtime.workdir import (
  check_hosts,
  check_workdir,
  check_writable,
  has_begun,
  make_folder,
  read_config,
)
from exgrpo_jax.training import prior_experience
from exgrpo_jax.workers import user_code

_TERM, _MASK = (jax.ShapeDtypeStruct((2, 3), dtype) for dtype in (np.float32, np.bool_))
_FLAG = jax.ShapeDtypeStruct((), np.bool_)


def check_command(values: ConfigDict | None, workdir: str | None) -> RunConfig:
  """Check a run's flags and config; return the config. Raises InputError if they are invalid."""
  check_given({'--config': values, '--workdir': workdir}, '--config=smoke --workdir=/tmp/smoke')
  assert values and workdir
  config = parse_config(values)
  check_workdir(values, workdir)
  prior_experience.check(config.experience, workdir)
  # Data files must exist. They are not read yet.
  learnt = (config.warm_start.data,) * bool(config.warm_start.num_updates)
  for spec in (config.data.train, *config.data.evaluated, *learnt):
    base = questions.split_spec(spec)[0]
    if os.path.exists(base) or not hub.parse('dataset', base):  # a Hub name may still lack a split
      questions.check_form(spec)
    if task := row_files.task_file(base):
      row_files.existing(task[0])
    elif base.endswith(row_files.ENDINGS) and '://' not in base:
      for path in questions.spec_files(base)[0]:
        row_files.existing(path)
  metrics.check_wandb(config.metrics.wandb_project)
  pool.check(config.grading, config.verifier)
  if config.environment.name:
    environments.of(config.environment).tools()
  _check_functions(config)
  return config


def _check_functions(config: RunConfig) -> None:
  """Try the functions that a config file may have added to their tables."""
  own, rule = config.objective, config.replay.trajectory_selection
  selection, changes = config.replay.question_selection, config.optimizer
  with user_code.refusing('objective.shaping', own.shaping):
    shaping = losses.SHAPINGS[own.shaping]
    _check_types(lambda logp, ratio: shaping(logp, ratio, own), [_TERM] * 2, _TERM)
  with user_code.refusing('objective.policy_loss', own.policy_loss):
    policy_loss, inputs = losses.POLICY_LOSSES[own.policy_loss], [*[_TERM] * 4, _FLAG]
    _check_types(policy_loss, inputs, (_TERM, _MASK))
  with user_code.refusing('replay.trajectory_selection', rule):
    if cost := trajectory_rules.RULES[rule]:
      logp = np.linspace(-0.5, -1.0, 64, dtype=np.float32)
      returned: Any = cost(ReplayScores(logp, entropy=-logp, weight=-logp, log_ratio=logp))
      if np.ndim(returned) or returned is None or np.isnan(returned):
        raise ValueError(f'it returned {reprlib.repr(returned)}, not a number')
  with user_code.refusing('replay.question_selection', selection):
    if selection in question_rules.BUCKET_RULES:
      _check_numbers(replay.bucket_log_weights(config.replay, 3), (3,))
    elif weigh := question_rules.RULES[selection]:
      stored = [[Trajectory(np.zeros(2, np.int32), -np.ones(2, np.float32), 1.0, step=1)]] * 3
      few = np.broadcast_to([[0, 1, 2], [0.25, 0.5, 0.75], [1, 2, 3]], (3, 3))  # read-only
      _check_numbers(weigh(question_rules.Questions(few[0].astype(int), *few[1:], stored)), (3,))
  with user_code.refusing('objective.baseline', own.baseline):
    if baseline := advantages.BASELINES[own.baseline]:
      reward_QK = np.broadcast_to(np.float32([[0, 1, 0], [1, 1, 1]]), (2, 3))  # read-only
      mean_QK = baseline(reward_QK, np.zeros((2, 3), bool))
      _check_numbers(mean_QK, (2, 3), (2, 1))
  with user_code.refusing('optimizer.schedule', changes.schedule):
    schedule = optimizer.SCHEDULES[changes.schedule](changes.learning_rate, 2)
    rates = np.stack([schedule(update) for update in range(2)])
    _check_numbers(rates, (2,))
    if rates.min() < 0:
      raise ValueError(f'it returned a negative learning rate, {rates.min()}')
  with user_code.refusing('optimizer.name', changes.name):
    gradient = {'kernel': _TERM, 'scale': jax.ShapeDtypeStruct((3,), np.float32)}
    first = functools.partial(_first_update, optimizer.OPTIMIZERS[changes.name](changes))
    _check_types(first, [gradient], gradient)
    update = first({name: jnp.ones(leaf.shape) for name, leaf in gradient.items()})
    if sum(leaf.sum() for leaf in update.values()) < 0:
      raise ValueError(
        'its updates point against the gradient. The sign and the learning rate are applied '
        'afterward, so return a transformation such as optax.scale_by_adam(), not optax.adam(…)'
      )


def _first_update(own: optax.GradientTransformation, gradient: dict[str, jax.Array]) -> Any:
  state = own.init(gradient)
  return own.update(gradient, state, gradient)[0]


def _check_numbers(values: Any, *shapes: tuple[int, ...]) -> None:
  """Raise ValueError unless these are numbers in one of the `shapes`; -inf is a log weight."""
  if np.shape(values) not in shapes or not np.all(np.asarray(values, float) < np.inf):
    wanted = ' or '.join(str(list(shape)) for shape in shapes)
    raise ValueError(f'it returned {reprlib.repr(values)}, not numbers in the shape {wanted}')


def _check_types(function: Any, inputs: Sequence[jax.ShapeDtypeStruct], expected: Any) -> None:
  def described(x: Any) -> str:  # the objective takes floats of any width
    return f'{"float" if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype}{list(x.shape)}'

  returned = jax.eval_shape(function, *inputs)
  returned = tuple(returned) if isinstance(returned, list) else returned
  found, wanted = (jax.tree.map(described, tree) for tree in (returned, expected))
  if found != wanted:
    raise ValueError(f'for inputs of shape [2, 3], it returned {found}, not {wanted}')


def check_start(values: ConfigDict, workdir: str) -> RunConfig:
  """Run `check_command`, check this machine and the other hosts, and create missing folders."""
  config = check_command(values, workdir)
  check_writable(workdir)
  make_folder('config.warm_start.path', config.warm_start.path)
  make_folder('config.data.cache_dir', config.data.cache_dir)
  cache = compilations.folder(config.compilation_cache, workdir)
  make_folder('config.compilation_cache', cache)
  check_hosts(values, workdir)
  return config


def check_rewards(config: RunConfig, data: QuestionSet) -> None:
  """Raise InputError if a reward function cannot use the first training row's columns."""
  # score_answer is the only built-in reward that reads a row.
  if any(':' in spec or spec == 'score_answer' for spec in config.grading.rewards):
    pool.check(config.grading, config.verifier, stages.question_facts(data.questions[0]))


def check_data(config: RunConfig, data: QuestionSet, workdir: str, done: int) -> None:
  """Raise InputError if a run that has taken `done` steps cannot resume with these questions.

  The buffer and the cursor refer to questions by row. With `num_epochs`, the number of questions
  must imply the run's number of steps.
  """
  recorded = read_config(workdir) if has_begun(workdir) else {'num_epochs': 0, 'num_steps': 0}
  epochs, steps = recorded['num_epochs'], recorded['num_steps']
  if epochs:
    steps = steps_of(epochs, len(data.questions), config.rollout.questions)
  known = [start[QUESTIONS] for start in environment.read(workdir) if QUESTIONS in start]
  if steps != recorded['num_steps']:
    why = (
      f'the number of questions has changed since the run last started. With '
      f'{counted(len(data.questions), "question")}, num_epochs={epochs:g} means '
      f'{counted(steps, "step")} instead of {recorded["num_steps"]}.'
    )
  elif done and known and known[-1] != fingerprint(data):
    why = (
      f'the questions or their order have changed since step {done}, so stored responses would be '
      'replayed to other questions.'
    )
  else:
    return
  raise InputError(
    f'config.data.train={config.data.train}: {why} Restore the data, or choose another --workdir, '
    f'with config.experience.path={workdir} to keep the stored successes.'
  )


def fingerprint(data: QuestionSet) -> str:
  """Return a digest of the question count and of up to 1,000 evenly spaced questions."""
  count = len(data.questions)
  rows = sorted({*np.linspace(0, count - 1, 1000).astype(int).tolist()})
  asked = [[(m.role, m.content) for m in each.messages] for each in data.questions.read(rows)]
  return hashlib.sha256(json.dumps([count, asked]).encode()).hexdigest()
