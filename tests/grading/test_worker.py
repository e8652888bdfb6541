import pytest

from exgrpo_jax.grading import worker


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('x' * 10, 'x' * 10),
    ('y' * 9 + '</think>12', '</think>12'),  # only thought is cut
    ('y' * 9 + '</think>123', None),  # the end of the thought would be lost
    ('</think>' + 'y' * 20 + '</think>1', 'y</think>1'),
    ('<think>' + 'x' * 4, None),  # its last characters could look like an answer
  ],
  ids=['unchanged', 'thought', 'long_solution', 'last_think', 'no_end'],
)
def test_a_long_response_loses_only_thought(response, expected):
  assert worker.bounded(response, 10) == expected
