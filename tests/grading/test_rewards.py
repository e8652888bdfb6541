import pytest

from exgrpo_jax.grading import rewards


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('So it is 2.\n</think>\nThe answer is 2.', 1.0),
    ('So it is 2.', 0.0),
    ('<think>\nSo it is 2.\n</think>\nThe answer is 2.', 0.0),  # the prompt has opened it
    ('a</think>b</think>c', 0.0),
    ('a</think>b<think>', 0.0),
    ('\n</think>The answer is 2.', 0.0),
    ('So it is 2.</think>\n', 0.0),
  ],
)
def test_the_papers_format_is_one_end_of_thought_between_two_texts(response, expected):
  assert rewards.think_format(response, '2', 'wrong') == expected
