"""Supervised training on written solutions, so that reinforcement learning has something to reward.

Kept as parameters in a directory of its own and reused when it is there. It
serves as well for plain supervised fine-tuning, with `num_steps=0`.
"""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Experiment, load_questions
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.learner import checkpoint, optimizer
from exgrpo_jax.padding import right_padded
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.rollout.stages import score_tokens
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import write_json

WARMUP_SHARE = 0.05  # of the updates; the rate falls to 0 over the rest
REPORTS = 10  # progress lines of a warm start
CHECK_EVERY = 25  # updates between looks at whether it is enough
CHECK_ROWS = 256  # responses in such a look


def run(experiment: Experiment, params):
  """The parameters after the warm start: read where they are kept, else trained and kept.

  Raises InputError where what is kept was made by another configuration.
  """
  directory = experiment.settings.warm_start.path or os.path.join(experiment.workdir, 'warm_start')
  origin = _origin(experiment)
  origin_path = os.path.join(directory, 'origin.json')
  if hosts.broadcast_from_first(os.path.exists(origin_path)):
    with open(origin_path) as file:
      found = json.load(file)
    if found != origin:
      changed = [name for name in origin if found.get(name) != origin[name]]
      raise InputError(
        f'{directory} holds a warm start of another configuration (differing: '
        f'{", ".join(changed)}); name another config.warm_start.path.'
      )
    print(f'warm start: reused from {directory}', flush=True)
    return checkpoint.load_params(os.path.join(directory, 'params'), checkpoint.abstract(params))
  params = _trained(experiment, params, directory)
  checkpoint.save_params(os.path.join(directory, 'params'), params)
  hosts.barrier('warm start')
  write_json(origin_path, origin)  # last: it says that the rest is whole
  return params


def _origin(experiment):
  """What the result depends on, as JSON gives it back."""
  settings = experiment.settings
  # The training questions too: a tokenizer may be made of them, and `enough` looks at them.
  return json.loads(
    json.dumps(
      {
        'seed': settings.seed,
        'train': settings.data.train,
        'model': dataclasses.asdict(experiment.model) | {'path': settings.model.path},
        'tokenizer': dataclasses.asdict(settings.tokenizer),
        'prompt': dataclasses.asdict(settings.prompt),
        'warm_start': dataclasses.asdict(dataclasses.replace(settings.warm_start, path='')),
      }
    )
  )


def _trained(experiment, params, directory):
  settings = experiment.settings.warm_start
  rows = _rows(experiment)
  optimizer_config = _optimizer(experiment.settings.optimizer, settings)
  state = optimizer.init(optimizer_config, settings.num_updates, params)
  longest = max(len(prompt) + len(solution) for prompt, solution in rows)
  interval = max(1, settings.num_updates // REPORTS)
  with metrics.Writer(directory, first_step=0) as writer:
    for update in range(settings.num_updates):
      chosen = _draw(len(rows), settings.batch_size, experiment.settings.seed, update)
      arrays = right_padded([rows[i] for i in chosen], longest, experiment.tokenizer.pad_id)
      batch = sharding.put(arrays, sharding.batch(experiment.mesh, settings.batch_size))
      state, loss = _update(
        experiment.model,
        optimizer_config,
        settings.num_updates,
        experiment.settings.rollout.logit_chunk,
        state,
        *batch,
      )
      if (update + 1) % interval == 0 or update + 1 == settings.num_updates:
        writer.write(update + 1, {'loss': float(loss)})
        print(
          f'warm start {update + 1}/{settings.num_updates}  loss {float(loss):.4f} nats/token',
          flush=True,
        )
      if settings.enough < 1 and (update + 1) % CHECK_EVERY == 0:
        found = _pass_rate(experiment, state.params)
        if found >= settings.enough:
          print(f'warm start: enough after {update + 1} updates, pass rate {found:.3f}', flush=True)
          break
  return state.params


def _pass_rate(experiment, params):
  """Share of right responses, one each to the first questions, at the run's temperature."""
  words, settings = experiment.tokenizer, experiment.settings
  dataset, prompts = load_questions(experiment, settings.data.train)
  count = min(CHECK_ROWS, len(dataset))
  responses = scheduler.generate(
    experiment.model,
    model.decode_layout(experiment.model, params, experiment.mesh),
    prompts[:count],
    range(count),
    [0] * count,
    jax.random.key(settings.seed),
    settings.rollout.sampling(words),
    experiment.mesh,
  )
  with Grader(dataclasses.replace(settings.grading, reward=''), settings.verifier) as grader:
    verdicts = grader.grade(
      [words.decode(response.tokens) for response in responses],
      [question.answer for question in dataset[:count]],
      [question.kind for question in dataset[:count]],
    )
  return np.mean([verdict.correct for verdict in verdicts])


def _rows(experiment):
  """(prompt, solution with its end token) of every question, as int32 arrays."""
  settings, words = experiment.settings, experiment.tokenizer
  spec, limit = settings.warm_start.data, settings.rollout.max_response
  rows = []
  for question, prompt in zip(*load_questions(experiment, spec)):
    if not question.solution:
      raise InputError(
        f'{spec}: row {question.row} has no written solution to learn from; '
        'set config.data.solution_field, or config.warm_start.num_updates=0.'
      )
    solution = np.array([*words.encode(question.solution), words.eos_ids[0]], np.int32)
    if len(solution) <= limit:
      rows.append((prompt, solution))
    elif settings.data.overlong == 'refuse':
      raise InputError(
        f'{spec}: the solution of row {question.row} has {len(solution)} tokens, '
        f'over config.rollout.max_response={limit}; raise it, or set '
        "config.data.overlong='drop'."
      )
  if not rows:
    raise InputError(f'{spec}: no solution fits config.rollout.max_response={limit}; raise it.')
  return rows


def _draw(size, count, seed, update):
  """Rows of one update: consecutive stretches of a permutation per epoch."""
  places = np.arange(update * count, (update + 1) * count)
  order = {
    epoch: np.random.default_rng((seed, epoch)).permutation(size)
    for epoch in np.unique(places // size)
  }
  return [int(order[place // size][place % size]) for place in places]


def _optimizer(rl: optimizer.Config, settings) -> optimizer.Config:
  """The run's AdamW at its own rate; losses here are means per token, so clipped at norm 1."""
  return dataclasses.replace(
    rl,
    learning_rate=settings.learning_rate,
    schedule='cosine',
    warmup_updates=int(WARMUP_SHARE * settings.num_updates),
    epsilon=1e-8,
    clip_norm=1.0,
    skip_norm=float('inf'),
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _update(model_config, optimizer_config, num_updates, logit_chunk, state, tokens_BT, mask_BT):
  def loss_of(params):
    logp_BT, _ = score_tokens(model_config, params, tokens_BT, 1.0, logit_chunk)
    return -jnp.sum(logp_BT * mask_BT) / jnp.sum(mask_BT)

  loss, gradient = jax.value_and_grad(loss_of)(state.params)
  state, _ = optimizer.apply_gradient(optimizer_config, num_updates, state, gradient)
  return state, loss
