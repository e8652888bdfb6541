"""Episodes with scripted turns and an in-process environment: tokens, turns and verdicts."""

import collections
import dataclasses

import numpy as np
import pytest

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message, Question, Response, Turn, Verdict, own_tokens
from exgrpo_jax.environments import settings
from exgrpo_jax.environments.environment import METRICS, Observation, as_messages
from exgrpo_jax.environments.pool import Answer, Failure
from exgrpo_jax.rollout.episodes import EpisodeSampler
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.runtime.randomness import Purpose

CONFIG = settings.EnvironmentConfig(name='scripted', max_turns=3)
PLAIN = prompt.PromptConfig()
LIMIT = 24


@pytest.fixture(scope='module')
def text_tokenizer(tmp_path_factory):
  path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.model'
  tokenizer.train(['higher', 'lower', '0123456789'] * 20, 300, path)
  return tokenizer.load(path)


class Engine:
  """An engine whose turns follow a script of (row, sample, turn number), newest request first."""

  def __init__(self, script, tokens):
    self._script, self._tokens, self.limits = script, tokens, []

  def generate(self, _params, requests, on_finish, more):
    waiting, turns = list(enumerate(requests)), collections.Counter()
    count = len(waiting)
    while waiting or (new := more(True)):
      if not waiting:
        waiting = list(enumerate(new, count))
        count += len(new)
      index, request = waiting.pop()
      place, begun = (request.question, request.sample), request.prefix
      turns[place] += 1
      self.limits.append(request.limit)
      own = self._tokens(self._script(*place, turns[place]))[: request.limit - len(begun.tokens)]
      values = np.full(len(own), -0.5, np.float32)
      logp = np.concatenate([begun.logp, values])
      tokens = np.concatenate([begun.tokens, own])
      on_finish(index, Response(tokens=tokens, logp=logp, entropy=-logp, truncated=False))
    return [], {}


class Environments:
  """Environments that answer with a function of the turns, in a configurable order."""

  def __init__(self, answer, order=1):
    self._answer, self._order, self._asked, self.left = answer, order, [], []

  def submit(self, key, begin, said):
    self._asked.append(Answer(key, self._answer(begin, tuple(said)), 0.25))

  def answers(self, wait):
    assert self._asked or not wait
    answers, self._asked = self._asked[:: self._order], []
    return answers

  def leave(self, key):
    self.left.append(key)


def count_up(_begin, said):
  """Answer with the turn number; 'stop' succeeds, 'fail' fails, and 'break' times out."""
  if said[-1] == 'break':
    return Failure('timed out', 'no answer after 1 s')
  if said[-1] in ('stop', 'fail'):
    return Observation(reward=4.0, done=True, success=said[-1] == 'stop')
  counts = {'answers': 1, 'characters': len(said[-1])}
  return Observation(as_messages(f'{len(said)}'), reward=float(len(said)), counts=counts)


@pytest.fixture
def play(text_tokenizer):
  """Return a function that plays a script: two questions with two samples each."""

  def call(script, order=1, answer=count_up, in_order=False, **changes):
    def tokens(text):
      ended = text.removesuffix('…')
      return np.array(
        text_tokenizer.encode(ended) + [text_tokenizer.eos_ids[0]] * (ended == text), np.int32
      )

    engine, environments = Engine(script, tokens), Environments(answer, order)
    sampler = EpisodeSampler(
      engine=engine,
      environments=environments,
      config=dataclasses.replace(CONFIG, **changes),
      tokenizer=text_tokenizer,
      prompts=PLAIN,
      seed=3,
      purpose=Purpose.ROLLOUT,
      in_order=in_order,
    )
    asked = [Question(row, (Message('user', '?'),), '', 'math', '', 'test') for row in (5, 6)]
    prompts = [np.array(text_tokenizer.encode('?\n'), np.int32)] * 2
    requests = requests_for(prompts, [5, 6], 2, 1, LIMIT, asked)
    finished = {}
    found, metrics = sampler.generate(None, requests, finished.__setitem__)
    assert [finished[index] for index in range(4)] == found
    return found, metrics, engine, environments

  return call


def script(row, sample, turn):
  """Sample 0 of question 5 stops in its second turn, sample 1 fails in its first."""
  if row == 5:
    return {0: ['7', 'stop'], 1: ['fail']}[sample][turn - 1]
  return {0: ['1', '2', '3'], 1: ['1', 'break']}[sample][turn - 1]


def test_turns_and_observations_follow_one_another_as_tokens(play, text_tokenizer):
  (stopped, failed, endless, broken), metrics, _, environments = play(script)

  def ids(*texts):
    return [i for text in texts for i in text_tokenizer.encode(text)]

  end = text_tokenizer.eos_ids[0]
  seven, stop = [*ids('7'), end], [*ids('stop'), end]
  observed = ids('1\n')
  assert stopped.tokens.tolist() == [*seven, *observed, *stop]
  assert stopped.turns == (Turn(len(seven), len(observed), 1.0), Turn(len(stop), 0, 4.0))
  own = [True] * len(seven) + [False] * len(observed) + [True] * len(stop)
  assert stopped.own.tolist() == own and stopped.num_own == sum(own)
  assert stopped.logp.tolist() == [-0.5 if yes else 0.0 for yes in own]
  assert stopped.verdict == Verdict(5.0, 'correct', components={'environment': 5.0})
  assert failed.verdict == Verdict(4.0, 'wrong', components={'environment': 4.0})
  # The last allowed turn is answered too, and then the episode ends.
  assert [turn.reward for turn in endless.turns] == [1.0, 2.0, 3.0] and not endless.turns[
    -1
  ].observed
  assert endless.verdict == Verdict(6.0, 'wrong', components={'environment': 6.0})
  assert len(environments.left) == 1
  assert broken.verdict == Verdict(0.0, 'timed out', 'no answer after 1 s')
  assert [len(one.turns) for one in (stopped, failed, endless, broken)] == [2, 1, 3, 2]
  assert all(one.is_complete and not one.truncated for one in (stopped, failed, endless, broken))
  names = {f'environment/{name}' for name in (*METRICS, 'answers', 'characters')}
  assert set(metrics) == names
  assert metrics['environment/turns_mean'] == 2 and metrics['environment/turns_max'] == 3
  assert metrics['environment/seconds'] == 8 * 0.25
  assert metrics['environment/tokens_mean'] == len(observed) * 4 / 4


@pytest.mark.parametrize('in_order', [False, True])
def test_the_order_of_answers_changes_nothing(play, in_order):
  first, *_ = play(script)
  other, *_ = play(script, order=-1, in_order=in_order)
  for one, two in zip(first, other, strict=True):
    assert one.tokens.tolist() == two.tokens.tolist()
    assert (one.turns, one.verdict) == (two.turns, two.verdict)


def test_the_counts_of_environments_are_summed(play):
  """The sum is over all turns that are answered with a message."""
  _, metrics, *_ = play(script)
  assert metrics['environment/answers'] == 5 and metrics['environment/characters'] == 5


def test_later_rewards_are_discounted(play):
  (stopped, *_), *_ = play(script, discount=0.5)
  assert stopped.verdict and stopped.verdict.reward == 1 + 0.5 * 4


def test_only_code_blocks_of_the_policy_count(play):
  found, *_ = play(lambda *_: '1', answer=lambda *_: Observation(as_messages('```')))
  assert not any(one.verdict.has_code_block for one in found)
  found, *_ = play(lambda _row, sample, turn: '1```' if sample else '1' if turn < 2 else '```')
  assert [one.verdict.has_code_block for one in found] == [True, False] * 2


def test_a_turn_has_its_own_limit(play):
  found, _, engine, _ = play(lambda *_: '12345678…', max_turn_tokens=2)
  assert engine.limits[:4] == [2] * 4
  assert all(turn.written == 2 for one in found for turn in one.turns)


def test_only_the_token_limit_truncates_an_episode(play):
  """A turn's limit does not truncate it, nor does an environment that ends it at the limit."""
  long = '1' * LIMIT + '…'
  cases = [(dict(max_turns=1, max_turn_tokens=2), False), (dict(max_turns=1), True)]
  for changes, is_truncated in cases:
    found, *_ = play(lambda *_: long, **changes)
    assert {one.truncated for one in found} == {is_truncated}, changes
  found, *_ = play(lambda *_: long, answer=lambda *_: Observation(done=True))
  assert not any(one.truncated for one in found)


def test_an_episode_ends_if_there_is_no_room_for_another_turn(play):
  def talkative(*_):
    return Observation(as_messages('9' * (LIMIT - 3)))

  found, *_ = play(lambda *_: '1', answer=talkative)
  for one in found:
    assert one.truncated and one.turns == (Turn(len(one.tokens), 0, 0.0),)
    assert one.verdict and one.verdict.outcome == 'wrong'
  # The reply to the last turn needs no room, because nobody reads it.
  found, *_ = play(lambda *_: '1', answer=talkative, max_turns=1)
  assert not any(one.truncated for one in found)


def test_each_episode_has_its_own_seed(play):
  seeds = {}

  def remember(begin, _said):
    seeds.setdefault((begin.task[0], begin.seed), begin)
    return Observation(done=True)

  play(lambda *_: '1', answer=remember)
  assert len(seeds) == 4
  again = dict(seeds)
  seeds.clear()
  play(lambda *_: '1', answer=remember)
  assert seeds == again


def test_own_tokens():
  turns = (Turn(2, 1, 0.0), Turn(1, 2, 0.0))
  assert own_tokens(turns, 8).tolist() == [True, True, False, True, False, False, True, True]
  assert own_tokens((), 3).all()
