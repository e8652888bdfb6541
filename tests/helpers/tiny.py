"""A run small enough for tests, with replay: the one that conftest.py records.

A model of one narrow layer solves nothing, so the verifier is replaced by a pseudo-random one: a
hash of the response decides, and the number of correct ones depends on the question (QUARTERS in
chance.py). Some questions are never solved, some always, and the others have mixed groups. So
many retire in the end that too few are left for a step, whatever the model does.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from exgrpo_jax.configs import smoke
from exgrpo_jax.grading import programs, settings
from exgrpo_jax.policy import model, rotary
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.training import session
from tests.helpers.chance import QUARTERS

ROPE = rotary.RopeConfig()
SMALL = model.ShapeConfig(  # a model small enough for a test
  vocab_size=256,
  width=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_size=32,
  mlp_width=256,
  rope=ROPE,
  norm_epsilon=1e-6,
  attention_bias=False,
  query_key_norm=False,
  tied_embeddings=False,
  dtype='float32',
)
GRADING = settings.GradingConfig(memory_limit=256, max_length=1000)
QUESTIONS, ROLLOUTS, RATIO, STORED = 6, 4, 0.5, 3
POOL = len(QUARTERS)  # questions to train on
PROMPT, RESPONSE = 8, 12  # limits, in tokens
LENGTH = PROMPT + RESPONSE
WORKER = (
  sys.executable,
  '-P',
  str(pathlib.Path(__file__).with_name('chance.py')),
)  # programs.COMMAND
SEED = 5  # with it the run exercises what the tests check: see test_train.py
NUM_STEPS, SAVED_EVERY, COMPARED_EVERY = 32, 4, 20


def get_config():
  """For the command line, whose process gets the replaced workers too; data.* must be set.

  Its runs end without pictures.
  """
  programs.COMMAND = WORKER
  leave_out_pictures(setattr)
  return values('', '')


def values(train, evaluation):
  """The configuration; `train` and `evaluation` are data specs."""
  config = smoke.get_config()
  config.seed = SEED
  config.num_steps = NUM_STEPS
  config.compilation_cache = ''  # set by Recording.compiling and by the environment
  config.rollout.update(
    dict(
      questions=QUESTIONS,
      group_size=ROLLOUTS,
      max_prompt=PROMPT,
      max_response=RESPONSE,
      slots=24,
      logit_chunk=128,
    )
  )
  config.replay.update(dict(ratio=RATIO, start_pass_rate=0.0, max_trajectories=STORED))
  config.optimizer.update(dict(learning_rate=3e-3, warmup_updates=2))
  config.model.update(
    dict(width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_size=16, mlp_width=32)
  )
  config.tokenizer.vocab_size = 280
  config.data.update(dict(train=train, evaluation=(evaluation,)))
  config.warm_start.update(
    dict(num_updates=30, data=train, batch_size=8, learning_rate=1e-2, stop_at_pass_rate=1.0)
  )
  config.grading.workers = 1  # starting one takes longer than all that it does here
  config.evaluation.every = NUM_STEPS // 2
  config.logprob_check.every = COMPARED_EVERY
  config.checkpoint.update(dict(every=SAVED_EVERY, keep=NUM_STEPS))
  return config


def leave_out_pictures(set_attribute):
  """Lets runs end without their report, which takes seconds; `set_attribute` is as setattr."""
  set_attribute(session, 'write_at_end', lambda _: None)


def write_questions(path, count=POOL):
  """A jsonl file of `count` questions in GSM8K's format; the answers are 0, 1, 2, ..."""
  rows = [{'question': f'{n}+0', 'answer': f'{n}\n#### {n}'} for n in range(count)]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def untimed_records(workdir):
  """A run's metrics without times and memory, which never repeat."""
  measured = ('time', 'perf', 'memory')
  return [
    {name: value for name, value in record.items() if not name.startswith(measured)}
    for record in metrics.read(workdir)
  ]


def token_rows(workdir):
  """A run's rows of tokens, in file order."""
  return [row for table in step_records.tables(workdir, 'tokens') for row in table.to_pylist()]


def full_log_probabilities(params, config, tokens_T, temperature=1.0, routes_TLC=None):
  """float64 [T - 1, V]: row t is the distribution of token t + 1, from all logits at once.

  `config` is a model.ShapeConfig. The hidden states are the model's, by the experts of `routes_TLC`
  if given; the rest is NumPy.
  """
  pad = 0, -len(tokens_T) % LENGTH  # attention is causal
  rows = [np.pad(tokens_T, pad)[None]]
  if routes_TLC is not None:
    none = np.iinfo(routes_TLC.dtype).max
    routes_TLC = np.pad(routes_TLC, (pad, (0, 0), (0, 0)), constant_values=none)
    rows += [None, routes_TLC[None]]
  hidden_TD = np.asarray(_hidden_states(config, params, *rows))[0, : len(tokens_T) - 1]
  logits = (
    hidden_TD.astype(np.float64)
    @ np.asarray(model.unembedding(config, params), np.float64)
    / temperature
  )
  logits -= logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


_hidden_states = jax.jit(model.hidden_states, static_argnums=0)
