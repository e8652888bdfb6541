import random
from fractions import Fraction

import pytest

from exgrpo_jax.grading.answers import identity, latex, number
from exgrpo_jax.grading.answers.equality import equal
from exgrpo_jax.grading.answers.spelling import normalize_spelling
from exgrpo_jax.grading.answers.tokens import tokenize


def tree(text):
  return latex.parse(tokenize(normalize_spelling(text)))


# Too large to evaluate, or of letters that no small number fits; left and right are the same.
SAME = [
  ('x^{2022}+1', '1+x^{2022}'),
  (r'\frac{x^{4000}-1}{x^{2000}-1}', 'x^{2000}+1'),
  ('2^{100000}', '4^{50000}'),
  ('9^{9^9}', r'3^{2\cdot 9^9}'),
  (r'2^{1000n}\cdot 2', '2^{1000n+1}'),
  (r'2^{1500n+\frac{3}{2}}', r'2^{1500n}\cdot 2\sqrt{2}'),
  (r'4^{800n}', r'2^{1600n}'),
  (r'\frac{2024!}{1012!^2}', r'\binom{2024}{1012}'),
  (r'\binom{2023}{n}', r'\binom{2023}{2023-n}'),
  (r'\binom{2023}{n}', r'\frac{2023!}{n!(2023-n)!}'),
  (r'\binom{2024}{k}', r'\binom{2023}{k}+\binom{2023}{k-1}'),
  (r'\frac{(n+2000)!}{(n+1998)!}', '(n+2000)(n+1999)'),
  (r'\sin(10^{30}x)+1', r'1+\sin(10^{30}\cdot x)'),
]
DIFFERENT = [
  ('x^{2022}+1', 'x^{2022}+2'),
  ('2^{100000}', '4^{50001}'),
  ('9^{9^9}', '9^{9^9}+1'),
  (r'\binom{2023}{n}', r'\binom{2023}{n+1}'),
  (r'\binom{2024}{k}', r'\binom{2023}{k}-\binom{2023}{k-1}'),
  (r'\binom{n}{20}', '0'),
  (r'\binom{n}{20}', r'\binom{n}{16}'),
  (r'\lfloor n/20\rfloor', r'\lfloor n/30\rfloor'),
  ('1/0', '2/0'),
  ('0^0', '1'),
  # Zero over zero is no number, however it is written.
  ('5', r'5\cdot\frac{\sqrt{2}\sqrt{2}-2}{\sqrt{2}\sqrt{2}-2}'),
  ('5', r'5\cdot\frac{\sin 0}{\sin 0}'),
  ('5', r'5\cdot\frac{\sin^2 x+\cos^2 x-1}{\sin^2 x+\cos^2 x-1}'),
  ('5', r'5\cdot\frac{2\cdot 2^{99999}-2^{100000}}{2\cdot 2^{99999}-2^{100000}}'),
]


@pytest.mark.parametrize(('x', 'y'), SAME)
def test_algebra_decides_what_numbers_cannot(x, y):
  assert equal(x, y, 'math') and equal(y, x, 'math')


@pytest.mark.parametrize(('x', 'y'), DIFFERENT)
def test_algebra_accepts_nothing_else(x, y):
  assert not equal(x, y, 'math') and not equal(y, x, 'math')


def test_equations_of_high_degree_are_compared_up_to_a_factor():
  assert equal('2x^{2022} - 2y = 0', 'y = x^{2022}', 'math')
  assert not equal('2x^{2022} - y = 0', 'y = x^{2022}', 'math')
  assert equal('y > x^{2022}', '2x^{2022} - 2y < 0', 'math')
  assert not equal('y > x^{2022}', '2x^{2022} - 2y > 0', 'math')


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
