"""Sets of real numbers, as answers are written: sympy decides, and here membership does."""

import random
from fractions import Fraction

from exgrpo_jax.grading.answers.equality import equal

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
