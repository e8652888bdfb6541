"""Checks before a run starts: flags, config, data files, rewards, and agreement between hosts."""

import functools
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from exgrpo_jax.algorithm import advantages, losses, question_rules, replay, trajectory_rules
from exgrpo_jax.config import check_numbers
from exgrpo_jax.data import questions, row_files
from exgrpo_jax.datatypes import QuestionSet, ReplayScores, Trajectory
from exgrpo_jax.environments import pool as environments
from exgrpo_jax.errors import InputError, check_given, counted
from exgrpo_jax.experiment.settings import RunConfig, check_dropping, parse_config, steps_of
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import optimizer, storage
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations, environment, hosts, hub
from exgrpo_jax.runtime.environment import QUESTIONS
from exgrpo_jax.runtime.workdir import (
  check_hosts,
  check_local,
  check_workdir,
  check_writable,
  has_begun,
  make_folder,
  read_config,
)
from exgrpo_jax.training import prior_experience
from exgrpo_jax.workers import user_code

# Tokens for trying out a loss term, in nats.
_LOGP = np.array([[-2, -1, -0.5], [-0.5, -1, -2]], np.float32)
_LOG_RATIO = np.array([[-1, -0.5, 0], [0, 0.5, 1]], np.float32)


def check_command(
  values: ConfigDict | None, workdir: str | None, *, has_device: bool = True
) -> RunConfig:
  """Check a run's flags and config. Returns the config; raises InputError if they are invalid.

  Loss terms from a config file are tried on numbers only if `has_device`.
  """
  check_given({'--config': values, '--workdir': workdir}, '--config=smoke --workdir=/tmp/smoke')
  assert values and workdir
  config = parse_config(values)
  check_workdir(values, workdir)
  check_local(f'config.warm_start.path={config.warm_start.path}')
  check_local(f'config.data.cache_dir={config.data.cache_dir}')
  if not config.data.cache_dir:
    check_local(f'TFDS_DATA_DIR={os.environ.get("TFDS_DATA_DIR", "")}')
  prior_experience.check(config.experience, workdir)
  # Data files must exist. They are not read yet.
  warm_start_specs = (config.warm_start.data,) * bool(config.warm_start.num_updates)
  for spec in (config.data.train, *config.data.evaluated, *warm_start_specs):
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
    environments.shared_pool(config.environment).tools()
  _check_functions(config, has_device)
  return config


def _check_functions(config: RunConfig, has_device: bool) -> None:
  """Try out the functions that a config file may have registered."""
  objective, rule = config.objective, config.replay.trajectory_selection
  selection, optimizer_config = config.replay.question_selection, config.optimizer
  with user_code.refusing('objective.shaping', objective.shaping):
    shaping = losses.SHAPINGS[objective.shaping]
    _try_term(has_device, shaping, (_LOGP, _LOG_RATIO), _LOGP, objective)
  with user_code.refusing('objective.policy_loss', objective.policy_loss):
    policy_loss, ratio = losses.POLICY_LOSSES[objective.policy_loss], np.exp(_LOG_RATIO)
    arguments = _LOGP, ratio, ratio.clip(0.8, 1.2), _LOG_RATIO[::-1], np.bool_(True)
    _try_term(has_device, policy_loss, arguments, (_LOGP, _LOGP > 0))
  with user_code.refusing('replay.trajectory_selection', rule):
    if cost := trajectory_rules.RULES[rule]:
      logp = np.linspace(-0.5, -1.0, 64, dtype=np.float32)
      trajectory = Trajectory(np.zeros(64, np.int32), logp, reward=1.0, step=1)
      value: Any = cost(ReplayScores(trajectory, logp, -logp, shaped=-logp, log_ratio=logp))
      if np.ndim(value) or value is None or np.isnan(value):
        raise ValueError(f'it returned {reprlib.repr(value)}, not a number')
  with user_code.refusing('replay.question_selection', selection):
    _try_question_rule(config.replay, config.rollout.group_size)
  with user_code.refusing('objective.baseline', objective.baseline):
    _try_baseline(config)
  with user_code.refusing('optimizer.schedule', optimizer_config.schedule):
    schedule = optimizer.SCHEDULES[optimizer_config.schedule](optimizer_config.learning_rate, 2)
    jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))  # an update traces it
    rates = np.stack([schedule(update) for update in range(2)])
    check_numbers('optimizer.schedule', optimizer_config.schedule, rates, (2,), lowest=0)
  with user_code.refusing('optimizer.name', optimizer_config.name):
    if optimizer_config.name != 'adamw':  # compiling the trial takes a second
      # Named and stacked like a policy's, because an optimizer may treat parameters differently.
      layers = {'mlp': {'up_DF': jnp.ones((2, 2, 3))}, 'mlp_norm': {'scale': jnp.ones((2, 3))}}
      params = {'embedding_VD': jnp.ones((2, 3)), 'final_norm': {'scale': jnp.ones(3)}}
      params['layers'] = layers
      outputs, template = jax.jit(functools.partial(_first_update, optimizer_config))(params)
      _check_types(outputs, template, exact=True)
      if sum(leaf.sum() for leaf in jax.tree.leaves(outputs[0])) < 0:
        raise ValueError(
          'its updates and the gradient have opposite signs. The sign and the learning rate are '
          'applied afterward, so return a transformation such as optax.scale_by_adam(), not '
          'optax.adam(…)'
        )


def _try_question_rule(config: replay.ReplayConfig, num_rollouts: int) -> None:
  """Try the rule on one question for each correctness value that the buffer can record."""
  key, name = 'replay.question_selection', config.question_selection
  if name in question_rules.BUCKET_RULES:
    weights = replay.bucket_log_weights(config, num_rollouts)
    check_numbers(key, name, weights, (num_rollouts,), lowest=-np.inf)
  elif rule := question_rules.RULES[name]:
    shares = [k / num_rollouts for k in range(num_rollouts + 1 - replay.retires(config))]
    shares = [share for share in shares if replay.is_recorded(config, share)] or [0.5]
    row_N = np.arange(len(shares))
    trajectories = [(Trajectory(np.zeros(2, np.int32), -np.ones(2, np.float32), 1.0, step=1),)]
    with np.errstate(divide='ignore'):
      weights = rule(
        question_rules.Questions(row_N, np.array(shares), row_N + 1.0, trajectories * len(shares))
      )
    check_numbers(key, name, weights, row_N.shape, lowest=-np.inf)


def _try_baseline(config: RunConfig) -> None:
  """Try the baseline on groups with 0 to K successes, including groups with a replayed success."""
  name, size = config.objective.baseline, config.rollout.group_size
  if baseline := advantages.BASELINES[name]:
    reward_QK = np.tri(size + 1, size, -1)[:, ::-1]
    is_replay_QK = np.zeros(reward_QK.shape, bool)
    is_replay_QK[1::2, -1] = config.replay.ratio > 0
    baseline_QK = baseline(reward_QK.copy(), is_replay_QK)
    check_numbers('objective.baseline', name, baseline_QK, reward_QK.shape, (size + 1, 1))
    if (reward_QK - np.asarray(baseline_QK))[[0, -1]].any():
      check_dropping(config)


def _first_update(config: optimizer.OptimizerConfig, params: dict[str, Any]) -> Any:
  """Return (updates, state) from a first update, and a template that has the required types."""
  transformation = optimizer.OPTIMIZERS[config.name](config)
  state = transformation.init(params)
  storage.bit_sums(state)  # fails if a checkpoint cannot contain the state
  updates, new_state = transformation.update(params, state, params)
  return (jax.tree.map(jnp.float32, updates), new_state), (params, state)


def _try_term(
  has_device: bool,
  function: Callable[..., Any],
  arrays: Sequence[Any],
  template: Any,
  *constants: Any,
) -> None:
  """Try a loss term on a few tokens. Raises ValueError for wrong types, NaN or a NaN gradient."""
  _check_types(jax.eval_shape(lambda *arrays: function(*arrays, *constants), *arrays), template)
  if not has_device or getattr(function, '__module__', '') == losses.__name__:
    return  # our own terms have tests

  def total(*arrays: Any) -> jax.Array:
    return jax.tree.leaves(function(*arrays, *constants))[0].sum()

  term, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*arrays)
  for name, values in (('NaN', term), ('a term whose gradient is NaN', jnp.stack(gradients))):
    if jnp.isnan(values).any():
      raise ValueError(f'for importance ratios from 0.37 to 2.7, it returned {name}')


def _check_types(result: Any, template: Any, exact: bool = False) -> None:
  """Raise ValueError if structures, shapes or dtypes differ.

  Different float dtypes are allowed unless `exact` is set.
  """

  def description(x: Any) -> str:
    is_float = not exact and jnp.issubdtype(x.dtype, jnp.floating)
    return f'{"float" if is_float else x.dtype}{list(x.shape)}'

  result = tuple(result) if isinstance(result, list) else result
  result_types, template_types = (jax.tree.map(description, tree) for tree in (result, template))
  if jax.tree.flatten(result_types) != jax.tree.flatten(template_types):
    raise ValueError(
      f'for inputs of shape [2, 3], it returned {result_types}, not {template_types}'
    )


def check_start(values: ConfigDict, workdir: str) -> RunConfig:
  """Run `check_command`, check this machine and the other hosts, and create missing folders."""
  with hosts.refusing_together():  # a file may be missing on one host only
    config = check_command(values, workdir)
    check_writable(workdir)
    make_folder('config.warm_start.path', config.warm_start.path)
    make_folder('config.data.cache_dir', config.data.cache_dir)
    cache = compilations.folder(config.compilation_cache, workdir)
    make_folder('config.compilation_cache', cache)
  check_hosts(values, workdir, environment.versions())
  return config


def check_rewards(config: RunConfig, data: QuestionSet) -> None:
  """Raise InputError if a reward function cannot use the first training row's columns."""
  # score_answer is the only built-in reward that reads a row.
  if any(':' in spec or spec == 'score_answer' for spec in config.grading.rewards):
    pool.check(config.grading, config.verifier, stages.question_facts(data.questions[0]))


def check_data(config: RunConfig, data: QuestionSet, workdir: str, newest_step: int) -> None:
  """Raise InputError if a run cannot resume after `newest_step` with these questions.

  The buffer and the cursor refer to questions by row. With `num_epochs`, the number of questions
  must still result in the recorded number of steps.
  """
  record = read_config(workdir) if has_begun(workdir) else {'num_epochs': 0, 'num_steps': 0}
  epochs, steps = record['num_epochs'], record['num_steps']
  if epochs:
    steps = steps_of(epochs, len(data.questions), config.rollout.questions)
  fingerprints = [start[QUESTIONS] for start in environment.read(workdir) if QUESTIONS in start]
  if steps != record['num_steps']:
    why = (
      f'the number of questions has changed since the run last started. With '
      f'{counted(len(data.questions), "question")}, num_epochs={epochs:g} means '
      f'{counted(steps, "step")} instead of {record["num_steps"]}.'
    )
  elif newest_step and fingerprints and fingerprints[-1] != fingerprint(data):
    why = (
      f'the questions or their order have changed since step {newest_step}, so stored responses '
      'would be replayed for the wrong questions.'
    )
  else:
    return
  raise InputError(
    f'config.data.train={config.data.train}: {why} Restore the data, or choose another --workdir '
    f'and set config.experience.path={workdir} to keep the stored successes.'
  )


def warn_of_overlap(data: QuestionSet, evaluations: Sequence[QuestionSet]) -> None:
  """Warn if an evaluation contains the prompts of training questions.

  A prompt with several answers is ignored, because it does not identify a question: all episodes of
  a game may start with the same prompt.
  """
  if not hosts.is_first():
    return
  evaluation_prompts = {
    prompt.tobytes() for evaluation in evaluations for prompt in evaluation.prompts
  }
  rows = [row for row, prompt in enumerate(data.prompts) if prompt.tobytes() in evaluation_prompts]
  answers: dict[bytes, set[str]] = {}
  for row, question in zip(rows, data.questions.read(rows), strict=True):
    answers.setdefault(data.prompts[row].tobytes(), set()).add(question.answer)
  for evaluation in evaluations:
    count = sum(len(answers.get(prompt.tobytes(), ())) == 1 for prompt in evaluation.prompts)
    if count:
      hosts.warn(
        f'{evaluation.spec}: config.data.train contains {count:,} of its '
        f'{len(evaluation.prompts):,} prompts, so the score partly measures how well the policy '
        'answers training questions. Remove these questions from one of the two sets.'
      )


def fingerprint(data: QuestionSet) -> str:
  """Return a digest of the question count and of up to 1,000 evenly spaced questions."""
  count = len(data.questions)
  rows = sorted({*np.linspace(0, count - 1, 1000).astype(int).tolist()})
  messages = [
    [(m.role, m.content) for m in question.messages] for question in data.questions.read(rows)
  ]
  return hashlib.sha256(json.dumps([count, messages]).encode()).hexdigest()
