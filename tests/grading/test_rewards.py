import pytest

from exgrpo_jax.grading import rewards, verifier


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
  assert rewards.think_format(response) == expected


@pytest.mark.parametrize(
  ('length', 'buffer', 'expected'),
  [
    (1, 4, 0.0),
    (6, 4, 0.0),  # the limit less the buffer
    (7, 4, -0.25),
    (9, 4, -0.75),
    (10, 4, -1.0),
    (11, 4, -1.0),
    (5, 10, -0.5),
    (8, 0, 0.0),  # a fifth of 10
    (9, 0, -0.5),
    (10, 0, -1.0),
  ],
)
def test_the_last_tokens_before_the_limit_cost_dapos_punishment(length, buffer, expected):
  assert rewards.overlong(length, max_response=10, overlong_buffer=buffer) == expected


def test_the_outcome_alone_is_correctness():
  assert [rewards.correctness(outcome) for outcome in verifier.OUTCOMES] == [1, 0, 0]


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    (r'</think>So \boxed{2}.', 1.0),
    (r'\boxed{\frac{1}{2}}', 1.0),
    (r'\boxed{2}</think>It is 2.', 0.0),  # only in the thought
    (r'\boxed{2', 0.0),
    (r'\boxed{ }', 0.0),
    ('The answer is 2.', 0.0),
    ('', 0.0),
  ],
)
def test_a_box_is_a_closed_one_after_the_thought_with_something_in_it(response, expected):
  assert rewards.boxed_format(response) == expected


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('So x = 3, déjà vu', 1.0),
    ('所以', 0.0),
    ('so 所以', 0.5),
    ('да ab cd ef', 0.75),
    ('𝑥 + α = π', 1.0),  # no letters but those of formulas
    ('3 + 4 = 7', 1.0),
    ('', 1.0),
  ],
)
def test_a_language_is_as_pure_as_its_letters_are_latin(response, expected):
  assert rewards.latin_script(response) == expected
