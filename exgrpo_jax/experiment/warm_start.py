"""The initial policy of a run: a checkpoint or random weights, then an optional warm start.

The warm start trains on worked solutions, so that reinforcement learning has something to reward.
Its result is stored in a separate folder, where other runs can reuse it. With `num_steps=0`, a run
is plain supervised fine-tuning.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.data.tokenizer import observed_tokens, response_tokens
from exgrpo_jax.datatypes import Question, QuestionSet, Turn, own_tokens
from exgrpo_jax.environments import pool
from exgrpo_jax.environments.environment import Observation, as_messages
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import (
  ORIGIN,
  Experiment,
  check_embedded,
  load_questions,
  load_weights,
  param_shapes,
  warm_start_folder,
)
from exgrpo_jax.experiment.generation import make_sampler
from exgrpo_jax.experiment.settings import RunConfig
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.learner import checkpoint, optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.packing import length_bucket, right_padded
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.sharding import jit_for_training
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.rollout.scoring import score_tokens
from exgrpo_jax.runtime import activity, hosts, randomness, workdir
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import as_current, differences, write_json

# ---- Solutions to imitate ----

SOLUTIONS_PER_LOAD = 1000


@dataclasses.dataclass(frozen=True)
class Solution:
  """A training row: a prompt and its worked solution or episode."""

  prompt: np.ndarray  # [T] int32
  tokens: np.ndarray  # [T] int32, after the prompt
  turns: tuple[Turn, ...] = ()  # for an episode; the loss covers only the policy's tokens

  def __len__(self) -> int:
    return len(self.prompt) + len(self.tokens)


def load_solutions(experiment: Experiment) -> list[Solution]:
  """Load the rows to learn from. Raises InputError if a solution is missing or too long."""
  config = experiment.config
  spec, limit = config.warm_start.data, config.rollout.max_response
  data = load_questions(experiment, spec)
  rows = []
  for start in range(0, len(data.questions), SOLUTIONS_PER_LOAD):
    part = slice(start, start + SOLUTIONS_PER_LOAD)
    questions, prompts = data.questions[part], data.prompts[part]
    is_played = bool(config.environment.name)
    solutions = (
      _episodes(experiment, questions)
      if is_played
      else _worked_solutions(experiment, questions, prompts)
    )
    for question, prompt_T, (tokens, turns) in zip(questions, prompts, solutions):
      check_embedded(experiment, [tokens], f'{spec}: the solution in row {question.row}')
      if len(tokens) <= limit:
        rows.append(Solution(prompt_T, tokens, turns))
      elif config.data.on_overlong == 'refuse':
        raise InputError(
          f'{spec}: the solution in row {question.row} is {len(tokens)} tokens long, '
          f'more than config.rollout.max_response={limit}. Raise the limit, or set '
          "config.data.on_overlong='drop'."
        )
  if not rows:
    raise InputError(
      f'{spec}: no solution fits within config.rollout.max_response={limit}. Raise the limit.'
    )
  hosts.check_same(spec, 'the solutions', lambda: b''.join(bytes(row.tokens) for row in rows))
  return rows


def padded(rows: Sequence[Solution], longest: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """Pad the rows with `right_padded`. The mask is 1 for tokens that contribute to the loss."""
  tokens_BT, mask_BT = right_padded([(row.prompt, row.tokens) for row in rows], longest, pad_id)
  masks = [own_tokens(row.turns, len(row.tokens)) for row in rows]
  mask_BT[mask_BT > 0] = np.concatenate(masks)
  return tokens_BT, mask_BT


_Solutions = Iterator[tuple[np.ndarray, tuple[Turn, ...]]]  # tokens and turns of each question


def _worked_solutions(
  experiment: Experiment, questions: Sequence[Question], prompts: Sequence[np.ndarray]
) -> _Solutions:
  """Tokenize the data's worked solutions, and append an end token to each."""
  spec, solutions = experiment.config.warm_start.data, [question.solution for question in questions]
  responses = response_tokens(experiment.tokenizer, prompts, solutions)
  for question, tokens in zip(questions, responses):
    if not question.solution:
      raise InputError(
        f'{spec}: row {question.row} has no worked solution to learn from. '
        'Set config.data.solution_field, or config.warm_start.num_updates=0.'
      )
    yield tokens, ()


def _episodes(experiment: Experiment, questions: Sequence[Question]) -> _Solutions:
  """Yield the environment's scripted episodes, tokenized as in a rollout."""
  config = experiment.config
  environments = pool.shared_pool(config.environment)
  seeds = [
    int(randomness.generator(config.warm_start_seed, Purpose.DEMONSTRATION, q.row).integers(2**63))
    for q in questions
  ]
  try:
    episodes = environments.demonstrations(questions, seeds, config.environment.max_turns)
  except InputError as error:
    raise InputError(
      f"{error}. A warm start trains on episodes from the environment's demonstrate(rng) method. "
      'Define this method, or set config.warm_start.num_updates=0.'
    ) from error
  limit = config.environment.max_turn_tokens
  for question, episode in zip(questions, episodes):
    tokens, turns = _tokens(experiment, episode)
    longest = max(turn.written for turn in turns)
    if limit and longest > limit:
      raise InputError(
        f'config.environment.max_turn_tokens={limit}: a turn in the demonstration for row '
        f'{question.row} is {longest} tokens long. Raise the limit, or shorten the turns.'
      )
    yield tokens, turns


def _tokens(
  experiment: Experiment, episode: Sequence[tuple[str, Observation]]
) -> tuple[np.ndarray, tuple[Turn, ...]]:
  tokenizer, pieces, turns = experiment.tokenizer, list[np.ndarray](), list[Turn]()
  for number, (text, answer) in enumerate(episode, 1):
    turn = np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]], np.int32)
    observed = turn[:0]
    if number < len(episode):
      prompts, messages = experiment.config.prompt, as_messages(answer.messages)
      observed = observed_tokens(tokenizer, prompts, turn, messages)
    pieces += [turn, observed]
    turns.append(Turn(len(turn), len(observed), answer.reward))
  return np.concatenate(pieces), tuple(turns)


WARMUP_SHARE = 0.05  # of the updates; the learning rate decays to 0 over the rest
REPORTS = 10  # progress lines per warm start
CHECK_EVERY = 25  # updates between checks of the pass rate
CHECK_ROWS = 256  # responses per check

_LOCK = 'lock'  # in a warm start's folder: held by the run that trains there
_OTHERS = 'other_settings'  # in origin.json: settings by dotted name; earlier versions lack it
# Name in origin.json -> name of the setting, if the two differ.
_SETTINGS = {'seed': 'warm_start.seed', 'train': 'data.train'}


def initial_params(experiment: Experiment, data: QuestionSet | None = None) -> model.Params:
  """Return the run's initial parameters (from a checkpoint, or random) after any warm start.

  With LoRA, these are the frozen base of the adapters (see `model.shapes`). `data` are the training
  questions for the pass-rate check; it may be None unless a warm start still has to be trained.
  """
  config, mesh = experiment.config, experiment.meshes.training
  name, rows, is_warm = experiment.model_name, None, config.warm_start.num_updates > 0
  is_frozen = config.lora.rank > 0
  if is_warm and not _is_kept(experiment):
    if data is None:
      folder = warm_start_folder(config, experiment.workdir)
      raise InputError(
        f'The warm-start weights that this run started from are missing from {folder}. The LoRA '
        'adapters need these weights. Restore the folder.'
      )
    rows = load_solutions(experiment)  # first, so that errors in them are found early
  if name:
    params = load_weights(experiment, frozen=is_frozen and not is_warm)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f'weights of {name}: {count:,} parameters', flush=True)
  else:
    key = randomness.key(config.warm_start_seed, Purpose.INIT)
    params = model.init(experiment.model, key, mesh)
  if is_warm:
    params = run(experiment, params, data, rows)
  if not is_frozen:
    return params
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(param_shapes(experiment)))
  print(f'LoRA adapters of rank {config.lora.rank}: {count:,} parameters', flush=True)
  return model.frozen(experiment.model, params, mesh)


def run(
  experiment: Experiment,
  params: model.Params,
  data: QuestionSet | None,
  rows: list[Solution] | None = None,
) -> model.Params:
  """Return the parameters after the warm start: load a stored result, or train and store one.

  `data` are the training questions for the `stop_at_pass_rate` check; None is allowed if a result
  is stored. `rows` are the rows to learn from; if None, they are loaded. Raises InputError if the
  folder contains the result of a different config.
  """
  directory = warm_start_folder(experiment.config, experiment.workdir)
  run_origin = origin(experiment.config, experiment.model)
  if _is_kept(experiment):  # without a lock, because the folder may be read-only
    return _load_result(directory, run_origin, params)
  # Only one run at a time trains in the folder; other runs wait for it.
  message = f'warm start: another run is training this warm start in {directory}'
  turn = workdir.in_turn_of(directory, _LOCK, message)
  with turn if hosts.is_first() else contextlib.nullcontext():
    if _is_kept(experiment):  # stored while this run waited for the lock
      return _load_result(directory, run_origin, params)
    assert data is not None
    rows = load_solutions(experiment) if rows is None else rows
    if hosts.is_first():  # a left-over result; see `_is_kept`
      pathlib.Path(directory, ORIGIN).unlink(missing_ok=True)
      shutil.rmtree(os.path.join(directory, 'params'), ignore_errors=True)
    params = _train(experiment, params, data, rows, directory)
    checkpoint.save_params(os.path.join(directory, 'params'), params)
    hosts.barrier('warm start')
    write_json(os.path.join(directory, ORIGIN), run_origin)  # last: marks the result as complete
  return params


def _load_result(
  directory: str, run_origin: Mapping[str, Any], params: model.Params
) -> model.Params:
  """Load the result in the layout of `params`. Raises InputError if its origin differs."""
  if changed := _changes(directory, run_origin):
    raise InputError(
      f'{directory} contains a warm start with a different config: {"; ".join(changed)}. Choose '
      'another config.warm_start.path, or restore the config (config.warm_start.seed=-1 means '
      'config.seed).'
    )
  print(f'warm start: reused from {directory}', flush=True)
  return checkpoint.load_params(os.path.join(directory, 'params'), checkpoint.abstract(params))


def _changes(directory: str, run_origin: Mapping[str, Any]) -> list[str]:
  """Describe how `run_origin` differs from the origin stored with the result in `directory`.

  Settings that earlier versions did not record are treated as unchanged.
  """
  stored_origin = json.loads(pathlib.Path(directory, ORIGIN).read_text())
  before, after = (
    as_current({**_without_root(settings), _OTHERS: {}})
    | settings.get(_OTHERS, run_origin[_OTHERS])
    for settings in (stored_origin, run_origin)
  )
  return [
    f'config.{_SETTINGS.get(name, name)} was {old!r} and is now {new!r}'
    for name, old, new in differences(before, after)
  ]


def _without_root(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Shorten the path of a shipped model or a model in the Hub's cache, since its root may move."""
  path = re.sub(
    r'.*/(?=(huggingface/shipped|models--[^/]+/snapshots)/)', '', settings['model']['path']
  )
  return {**settings, 'model': {**settings['model'], 'path': path}}


def _is_kept(experiment: Experiment) -> bool:
  """Return True if the first host finds a stored warm start for this run to load.

  A result in the workdir from a different config is ignored if training never started.
  """
  config = experiment.config
  directory = warm_start_folder(config, experiment.workdir)
  is_kept = os.path.exists(os.path.join(directory, ORIGIN))
  if is_kept and not config.warm_start.path:
    has_begun = os.path.exists(os.path.join(experiment.workdir, 'config.json'))
    is_kept = has_begun or not _changes(directory, origin(config, experiment.model))
  return hosts.broadcast_from_first(is_kept)


def origin(config: RunConfig, shape: model.ShapeConfig) -> dict[str, Any]:
  """Return the settings that determine the warm start's result, as JSON values."""
  settings = dataclasses.asdict(dataclasses.replace(config.warm_start, path=''))
  del settings['seed']
  values = {
    'seed': config.warm_start_seed,
    'model': dataclasses.asdict(shape) | {'path': config.model.path},
    'tokenizer': dataclasses.asdict(config.tokenizer),
    'prompt': dataclasses.asdict(config.prompt),
    'warm_start': settings,
  }
  if not config.prompt.template_kwargs:  # keeps the digests in studies' folder names
    del values['prompt']['template_kwargs']
  if config.environment.name:
    values['environment'] = [config.environment.name, config.environment.max_turns]
  if config.warm_start.stop_at_pass_rate < 1:  # the check samples these questions
    values['train'] = config.data.train
  values[_OTHERS] = _other_settings(config)
  return json.loads(json.dumps(values))


def _other_settings(config: RunConfig) -> dict[str, Any]:
  """Return further settings that affect the result, leaving out those with default values."""
  settings: dict[str, Any] = {
    'data.question_field': config.data.question_field,
    'data.answer_field': config.data.answer_field,
    'data.solution_field': config.data.solution_field,
    'environment.tools': config.environment.tools,
  }
  if config.data.on_overlong == 'drop':  # the limits decide which rows remain
    settings['data.on_overlong'] = config.data.on_overlong
    settings['rollout.max_prompt'] = config.rollout.max_prompt
    settings['rollout.max_response'] = config.rollout.max_response
  if config.optimizer.moment_dtype != 'float32':
    settings['optimizer.moment_dtype'] = config.optimizer.moment_dtype
  return {name: value for name, value in settings.items() if value}


def _train(
  experiment: Experiment,
  params: model.Params,
  data: QuestionSet,
  rows: list[Solution],
  directory: str,
) -> model.Params:
  config = experiment.config.warm_start
  state = optimizer.init(_optimizer(experiment.config), config.num_updates, params)
  longest = max(map(len, rows))
  interval = max(1, config.num_updates // REPORTS)
  update, loss = 0, jnp.inf
  with (
    metrics.Writer(directory, first_step=0) as writer,
    activity.doing(lambda: f'warm start, update {update} of {config.num_updates}'),
  ):
    for update in range(config.num_updates):
      row_indices = _choose(len(rows), config.batch_size, experiment.config.warm_start_seed, update)
      arrays = padded([rows[i] for i in row_indices], longest, experiment.tokenizer.pad_id)
      # Dispatch only one update ahead: with several CPU devices, XLA can deadlock if about 45
      # programs with collectives are queued.
      jax.block_until_ready(loss)
      state, loss = _run_update(experiment, state, arrays)
      if (update + 1) % interval == 0 or update + 1 == config.num_updates:
        if not math.isfinite(loss):
          raise InputError(
            f'warm start: the loss at update {update + 1} is {float(loss)}, so nothing was stored. '
            f'Lower config.warm_start.learning_rate={config.learning_rate:g}.'
          )
        writer.write(update + 1, {'loss': float(loss)})
        progress = f'warm start {update + 1}/{config.num_updates}'
        print(f'{progress}  loss {float(loss):.4f} nats/token', flush=True)
      if config.stop_at_pass_rate < 1 and (update + 1) % CHECK_EVERY == 0:
        pass_rate = _pass_rate(experiment, state.params, data, update)
        if pass_rate >= config.stop_at_pass_rate:
          after = f'after {update + 1} updates, pass rate {pass_rate:.3f}'
          print(f'warm start: stopped early {after}', flush=True)
          break
  return state.params


def rehearse(experiment: Experiment) -> None:
  """Compile a warm start's update programs, one per padded row length."""
  config = experiment.config.warm_start
  key = randomness.key(experiment.config.warm_start_seed, Purpose.INIT)
  params = model.init(experiment.model, key, experiment.meshes.training)
  state = optimizer.init(_optimizer(experiment.config), config.num_updates, params)
  lengths = list(map(len, load_solutions(experiment)))
  for length in sorted({length_bucket(length, max(lengths)) for length in lengths}):
    zeros_BT = np.zeros((config.batch_size, length))
    arrays = zeros_BT.astype(np.int32), zeros_BT.astype(np.float32)
    state, _ = _run_update(experiment, state, arrays)
  jax.block_until_ready(state)


def _run_update(
  experiment: Experiment, state: TrainState, arrays: tuple[np.ndarray, np.ndarray]
) -> tuple[TrainState, jax.Array]:
  """Run an update on this host's (tokens_BT, mask_BT); return (state, loss). Donates `state`."""
  config = experiment.config
  rows = sharding.batch(experiment.meshes.training, config.warm_start.batch_size)
  layout, device_arrays = sharding.layout_of(state), sharding.put(arrays, rows)
  num_updates, logit_chunk = config.warm_start.num_updates, config.rollout.logit_chunk
  settings = experiment.model, _optimizer(config), num_updates, logit_chunk
  state, loss = _update(*settings, state, *device_arrays)
  return sharding.restore_layout(state, layout), loss


def _pass_rate(
  experiment: Experiment, params: model.Params, data: QuestionSet, update: int
) -> float:
  """Return the pass rate on the first 256 questions, one response each, sampled as in training."""
  tokenizer, config = experiment.tokenizer, experiment.config
  questions, seed = data.questions[:CHECK_ROWS], config.warm_start_seed
  limit = config.rollout.max_response
  requests = requests_for(
    data.prompts[:CHECK_ROWS], range(len(questions)), 1, update, limit, questions
  )
  decode_params = model.decode_layout(experiment.model, params, experiment.meshes)
  sampler = make_sampler(experiment, Purpose.WARM_START_CHECK, seed=seed)
  responses, _ = sampler.generate(decode_params, requests)
  verdicts = [response.verdict for response in responses if response.verdict]
  if not verdicts:
    with Grader(config.grading.correctness_alone, config.verifier) as grader:
      verdicts = grader.grade(
        [tokenizer.decode(response.tokens) for response in responses],
        [question.answer for question in questions],
        [question.kind for question in questions],
        [functools.partial(stages.question_facts, question) for question in questions],
      )
  return float(np.mean([verdict.correct for verdict in verdicts]))


def _choose(size: int, count: int, seed: int, update: int) -> list[int]:
  """Return the next `count` rows, for one update. The order is reshuffled every epoch."""
  places = np.arange(update * count, (update + 1) * count)
  order = {
    int(epoch): randomness.generator(seed, Purpose.WARM_START_ORDER, int(epoch)).permutation(size)
    for epoch in np.unique(places // size)
  }
  return [int(order[int(place) // size][place % size]) for place in places]


def _optimizer(config: RunConfig) -> optimizer.OptimizerConfig:
  """Return the AdamW settings.

  Gradients are clipped at norm 1 because the loss is a per-token mean. Only the moments' dtype
  comes from config.optimizer, so that runs with different optimizer settings can share the warm
  start.
  """
  warm_start = config.warm_start
  return optimizer.OptimizerConfig(
    moment_dtype=config.optimizer.moment_dtype,
    learning_rate=warm_start.learning_rate,
    schedule='cosine',
    warmup_updates=int(WARMUP_SHARE * warm_start.num_updates),
    epsilon=1e-8,
    clip_norm=1.0,
    skip_above_norm=float('inf'),
  )


@jit_for_training(static_argnums=(0, 1, 2, 3), donate_argnums=(4,))
def _update(
  model_config: model.ShapeConfig,
  optimizer_config: optimizer.OptimizerConfig,
  num_updates: int,
  logit_chunk: int,
  state: TrainState,
  tokens_BT: jax.Array,
  mask_BT: jax.Array,
) -> tuple[TrainState, jax.Array]:
  def loss_of(params: model.Params) -> jax.Array:
    logp_BT, _ = score_tokens(model_config, params, tokens_BT, None, 1.0, logit_chunk)
    return -jnp.sum(logp_BT * mask_BT) / jnp.sum(mask_BT)

  loss, gradient = jax.value_and_grad(loss_of)(state.params)
  state, _ = optimizer.apply_gradient(optimizer_config, num_updates, state, gradient)
  return state, loss
