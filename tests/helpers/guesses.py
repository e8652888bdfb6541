"""Runs of the environment `guess`, and their episodes read from the tokens alone."""

import copy

import numpy as np

from exgrpo_jax.environments.environment import Task
from exgrpo_jax.environments.toys import Guess

RESPONSE, TURNS, TURN = 32, 5, 3  # tokens of an episode, its turns, tokens of a turn


def values_of(values, **rollout):
  """The ConfigDict of a run of eight steps, saved halfway; `values` are tiny.py's."""
  changed = copy.deepcopy(values)
  changed.num_steps = changed.evaluation.every = 8
  changed.checkpoint.every = 4
  changed.parity.every = 1
  changed.environment.update(
    dict(name='guess', workers=1, max_turns=TURNS, max_turn_tokens=TURN, memory_limit=256)
  )
  changed.rollout.update(dict(slots=6, max_prompt=6, max_response=RESPONSE, **rollout))
  changed.optimizer.minibatches = 1
  changed.data.update(dict(train='guess:train[:24]', evaluation=('guess:test[:6]',)))
  changed.tokenizer.vocab_size = 300
  changed.warm_start.update(dict(num_updates=200, data='guess:pretraining[:200]', batch_size=16))
  return changed


def read(run, question, tokens):
  """(own [T], success) of an episode, by playing it: turns end with an end token, or are cut."""
  tokenizer, environment = run.experiment.tokenizer, Guess()
  messages = [message._asdict() for message in question.messages]
  environment.reset(Task(question.row, messages, question.answer, {}), 0)
  tokens, own, success = tokens.tolist(), [], False
  for number in range(1, TURNS + 1):
    rest = tokens[len(own) :]
    ends = [place for place, token in enumerate(rest) if token in tokenizer.eos_ids]
    written = min([TURN, len(rest), *(place + 1 for place in ends)])
    own += [True] * written
    answer = environment.step(tokenizer.decode(rest[:written]))
    success = answer.success
    if answer.done or number == TURNS or len(own) == len(tokens):
      break
    said = tokenizer.encode(f'{answer.messages}\n')
    if rest[written - 1] not in tokenizer.eos_ids:
      said = [tokenizer.eos_ids[0], *said]
    assert rest[written : written + len(said)] == said
    own += [False] * len(said)
  assert len(own) == len(tokens)
  return np.array(own), success
