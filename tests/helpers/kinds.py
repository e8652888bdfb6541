"""The kinds of run that are trained in tests, once each, and how their tokens are read again."""

import copy
import json
import shutil
import zlib

import jax
import numpy as np

from exgrpo_jax.datatypes import turn_places
from exgrpo_jax.environments.environment import Task
from exgrpo_jax.environments.toys import Guess
from exgrpo_jax.huggingface import weights
from exgrpo_jax.policy import lora
from tests.helpers import recording, tiny
from tests.helpers.chance import is_correct
from tests.helpers.environments import failure_of
from tests.helpers.paths import CHECKPOINTS

TURNS, TURN = 5, 3  # of an episode of `guess`, and tokens of a turn
REWARDS = {'correctness': 2.0, 'overlong': 0.5, 'weighed_length': -1.0, 'of_question': 0.125}
OVERLONG = 5  # tokens before the limit
_GUESS = {
  'environment.name': 'guess',
  'environment.workers': 1,
  'environment.max_turns': TURNS,
  'environment.max_turn_tokens': TURN,
  'environment.memory_limit': 256,
  'rollout.slots': 6,
  'rollout.max_prompt': 6,
  'rollout.max_response': 32,
  'optimizer.minibatches': 1,
  'data.train': 'guess:train[:24]',
  'data.evaluation': ('guess:test[:6]',),
  'tokenizer.vocab_size': 300,
  'warm_start.num_updates': 200,
  'warm_start.data': 'guess:pretraining[:200]',
  'warm_start.batch_size': 16,
  'checkpoint.every': 4,
  'num_steps': 8,
}
_PARTIAL = {
  'rollout.questions': 2,
  'rollout.partial': True,
  'rollout.max_groups_in_flight': 6,
  'rollout.max_staleness': 2,
  'optimizer.minibatches': 1,
}
_CHANCE = {
  'environment.name': 'tests.helpers.environments:Chance',
  'environment.workers': 1,
  'environment.max_turns': 4,
  'environment.max_turn_tokens': 5,
  'rollout.slots': 6,
  'rollout.max_response': 24,
  'warm_start.num_updates': 0,
  'data.evaluation': (),
}
# By name, what is changed of tests/helpers/tiny.py. The first ones are the switches of
# docs/algorithm.md: few runs share all values. They need no warm start.
SWITCHES = {
  'power': {
    'replay.max_trajectories': 0,
    'replay.question_selection': 'linear',
    'replay.trajectory_selection': 'highest_perplexity',
    'objective.shaping': 'power',
    'objective.shaping_exponent': 0.25,
    'objective.baseline': 'fresh',
    'objective.normalize_std': 'sample',
    'objective.m2po_threshold': 1e-3,
    'optimizer.minibatches': 1,
  },
  'uncorrected': {
    'replay.question_selection': 'linear_clip',
    'replay.on_all_failed': 'bucket_0',
    'replay.correctness_range': (0.25, 1.0),
    'objective.importance_correction': False,
    'objective.shaping': 'none',
    'objective.normalize_std': 'population',
  },
  'balanced': {
    'replay.question_selection': 'hardest',
    'replay.trajectory_selection': 'smallest_drop',
    'replay.max_age': 2.0,
    'objective.beta': 0.3,
    'objective.replay_advantage': 'balanced',
  },
  'revisit': {
    'replay.include_trajectory': False,
    'replay.question_selection': 'uniform',
    'replay.age_decay': 1e-3,  # so small that no older one is drawn before a newer one
    'optimizer.minibatches': 1,
  },
  'all_kept': {
    'replay.store': 'all',
    'replay.retire': 'never',
    'replay.question_selection': 'advantage',
    'replay.trajectory_selection': 'random',
    'optimizer.minibatches': 1,
  },
  'headroom_drift': {
    'replay.question_selection': 'headroom_drift',
    'replay.trajectory_selection': 'highest_perplexity',
    'objective.baseline': 'history',
    'objective.replay_advantage': 'zero',
    'optimizer.learning_rate': 1e-3,  # so that some of what is stored drifts too far, and some not
    'optimizer.minibatches': 1,
    'checkpoint.every': 4,
  },
  'history': {
    'replay.include_trajectory': False,
    'objective.baseline': 'history',
    'objective.normalize_std': 'population',
    'optimizer.minibatches': 1,
    'checkpoint.every': 4,
  },
  'medium_on_policy': {
    'replay.ratio': 0.0,
    'replay.difficulty': 'medium',
    'optimizer.minibatches': 1,
  },
}
OTHERS = {
  'plain': {},  # the recorded run of conftest.py
  'epochs': {
    'num_steps': 6,
    'checkpoint.every': 3,
    'optimizer.epochs': 2,
    'optimizer.max_kl': 0.03,
    'warm_start.num_updates': 0,
  },
  'rewards': {
    'num_steps': 5,
    'warm_start.num_updates': 0,
    'metrics.sampled_rows': 64,
    'grading.rewards': (
      *list(REWARDS)[:2],
      *(f'tests.helpers.shaped:{name}' for name in list(REWARDS)[2:]),
    ),
    'grading.weights': tuple(REWARDS.values()),
    'grading.batched': ('tests.helpers.shaped:of_question',),
    'grading.batch_size': 10,
    'grading.overlong_buffer': OVERLONG,
  },
  'episodes': _GUESS | {'rollout.questions': 4, 'logprob_check.every': 1},
  'partial_episodes': {
    **_GUESS,
    **_PARTIAL,
    'objective.old_logprobs': 'recompute',
    'objective.tis_limit': 1.5,
    'logprob_check.every': 1,
  },
  'dynamic': {
    'seed': 9,
    'rollout.questions': 3,
    'rollout.dynamic_sampling': 3.0,
    'replay.start_pass_rate': 0.5,
    'optimizer.minibatches': 1,
    'warm_start.num_updates': 0,
    'checkpoint.every': 4,
    'num_steps': 8,
  },
  'dynamic_episodes': {
    **_GUESS,
    **_PARTIAL,
    'rollout.dynamic_sampling': 3.0,
    'logprob_check.every': 1,
  },
  'partial_experts': {
    **_PARTIAL,
    'num_steps': 10,
    'checkpoint.every': 5,
    'rollout.slots': 8,
    'rollout.router_replay': True,
    'model.num_layers': 2,
    'model.num_experts': 4,
    'model.experts_per_token': 2,
    'model.mlp_width': 16,
    'objective.balance_coefficient': 0.01,
    'objective.mask_truncated': True,
    'logprob_check.every': 1,
  },
  'lora': {
    **_CHANCE,
    'num_steps': 8,
    'checkpoint.every': 4,
    'prompt.template': 'chat',
    'rollout.max_prompt': 64,
    'lora.rank': 2,
    'lora.alpha': 8.0,
    'objective.kl_coefficient': 0.01,
    'optimizer.minibatches': 1,
    'export.last': True,
  },
  'failing': {
    **_CHANCE,
    'num_steps': 4,
    'environment.name': 'tests.helpers.environments:Unreliable',
    'environment.workers': 2,
    'environment.time_limit': 3.0,
    'environment.memory_limit': 256,
  },
}
KINDS = SWITCHES | OTHERS
_FAST = 'plain', 'revisit', 'medium_on_policy', 'all_kept'  # a few seconds each
FULL = tuple(name for name in KINDS if name not in _FAST)  # trained by .ci/run alone
# How an `Unreliable` environment fails: the outcome of its episode.
FAILURES = {'hang': 'timed out', 'raise': 'crashed', 'die': 'crashed'}


def trained(kind, values, make_once, compiled):
  """The recording.Recording of a kind of run, which is trained once in a session of pytest."""
  changed = copy.deepcopy(values)
  if kind in SWITCHES:
    changed.num_steps, changed.warm_start.num_updates = 7, 0
  changed.update_from_flattened_dict(KINDS[kind])
  changed.evaluation.every = changed.num_steps
  if 'checkpoint.every' not in KINDS[kind]:
    changed.checkpoint.every = changed.num_steps
  if kind == 'rewards':
    changed.data.train = str(make_once('levelled', _write_levelled) / 'train.jsonl')
  elif kind == 'lora':
    changed.model.path = str(make_once('start', _copy_checkpoint) / 'checkpoint')
  folder = make_once(f'run_{kind}', lambda place: recording.record(changed, place, compiled))
  return recording.load(changed, folder, compiled)


def _write_levelled(folder):
  """Questions with a column `level`, their row's number modulo 3."""
  rows = [{'question': f'{n}+0', 'answer': str(n), 'level': n % 3} for n in range(tiny.POOL)]
  (folder / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))


def _copy_checkpoint(folder):
  shutil.copytree(CHECKPOINTS / 'qwen2_tied', folder / 'checkpoint')


# ---- What is read again, without the code ----


def base_of(run):
  """The parameters that a run with LoRA began with, from their file; None for other runs."""
  if run.experiment.config.lora.rank:
    return weights.load(run.values.model.path, run.experiment.model, run.experiment.meshes.training)
  return None


def policy_of(run, params, base):
  """The policy that trained parameters stand for."""
  return jax.tree.map(np.asarray, lora.joined(run.experiment.config.lora, base, params))


def own_tokens(run, question, member):
  """[T], which tokens the policy wrote: of `guess` by playing again, else by the turns' counts."""
  if run.experiment.config.environment.name == 'guess':
    return read(run, question, member.tokens)[0]
  own_T = np.ones(len(member.tokens), bool)
  if run.experiment.config.environment.name:
    own_T[:] = False
    for written, _ in turn_places(member.turns):
      own_T[written] = True
  return own_T


def outcome(run, question, response):
  """'correct', 'wrong', or how the episode failed; None where it cannot be known."""
  name = run.experiment.config.environment.name.rpartition(':')[2]
  if name == 'Chance':
    return None
  if name == 'Unreliable':
    return _of_unreliable(run, question, response)
  if name == 'guess':
    right = read(run, question, response.tokens)[1]
  else:
    right = is_correct(run.experiment.tokenizer.decode(response.tokens), question.answer)
  return 'correct' if right else 'wrong'


def failure(run, question, response):
  """How the environment of an episode failed, by what the policy said; '' where it did not."""
  for said in _said(run, question, response):
    if how := failure_of(said):
      return how
  return ''


def _of_unreliable(run, question, response):
  for said in _said(run, question, response):
    if how := failure_of(said):
      return FAILURES[how]
    number = zlib.crc32(said.encode())
    if not number % 3:
      return 'correct' if number % 2 == 0 else 'wrong'
  return 'wrong'


def _said(run, question, response):
  """All that an `Unreliable` has been told, turn after turn."""
  said = f'{question.row} '
  for written, _ in turn_places(response.turns):
    said += run.experiment.tokenizer.decode(response.tokens[written])
    yield said


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
