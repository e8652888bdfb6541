"""The rewards that come with the package, and what counts as a code block."""

import pytest

from exgrpo_jax.grading import rewards, verifier


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('So it is 2.\n</think>\nThe answer is 2.', 1.0),
    ('So it is 2.', 0.0),
    ('<think>\nSo it is 2.\n</think>\nThe answer is 2.', 1.0),
    (' \n<think>So it is 2.</think>The answer is 2.', 1.0),
    ('<think><think>So it is 2.</think>The answer is 2.', 0.0),
    ('Well: <think>So it is 2.</think>The answer is 2.', 0.0),
    ('<think>\n</think>The answer is 2.', 0.0),
    ('<think>So it is 2.', 0.0),
    ('a</think>b</think>c', 0.0),
    ('a</think>b<think>', 0.0),
    ('\n</think>The answer is 2.', 0.0),
    ('So it is 2.</think>\n', 0.0),
  ],
)
def test_the_papers_format_is_one_end_of_thought_between_two_texts(response, expected):
  assert rewards.think_format(response) == expected


@pytest.mark.parametrize(
  ('buffer', 'punishments'),  # by length, of a limit of 10; a buffer of 0 is a fifth of it
  [
    (4, {1: 0, 6: 0, 7: -0.25, 9: -0.75, 10: -1, 11: -1}),
    (10, {5: -0.5}),
    (0, {8: 0, 9: -0.5, 10: -1}),
  ],
)
def test_the_last_tokens_before_the_limit_cost_dapos_punishment(buffer, punishments):
  for length, expected in punishments.items():
    assert rewards.overlong(length, max_response=10, overlong_buffer=buffer) == expected


def test_the_outcome_alone_is_correctness():
  assert [rewards.correctness(outcome) for outcome in verifier.OUTCOMES] == [1, 0, 0]


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    (r'</think>So \boxed{2}.', 1.0),
    (r'\boxed{2}</think>It is 2.', 0.0),  # only in the thought
    (r'\boxed{2', 0.0),
    (r'\boxed{ }', 0.0),
    ('The answer is 2.', 0.0),
  ],
)
def test_a_box_is_a_closed_one_after_the_thought_with_something_in_it(response, expected):
  assert rewards.boxed_format(response) == expected


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('So x = 3, déjà vu', 1.0),
    ('所以', 0.0),
    ('да ab cd ef', 0.75),
    ('𝑥 + α = π', 1.0),  # no letters but those of formulas
    ('3 + 4 = 7', 1.0),
  ],
)
def test_a_language_is_as_pure_as_its_letters_are_latin(response, expected):
  assert rewards.latin_script(response) == expected


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('```python\nprint(1)\n```', True),
    ('Let us compute it.\n\n  ```\nx = 1', True),  # indented, and cut before its end
    ('the function `f`, ``g`` and ```h``` in a line', False),
    ('``\n`', False),
  ],
)
def test_a_line_that_begins_with_three_backticks_is_a_code_block(text, expected):
  assert rewards.has_code_block(text) == expected
