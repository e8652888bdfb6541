"""Our environments: their rules, and the players whom a warm start learns from."""

import numpy as np
import pytest

from exgrpo_jax.configs import lake as lake_config
from exgrpo_jax.data.tasks import games, sums
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.toys import Calculator, Guess, Lake
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.settings import parse_config

WON = Observation(reward=1.0, done=True, success=True)
MAP = '@.o\n...\no.G'


def begun(make, prompt, answer=''):
  """An episode on this prompt, which is shown as it is."""
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


def test_a_wrong_answer_ends_the_episode():
  assert begun(Calculator, '1+2', '3').step('=4') == Observation(done=True)


def test_a_lake_is_crossed_square_by_square():
  environment = begun(Lake, MAP)
  assert answers(environment, 'right', 'up', 'jump', 'down', ' right ') == [
    '.@o\n...\no.G',
    '.@o\n...\no.G',  # the edge
    '?',
    '..o\n.@.\no.G',
    '..o\n..@\no.G',
  ]
  assert environment.step('down') == WON


def test_a_hole_ends_the_episode():
  environment = begun(Lake, MAP)
  environment.step('right')
  assert environment.step('right') == Observation(done=True)


def test_the_way_to_the_goal_goes_around_holes():
  assert games.distances(['@o.', '...', 'oG.']) == {
    (2, 1): 0,
    (1, 1): 1,
    (2, 2): 1,
    (1, 0): 2,
    (1, 2): 2,
    (0, 0): 3,
    (0, 2): 3,
  }


@pytest.fixture(scope='module')
def lakes():
  return games.lake_rows()


@pytest.mark.parametrize('side', lake_config.SIDES)
def test_nearly_every_lake_can_be_crossed_within_the_turns_of_its_config(side, lakes):
  config = lake_config.get_config(side)
  ways = [int(row['answer']) for row in lakes[config.data.train.removeprefix('lake:')]]
  turns = parse_config(config).environment.max_turns
  assert len(ways) * 0.99 < sum(way <= turns for way in ways)


def test_a_side_that_no_lake_has_is_refused():
  with pytest.raises(InputError, match="'7' after the colon must be one of 4, 5, 6"):
    lake_config.get_config('7')


def test_no_lake_comes_twice(lakes):
  """In no split, whatever its side, so that held-out lakes are new."""
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
def test_the_player_of_a_warm_start_is_of_unequal_quality(make, rows, turns, lakes, monkeypatch):
  """So that the policy knows better ways than the ones that it mostly takes."""
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
