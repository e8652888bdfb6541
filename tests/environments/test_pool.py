"""Every turn gets its answer or its failure. tests/workers covers other failures of workers."""

import dataclasses
import re
import types

import pytest

from exgrpo_jax.datatypes import Message, Question, Questions, QuestionSet
from exgrpo_jax.environments import pool, settings
from exgrpo_jax.environments.environment import Observation, as_messages, checked
from exgrpo_jax.environments.pool import Failure
from exgrpo_jax.errors import InputError

CONFIG = settings.EnvironmentConfig(
  name='tests.helpers.environments:Obedient', workers=1, time_limit=30.0, memory_limit=256
)


def question(row=0, **columns):
  return Question(row, (Message('user', 'begin'),), '', 'math', '', 'test', columns)


@pytest.mark.parametrize('reward', [float('nan'), float('-inf'), 1e39, -2e10])
def test_a_reward_that_float32_cannot_compute_with_is_refused(reward):
  message = f'the reward is {re.escape(repr(reward))}, not a number from'
  with pytest.raises(ValueError, match=message):
    checked(Observation(reward=reward))


@pytest.mark.parametrize('reply', [('on', 0.5, False, True, {}), ('on', 0.5), 'on', None])
def test_a_reply_that_is_not_an_observation_is_refused(reply):
  """Including the five values of Gymnasium's step, whose fourth value is not a success."""
  message = f'step must return an Observation, but returned {re.escape(repr(reply))}'
  with pytest.raises(ValueError, match=message):
    checked(reply)


@pytest.mark.parametrize(
  ('messages', 'shown'), [(None, 'None'), (('on', {}), "'on'"), (3, '3'), ([{'role': 'user'}], '{')]
)
def test_an_invalid_message_is_quoted(messages, shown):
  with pytest.raises(ValueError, match=f'^{re.escape(shown)}.* is not a valid message'):
    as_messages(messages)


@pytest.fixture(scope='module')
def workers():
  return pool.Pool(CONFIG)


def play(workers, *said, key='a', seed=7, asked=None):
  """Return the answer to an episode's last turn; the pool may have to replay earlier turns."""
  workers.submit(key, pool.beginning(asked or question(), seed), said)
  (answer,) = workers.answers(wait=True)
  assert answer.key == key
  return answer.result


def said(*words):
  return [{'role': 'user', 'content': ' '.join(map(str, words))}]


def test_an_environment_answers_turn_after_turn(workers):
  assert play(workers, 'x') == Observation(said(1, 7, 'x'), 0.5)
  assert play(workers, 'x', 'y') == Observation(said(2, 7, 'y'), 0.5)
  assert play(workers, 'x', 'y', 'done well') == Observation([], 2.0, True, True)
  # It is over: the same key is another episode.
  assert play(workers, 'x') == Observation(said(1, 7, 'x'), 0.5)
  workers.leave('a')


def test_counts_need_valid_names(workers):
  assert play(workers, 'count stones').counts == {'stones': 2.0}
  for name in ('seconds', 'Stones', 'a/b'):
    failure = play(workers, f'count {name}')
    assert failure.outcome == 'crashed'
    assert f'{name!r} cannot be the name of a count' in failure.reason


def test_a_dropped_episode_starts_over(workers):
  assert play(workers, 'x', key='d').messages == said(1, 7, 'x')
  workers.leave('d')
  assert play(workers, 'y', key='d').messages == said(1, 7, 'y')
  workers.leave('d')
  assert not workers._holder_of


def test_episodes_in_one_worker_are_independent(workers):
  assert play(workers, 'x', key='b', seed=1).messages == said(1, 1, 'x')
  assert play(workers, 'x', key='c', seed=2).messages == said(1, 2, 'x')
  assert play(workers, 'x', 'y', key='b', seed=1).messages == said(2, 1, 'y')
  workers.leave('b')
  workers.leave('c')


@pytest.mark.parametrize(
  ('turn', 'reason'),
  [
    ('raise', 'RuntimeError: as it was told'),
    ('die', '2 workers died during this request, the last with exit status 3'),
    ('strange', 'ValueError: .*is not a valid message'),
  ],
)
def test_a_failure_ends_only_its_own_episode(workers, turn, reason):
  assert play(workers, 'x', key='other', seed=3).messages == said(1, 3, 'x')
  failure = play(workers, turn, key='bad')
  assert isinstance(failure, Failure) and failure.outcome == 'crashed'
  assert re.match(reason, failure.reason)
  # Replayed if its process is gone.
  assert play(workers, 'x', 'y', key='other', seed=3).messages == said(2, 3, 'y')
  workers.leave('other')


@pytest.mark.full
def test_an_environment_that_hangs_is_killed_in_time():
  workers = pool.Pool(dataclasses.replace(CONFIG, time_limit=1.0))
  first = int(play(workers, 'pid', key='other').messages[0]['content'])
  for turns in (['hang'], ['x'], ['x', 'hang 1.5']):  # the limit applies to each turn
    failure = play(workers, *turns, key='bad')
  assert failure == Failure(
    'timed out', 'no answer after 1 s (config.environment.time_limit)', is_lost=True
  )
  again = play(workers, 'pid', 'pid', key='other').messages[0]['content']
  assert int(again) != first  # a new process, which played both turns


def test_prompts_come_from_reset(workers):
  asked = [question(0), question(1, prompt='go')]
  assert workers.prompts(asked, 'game:test') == [said('begin'), said('go')]
  message = (
    f'^config.environment.name={re.escape(CONFIG.name)}: reset failed for game:test, row 2 '
    r'\(ValueError: 3 is not a valid message.*\)\. Correct the environment or the row\.$'
  )
  with pytest.raises(InputError, match=message):
    workers.prompts([*asked, question(2, prompt=3)], 'game:test')


@pytest.mark.parametrize('turn', ['raise', 'strange'])
def test_a_step_that_fails_is_warned_of(workers, monkeypatch, capfd, turn):
  tokenizer = types.SimpleNamespace(encode_all=lambda _: [])
  for text, is_warned_of in (('4', False), (turn, True)):
    monkeypatch.setattr(pool, '_TRIAL', text)
    pool.with_prompts(QuestionSet('game', Rows([3]), []), workers, tokenizer, None, 2, 'drop')
    warning = f': step({turn!r}) failed for game, row 3 ('
    assert (warning in capfd.readouterr().err) == is_warned_of


def test_an_episode_begins_with_the_prompt_in_the_data(workers):
  """Not with the environment's own prompt, which `reset` would extend again."""
  asked = question(prompt='more')
  (prompt,) = workers.prompts([asked], 'game')
  assert prompt == said('begin and more')
  data = types.SimpleNamespace(read=lambda rows: [asked for _ in rows])
  (begun,) = pool.PromptedQuestions(data, [(Message(**prompt[0]),)])
  assert not isinstance(play(workers, 'seed', key='more', asked=begun), Failure)


class Rows(Questions):
  """Questions of these rows."""

  def __init__(self, rows):
    self.rows = rows

  def __len__(self):
    return len(self.rows)

  def read(self, rows):
    return [question(self.rows[row]) for row in rows]

  def select(self, rows):
    return Rows([self.rows[row] for row in rows])


@pytest.mark.parametrize('overlong', ['refuse', 'drop'])
def test_a_question_whose_prompt_is_too_long_is_refused_or_dropped(overlong):
  texts = ['ab', 'abc', 'a']
  held = types.SimpleNamespace(
    prompts=lambda *_: [said(text) for text in texts], tools=lambda: [], try_step=lambda *_: None
  )
  tokenizer = types.SimpleNamespace(
    render=lambda messages, *_: messages[0].content,
    encode_all=lambda rendered: [[1] * len(text) for text in rendered],
  )
  data = QuestionSet('game', Rows(range(3)), [])
  if overlong == 'refuse':
    with pytest.raises(InputError, match='the prompt of row 1 is 3 tokens long'):
      pool.with_prompts(data, held, tokenizer, None, 2, overlong)
    return
  kept = pool.with_prompts(data, held, tokenizer, None, 2, overlong)
  assert [(one.row, one.messages[0].content) for one in kept.questions] == [(0, 'ab'), (2, 'a')]
  assert [len(ids) for ids in kept.prompts] == [2, 1]


def test_a_prompt_that_depends_on_the_seed_is_refused(workers):
  random = dataclasses.replace(question(prompt='random'), messages=(Message('user', '0'),))
  failure = play(workers, 'x', asked=random)
  assert isinstance(failure, Failure) and 'must not depend on the seed' in failure.reason


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('tests.helpers.environments:not_a_class', 'TypeError: it has no arguments'),
    ('tests.helpers.environments:Absent', "AttributeError: .*'Absent'"),
    ('collections:Counter', 'TypeError: Counter has no method reset'),
    ('tests.helpers.environments:dies', 'dies.* ended with exit status 3 while importing it'),
    ('no_such_module:Game', 'ModuleNotFoundError'),
    ('nocolon:', "must have the form 'package.module:Class'"),
  ],
)
def test_a_class_that_cannot_be_used_is_refused(name, message):
  with pytest.raises(InputError, match=message):
    pool.Pool(dataclasses.replace(CONFIG, name=name)).tools()


def test_demonstrations_need_a_demonstrate_method(workers):
  with pytest.raises(InputError, match=r'row 0 \(.*no method demonstrate'):
    workers.demonstrations([question()], [0], 3)
