import pytest

from exgrpo_jax.grading.answers.equality import equal

SPELLINGS = [
  r'\binom{n}{2}',
  r'\dbinom{n}{2}',
  r'\tbinom n2',
  r'{n \choose 2}',
  r'n \choose 2',
  'C(n, 2)',
  'C_n^2',
  'C_{n}^{2}',
  '{}_nC_2',
  r'\frac{n!}{2!(n-2)!}',
  r'\frac{n(n-1)}{2}',
]


@pytest.mark.parametrize('text', SPELLINGS)
def test_a_binomial_coefficient_in_every_spelling(text):
  assert equal(text, r'\binom{n}{2}', 'math')
  assert not equal(text, r'\binom{n}{3}', 'math')
  assert not equal(f'{text}+1', r'\binom{n}{2}', 'math')


def test_the_value_of_a_coefficient():
  assert equal('C(5, 2)', '10', 'math') and equal('^5C_2', '10', 'math')
  assert equal(r'\binom{5}{2}', 'C(5, 2)', 'math')


@pytest.mark.parametrize(
  ('text', 'truth'),
  [
    ('10', 'C(5, 2)'),  # the truth may be a point
    ('C(10, 1)', 'C(5, 2)'),
    ('C(2, 3)', '0'),
    ('C(1, 3)', 'C(2, 3)'),
    ('x^2C_1', r'\binom{2}{1}'),
    ('C', '5'),
    ('C_1', 'C_2'),
    ('C_1^2', 'C_2^2'),
    (r'\binom{2}{3}', 'C(2, 3)'),
  ],
)
def test_a_point_or_a_constant_is_no_coefficient(text, truth):
  assert not equal(text, truth, 'math')
