"""Sets of real numbers, as answers are written; sympy decides, and here membership does."""

import random
from fractions import Fraction

import pytest

from exgrpo_jax.grading.answers.equality import equal

SAME = [
  (r'(0,36)\setminus\{9\}', r'(0,9)\cup(9,36)'),
  (r'(0,36)-\{9\}', r'(0,9)\cup(9,36)'),
  (r'(0,36)\setminus 9', r'0<x<36, x \neq 9'),
  (r'(0,36)∖\{9\}', r'\{x : 0<x<36, x \ne 9\}'),
  ('(0,5)', r'(0,2)\cup[2,5)'),
  ('(1,3]', r'(-\infty,3]\cap(1,5)'),
  (r'[1,2]\cup\{3\}', r'\{3\}\cup[1,2]'),
  (r'\mathbb{R}\setminus\{-2,2\}', r'(-\infty,-2)\cup(-2,2)\cup(2,\infty)'),
  (r'\mathbb{R}\setminus\{-2,2\}', r'x \neq 2, x \neq -2'),
  (r'(-\infty,-2)\cup(-2,\infty)', r'\mathbb{R}\backslash\{-2\}'),
  (r'((0,4)\cup(6,9))\setminus\{1\}', r'(0,1)\cup(1,4)\cup(6,9)'),
  (r'(-\infty,\sqrt{2})\cup(\sqrt{2},2)', r'(-\infty,2)\setminus\{\frac{2}{\sqrt{2}}\}'),
  (r'(-\infty,a)\cup(a,\infty)', r'\mathbb{R}\setminus\{a\}'),
  (r'\mathbb{R}\setminus\mathbb{Z}', r'\mathbb{R}\setminus\mathbb{Z}'),
  (r'\{2\}', r'[1,2]\cap[2,5]'),
  (r'\emptyset', r'(1,2)\cap[2,5)'),
]
DIFFERENT = [
  (r'(0,36)\setminus\{9\}', '(0,36)'),
  (r'(0,36)\setminus\{9\}', r'(0,9]\cup[9,36)'),
  (r'(0,36)\setminus\{9\}', r'(0,36)\setminus\{8\}'),
  (r'(0,5)', r'(0,2)\cup(2,5)'),
  (r'(0,3)\cup(1,5)', 'x>0, x<5'),  # 'and' and 'or' are both a comma
  (r'(0,1)\cup(2,3)', '(0,1),(2,3)'),  # two points, maybe
  (r'\mathbb{R}', r'(-\infty,a)\cup[b,\infty)'),
  (r'\mathbb{R}\setminus\mathbb{Z}', r'\mathbb{R}\setminus\mathbb{Q}'),
  (r'(1,2)\cup(3,4)\cap(0,9)', r'(1,2)\cup(3,4)'),  # which comes first?
  (r'(0,1)\cup(1,2)', r'(5,1)\cup(0,1)\cup(1,2)'),
  ('2', r'\{2\}\cup\{3\}'),
  (r'\{1,2\}', r'\{(1,2)\}\cup\{1\}'),
]


@pytest.mark.parametrize(('x', 'y'), SAME)
def test_the_same_set_in_another_form(x, y):
  assert equal(x, y, 'math') and equal(y, x, 'math')


@pytest.mark.parametrize(('x', 'y'), DIFFERENT)
def test_another_set(x, y):
  assert not equal(x, y, 'math') and not equal(y, x, 'math')


# Two half-units a number, from below the lowest end to above the highest.
POINTS = [Fraction(halves, 2) for halves in range(-1, 10)]


def random_set(generator, depth=2):
  """A set of numbers up to 4: its text, and those of POINTS that it holds."""
  kind = generator.choice(['interval', 'finite', 'cup', 'cap', 'setminus'][: 5 if depth else 2])
  if kind == 'finite':
    members = generator.sample(range(5), generator.randint(1, 2))
    return r'\{' + ','.join(map(str, members)) + r'\}', {Fraction(member) for member in members}
  if kind == 'interval':
    low, high = sorted(generator.sample(range(5), 2))
    opening, closing = generator.choice('(['), generator.choice(')]')
    held = {x for x in POINTS if low < x < high}
    held |= {Fraction(low)} if opening == '[' else set()
    held |= {Fraction(high)} if closing == ']' else set()
    return f'{opening}{low},{high}{closing}', held
  (x, in_x), (y, in_y) = random_set(generator, depth - 1), random_set(generator, depth - 1)
  held = {'cup': in_x | in_y, 'cap': in_x & in_y, 'setminus': in_x - in_y}[kind]
  return rf'({x})\{kind}({y})', held


def test_two_sets_are_the_same_where_they_hold_the_same_numbers():
  generator = random.Random(0)
  sets = [random_set(generator) for _ in range(60)]
  operations = [(text, held) for text, held in sets if '\\c' in text or 'setminus' in text]
  wrong = [
    (x, y)
    for (x, in_x), (y, in_y) in zip(operations, operations[1:] + operations[:1])
    if equal(x, y, 'math') != (in_x == in_y)
  ]
  assert wrong == []
