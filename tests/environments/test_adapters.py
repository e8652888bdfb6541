"""Games of other packages, skipped if not installed, and our own environments."""

import sys

import numpy as np
import pytest

from exgrpo_jax.configs import lake as lake_config
from exgrpo_jax.data.tasks import games, sums
from exgrpo_jax.environments import pool, settings
from exgrpo_jax.environments.adapters import Gymnasium, TextArena
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.toys import Calculator, Guess, Lake
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.settings import parse_config

NAMES = ['left', 'down', 'right', 'up']
SAFE = {'is_slippery': False}


def task(name, **columns):
  return Task(0, [{'role': 'user', 'content': name}], 'won', columns)


def play(make, question, seed, *turns):
  """Return an episode's prompt and the answer to each turn."""
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
  boards = ['SFFF\n[F]HFH\nFFFH\nHFFG', 'SFFF\nFHFH\n[F]FFH\nHFFG']
  assert [move.messages for move in moves[:2]] == [f'  (Down)\n{board}' for board in boards]
  assert last[1:4] == (1.0, True, True)
  fallen = play(Gymnasium, question, 0, 'down', 'right')[-1]
  assert fallen[1:4] == (0.0, True, False)


def test_the_row_sets_the_reward_that_wins_a_game():
  pytest.importorskip('gymnasium')
  way = ['0', *['1'] * 11, '2']  # around the cliff; each step costs 1
  (*_, lost), (*_, won) = (
    play(Gymnasium, task('CliffWalking-v1', seed=0, **won), 0, *way) for won in ({}, {'won': -1})
  )
  assert lost[1:4] == (-1.0, True, False) and won[1:4] == (-1.0, True, True)


def test_the_row_determines_the_start_and_the_seed_all_later_randomness():
  pytest.importorskip('gymnasium')
  slippery = task('FrozenLake-v1', seed=0)
  played = {seed: play(Gymnasium, slippery, seed, *'2221') for seed in range(5)}
  assert played[3] == play(Gymnasium, slippery, 3, *'2221')
  assert len({str(answers) for answers in played.values()}) > 1
  assert len({answers[0] for answers in played.values()}) == 1
  begun = {play(Gymnasium, task('Taxi-v4', seed=seed), 0)[0] for seed in range(5)}
  assert len(begun) == 5


def test_unplayable_rows_are_refused():
  pytest.importorskip('gymnasium')
  with pytest.raises(ValueError, match="column 'seed' is None, but must be an integer"):
    Gymnasium().reset(task('FrozenLake-v1'), 0)
  with pytest.raises(ValueError, match=r'Pendulum-v1 has .* Box.*, which is not discrete'):
    Gymnasium().reset(task('Pendulum-v1', seed=1), 0)


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'textarena', None)
  with pytest.raises(InputError, match=r"pip install 'exgrpo_jax\[textarena\]'"):
    TextArena()


def test_textarena_returns_only_new_text():
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


def test_games_in_one_process_have_separate_random_states():
  """Both use the global random number generators."""
  pytest.importorskip('textarena')
  moves = ['[up]', '[left]', '[down]', '[right]'] * 2
  alone = [play(TextArena, task('2048-v0', seed=seed), seed, *moves) for seed in (1, 2)]
  games = [TextArena(), TextArena()]
  begun = [game.reset(task('2048-v0', seed=seed), seed) for game, seed in zip(games, (1, 2))]
  turns = [[game.step(move) for game in games] for move in moves]
  assert [list(answers) for answers in zip(begun, *turns)] == alone
  other = play(TextArena, task('2048-v0', seed=1), 9, *moves)
  assert other[0] == alone[0][0] and other != alone[0]


def test_a_wrong_answer_may_be_retried():
  environments = pool.Pool(settings.EnvironmentConfig(name='attempts', workers=1, memory_limit=256))
  question = Task(0, [{'role': 'user', 'content': '3 * 4?'}], '12', {})
  begin = pool.Beginning(tuple(question), 0, list(question.messages))
  said = ['it is hard', r'\boxed{13}', r'\boxed{12}']
  answers = []
  for number in range(3):
    environments.submit('key', begin, said[: number + 1])
    answers += [answer.result for answer in environments.answers(wait=True)]
  shown = [message['content'] for answer in answers for message in answer.messages]
  assert shown == ['I find no answer in that. Try again.', 'That is not right. Try again.']
  assert answers[2] == Observation([], 1.0, True, True)


# ---- Our environments: their rules, and the players for warm starts ----

WON = Observation(reward=1.0, done=True, success=True)
MAP = '@.o\n...\no.G'


def begun(make, prompt, answer=''):
  """Begin an episode, and check that the prompt is returned unchanged."""
  environment, messages = make(), [{'role': 'user', 'content': prompt}]
  assert environment.reset(Task(0, messages, answer, {}), 0) == messages
  return environment


def answers(environment, *turns):
  return [environment.step(turn).messages for turn in turns]


def test_a_number_is_found_by_higher_and_lower():
  environment = begun(Guess, '1-64', '37')
  said = answers(environment, '32', '50', '', '3 7', '٣')
  assert said == ['higher', 'lower', '?', '?', '?']
  assert environment.step(' 37\n') == WON


@pytest.mark.parametrize('number', games.NUMBERS)
def test_halving_finds_every_number_in_seven_turns(number):
  environment, words = begun(Guess, '1-64', str(number)), games.halving(number).split()
  *missed, found = words[::2]
  assert answers(environment, *missed) == words[1::2]
  assert environment.step(found).success and len(missed) <= 6


def test_a_calculator_adds_two_numbers_at_a_time():
  environment = begun(Calculator, '4821+377-5300', '-102')
  said = answers(environment, '4821+377', '5198-5300', '7', '4*5', '1+2+3', '=x')
  assert said == ['5198', '-102', '?', '?', '?', '?']
  assert environment.step('=-102') == WON
  assert begun(Calculator, '1+2', '3').step('=4') == Observation(done=True)


def test_a_lake_is_crossed_square_by_square():
  environment = begun(Lake, MAP)
  edge = '.@o\n...\no.G'  # the move up changes nothing
  said = answers(environment, 'right', 'up', 'jump', 'down', ' right ')
  assert said == [edge, edge, '?', '..o\n.@.\no.G', '..o\n..@\no.G']
  assert environment.step('down') == WON
  environment = begun(Lake, MAP)
  environment.step('right')
  assert environment.step('right') == Observation(done=True)  # a hole


def test_the_way_to_the_goal_goes_around_holes():
  ways = {0: [(2, 1)], 1: [(1, 1), (2, 2)], 2: [(1, 0), (1, 2)], 3: [(0, 0), (0, 2)]}
  distances = {square: way for way, squares in ways.items() for square in squares}
  assert games.distances(['@o.', '...', 'oG.']) == distances


@pytest.fixture(scope='module')
def lakes():
  return games.lake_rows()


@pytest.mark.full
@pytest.mark.parametrize('side', lake_config.SIDES)
def test_nearly_every_lake_can_be_crossed_within_the_turns_of_its_config(side, lakes):
  config = lake_config.get_config(side)
  ways = [int(row['answer']) for row in lakes[config.data.train.removeprefix('lake:')]]
  turns = parse_config(config).environment.max_turns
  assert len(ways) * 0.99 < sum(way <= turns for way in ways)


def test_an_unknown_side_of_lakes_is_refused():
  with pytest.raises(InputError, match="'7' after the colon must be one of 4, 5, 6"):
    lake_config.get_config('7')


@pytest.mark.full
def test_no_lake_comes_twice(lakes):
  """Across all splits and sides, so that held-out lakes are new."""
  maps = [row['messages'][0]['content'] for rows in lakes.values() for row in rows]
  assert len(maps) == len(set(maps)) == sum(sum(s.values()) for s in games.LAKE_SPLITS.values())
  assert set(lakes) == {
    f'{split}_{side}' for side, splits in games.LAKE_SPLITS.items() for split in splits
  }


@pytest.mark.parametrize(
  ('make', 'rows', 'turns'),
  [
    (Guess, lambda _: games.guess_rows()['pretraining'], 7),
    (Calculator, lambda _: sums.calculator_rows()['pretraining'], 8),
    (Lake, lambda lakes: lakes['pretraining_4'], 10),
  ],
)
def test_warm_start_players_win_only_some_episodes(make, rows, turns, lakes, monkeypatch):
  """So that the policy also learns better moves than the ones that it mostly makes."""
  monkeypatch.setattr(sums, 'CALCULATOR_SPLITS', {'pretraining': 300})
  rng, solved = np.random.default_rng(0), []
  for number, row in enumerate(rows(lakes)[:300]):
    environment = make()
    environment.reset(Task(number, row['messages'], row['answer'], {}), 0)
    for _ in range(turns):
      if (last := environment.step(environment.demonstrate(rng))).done:
        break
    solved.append(last.success)
  assert 0.4 < np.mean(solved) < 0.7
