"""The environment of docs/environments.md does what the page says."""

from exgrpo_jax.environments.environment import Observation, Task
from tests.docs import documents

(EXAMPLE,) = documents.blocks((documents.DOCS / 'environments.md').read_text(), 'python')


def test_the_example_plays():
  names = {}
  exec(EXAMPLE, names)
  environment, prompt = names['HotAndCold'](), [{'role': 'user', 'content': '1-64'}]
  assert environment.reset(Task(0, prompt, '40', {}), 0) == prompt
  answers = [environment.step(said) for said in ('30', '60', 'what?', '41', ' 40')]
  assert [answer.messages for answer in answers[:4]] == ['hotter', 'colder', 'colder', 'hotter']
  assert [answer.reward for answer in answers] == [0.1, 0.0, 0.0, 0.1, 1.0]
  assert answers[-1] == Observation(reward=1.0, done=True, success=True)
