"""The examples of docs/environments.md do what the page says."""

import pytest

from exgrpo_jax.environments.adapters import TextArena
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.tools import Tools, describe
from tests.docs import documents

EXAMPLE, SHOP, BOARDS = documents.blocks((documents.DOCS / 'environments.md').read_text(), 'python')


def test_the_example_plays():
  names = {}
  exec(EXAMPLE, names)
  environment, prompt = names['HotAndCold'](), [{'role': 'user', 'content': '1-64'}]
  assert environment.reset(Task(0, prompt, '40', {}), 0) == prompt
  answers = [environment.step(said) for said in ('30', '60', 'what?', '41', ' 40')]
  assert [answer.messages for answer in answers[:4]] == ['hotter', 'colder', 'colder', 'hotter']
  assert [answer.reward for answer in answers] == [0.1, 0.0, 0.0, 0.1, 1.0]
  assert answers[-1] == Observation(reward=1.0, done=True, success=True)


def test_the_shop_sells():
  names = {}
  exec(SHOP, names)
  environment = Tools([names['Shop']])
  assert describe(names['Shop']().buy)['function']['name'] == 'buy'
  (prompt,) = environment.reset(Task(0, [{'role': 'user', 'content': 'Buy!'}], '', {'money': 3}), 0)
  assert prompt['content'] == 'Buy!\nYou have 3 coins.'
  call = '<tool_call>{"name": "buy", "arguments": {"apples": 3}}</tool_call>'
  assert environment.step(call).messages[0]['content'] == '0 coins left'
  done = environment.step('Done.')
  assert (done.reward, done.done, done.success) == (1.0, True, True)


def test_the_boards_can_be_played():
  pytest.importorskip('textarena')
  names = {}
  exec(BOARDS, names)
  rows = names['get_task']()
  (first, *_), (held_out, *_) = rows['train'], rows['test']
  prompts = [
    TextArena().reset(Task(0, [{'role': 'user', 'content': row['question']}], 'won', row), 0)
    for row in (first, held_out)
  ]
  assert 'Sokoban' in prompts[0] and prompts[0] != prompts[1]
