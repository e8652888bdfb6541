"""Games of other packages, as environments; a package that is not installed is skipped."""

import sys

import pytest

from exgrpo_jax.environments import pool, settings
from exgrpo_jax.environments.adapters import Gymnasium, TextArena
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.errors import InputError

NAMES = ['left', 'down', 'right', 'up']
SAFE = {'is_slippery': False}


def task(name, **columns):
  return Task(0, [{'role': 'user', 'content': name}], 'won', columns)


def play(make, question, seed, *turns):
  """The prompt of an episode, and what each turn is answered."""
  game = make()
  return [game.reset(question, seed), *map(game.step, turns)]


def test_a_board_is_shown_as_text_and_actions_have_names():
  pytest.importorskip('gymnasium')
  question = task('FrozenLake-v1', seed=0, actions=NAMES, rules='Cross the lake.', options=SAFE)
  way = ['down', 'down', 'right', 'right', 'down', 'right']
  prompt, strange, *moves, last = play(Gymnasium, question, 0, '1', *way)
  asked = 'Answer with one of: left, down, right, up.'
  assert prompt == f'Cross the lake.\n{asked}\n[S]FFF\nFHFH\nFFFH\nHFFG'
  assert strange == Observation(asked)
  assert [move.messages for move in moves[:2]] == [
    '  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG',
    '  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG',
  ]
  assert last[1:4] == (1.0, True, True)
  fallen = play(Gymnasium, question, 0, 'down', 'right')[-1]
  assert fallen[1:4] == (0.0, True, False)


def test_a_game_is_won_at_the_reward_that_the_row_says():
  pytest.importorskip('gymnasium')
  way = ['0', *['1'] * 11, '2']  # around the cliff; each step costs 1
  (*_, lost), (*_, won) = (
    play(Gymnasium, task('CliffWalking-v1', seed=0, **won), 0, *way) for won in ({}, {'won': -1})
  )
  assert lost[1:4] == (-1.0, True, False) and won[1:4] == (-1.0, True, True)


def test_the_row_decides_how_a_game_begins_and_the_seed_what_chance_does():
  pytest.importorskip('gymnasium')
  slippery = task('FrozenLake-v1', seed=0)
  played = {seed: play(Gymnasium, slippery, seed, *'2221') for seed in range(5)}
  assert played[3] == play(Gymnasium, slippery, 3, *'2221')
  assert len({str(answers) for answers in played.values()}) > 1
  assert len({answers[0] for answers in played.values()}) == 1
  begun = {play(Gymnasium, task('Taxi-v4', seed=seed), 0)[0] for seed in range(5)}
  assert len(begun) == 5


def test_what_cannot_be_played_is_refused():
  pytest.importorskip('gymnasium')
  with pytest.raises(ValueError, match="column 'seed' is None; it must be an integer"):
    Gymnasium().reset(task('FrozenLake-v1'), 0)
  with pytest.raises(ValueError, match=r'actions of Pendulum-v1 are Box.*, not numbered'):
    Gymnasium().reset(task('Pendulum-v1', seed=1), 0)


def test_a_package_that_is_absent_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'textarena', None)
  with pytest.raises(InputError, match=r"pip install 'exgrpo_jax\[textarena\]'"):
    TextArena()


def test_a_game_of_textarena_says_what_is_new():
  pytest.importorskip('textarena')
  question = task('GuessTheNumber-v0', seed=3, options={'max_number': 4})
  prompt, *answers = play(TextArena, question, 0, '[1]', '[9]', 'none')
  assert 'between 1 and 4' in prompt
  assert answers[0] == Observation('The target number is higher.')
  assert answers[1].messages.startswith('You attempted an invalid move.')
  assert answers[2][1:4] == (answers[2].reward, True, False) and answers[2].reward < 1
  assert play(TextArena, question, 0, '[2]')[-1] == Observation(reward=1.0, done=True, success=True)
  with pytest.raises(ValueError, match="column 'seed' is '3'"):
    TextArena().reset(task('GuessTheNumber-v0', seed='3'), 0)


def test_games_of_one_process_keep_their_own_chance():
  """Both draw from the same global random numbers."""
  pytest.importorskip('textarena')
  moves = ['[up]', '[left]', '[down]', '[right]'] * 2
  alone = [play(TextArena, task('2048-v0', seed=seed), seed, *moves) for seed in (1, 2)]
  games = [TextArena(), TextArena()]
  begun = [game.reset(task('2048-v0', seed=seed), seed) for game, seed in zip(games, (1, 2))]
  turns = [[game.step(move) for game in games] for move in moves]
  assert [list(answers) for answers in zip(begun, *turns)] == alone
  other = play(TextArena, task('2048-v0', seed=1), 9, *moves)
  assert other[0] == alone[0][0] and other != alone[0]


def test_a_wrong_answer_may_be_given_anew():
  environments = pool.Pool(settings.Config(name='attempts', workers=1, memory_limit=256))
  question = Task(0, [{'role': 'user', 'content': '3 * 4?'}], '12', {})
  begin = pool.Beginning(tuple(question), 0, list(question.messages))
  said = ['it is hard', r'\boxed{13}', r'\boxed{12}']
  answers = []
  for number in range(3):
    environments.submit('key', begin, said[: number + 1])
    answers += [answer.result for answer in environments.answers(wait=True)]
  assert [answer.messages for answer in answers] == [
    [{'role': 'user', 'content': 'I find no answer in that. Try again.'}],
    [{'role': 'user', 'content': 'That is not right. Try again.'}],
    [],
  ]
  assert answers[2] == Observation([], 1.0, True, True)
