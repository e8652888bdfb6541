"""Algebra decides, or says that it cannot; pairs that it decides are in equal.txt."""

import random
from fractions import Fraction

import pytest

from exgrpo_jax.grading.answers import identity, latex, number
from exgrpo_jax.grading.answers.tokens import normalize_spelling, tokenize


def tree(text):
  return latex.parse(tokenize(normalize_spelling(text)))


@pytest.mark.parametrize(
  'text',
  [
    '(x+y+z+1)^{5000}',
    '(x^2+y)^{99}(x+y^2)^{99}',
    r'\frac{1}{x+1}' + r'+\frac{1}{x+2y}' * 60,
    '+'.join(f'x_{{{n}}}^{{2022}}' for n in range(40)),
    r'\binom{a+b+c+x}{60}',
    '((x!)!)!',
    '10^{10^{10}}!',
  ],
)
def test_what_is_too_large_for_algebra_is_undecided(text):
  assert identity.same_expression(tree(text), tree('5x')) is None


def random_tree(generator, depth=3):
  if depth == 0 or generator.random() < 0.2:
    return generator.choice([('symbol', 'n'), ('number', Fraction(generator.randint(1, 3)))])
  x, y = (random_tree(generator, depth - 1) for _ in range(2))
  return generator.choice(
    [
      ('add', (x, y)),
      ('multiply', (x, y)),
      ('negate', x),
      ('divide', x, y),
      ('power', x, ('number', Fraction(generator.choice([2, -1])))),
      ('power', ('number', Fraction(2)), x),
      ('function', 'binom', (('add', (x, ('number', Fraction(2)))), ('number', Fraction(2)))),
      ('factorial', x),
    ]
  )


def value(of, n):
  try:
    return number.evaluate(of, {'n': Fraction(n)}, number.context_of(100))
  except number.ERRORS:
    return None


def test_algebra_and_values_agree():
  generator = random.Random(1)
  trees = [random_tree(generator) for _ in range(120)]
  pairs = [(x, random_tree(generator, 1)) for x in trees]
  pairs += [(('add', (x, y)), ('add', (y, x))) for x, y in pairs]
  decided = [
    (x, y, verdict) for x, y in pairs if (verdict := identity.same_expression(x, y)) is not None
  ]
  assert len(decided) > len(pairs) // 2
  assert {verdict for _, _, verdict in decided} == {True, False}
  for x, y, verdict in decided:
    values = [(a, b) for n in range(1, 30) if None not in (a := value(x, n), b := value(y, n))]
    if len(values) > 8:
      agree = all(abs(a - b) <= abs(a) * Fraction(1, 10**40) for a, b in values)
      assert agree == verdict, (x, y)
