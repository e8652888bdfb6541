"""Expression trees to numbers, and whether two trees are the same quantity.

Rational numbers are exact. Others are worked out to 100 digits, or to 600 where the
first do not decide. An expression in letters is worked out at several points.
Everything is bounded: what would be too large to hold has no value here.
"""

import functools
import math
import zlib
from collections.abc import Mapping
from fractions import Fraction

import mpmath

from exgrpo_jax.cursor import symbols

_DIGITS = (100, 600)
_MAX_INTEGER_BITS = 33_300  # 10^4 digits
_MAX_FRACTION_BITS = 8_000
_MAX_FACTORIAL = 1000
_MAX_NODES_TWICE = 80  # larger trees are worked out to 100 digits only
_POINTS = 5  # three positive, two of mixed sign
_WHOLE = frozenset({'floor', 'ceil', 'binom', 'factorial'})
_INVERSES = {'sec': 'cos', 'csc': 'sin', 'cot': 'tan'}
_NAMED = {'arcsin': 'asin', 'arccos': 'acos', 'arctan': 'atan'}


class UndefinedError(ArithmeticError):
  """No number, or none within the bounds."""


_ERRORS = (ArithmeticError, ValueError, TypeError, KeyError)


@functools.cache
def _context(digits: int):
  """Numbers of one precision; it is never changed, so that threads may share it."""
  context = mpmath.MPContext()
  context.dps = digits
  return context


def exact(tree) -> Fraction | None:
  """The rational number a tree without letters is, where it is one by its form."""
  try:
    value = _value(tree, {}, _context(_DIGITS[0]))
  except _ERRORS:
    return None
  return value if isinstance(value, Fraction) else None


def approximate(tree) -> float | None:
  """A closed tree as a real number, for ordering; None where it has none."""
  try:
    value = _value(tree, {}, _context(_DIGITS[0]))
    return None if _is_complex(value) else float(value)
  except _ERRORS:
    return None


def between(tree, low: Fraction, high: Fraction) -> bool:
  """Whether a tree without letters is a real number from `low` to `high`."""
  context = _context(_DIGITS[0])
  try:
    value = _value(tree, {}, context)
  except _ERRORS:
    return False
  if _is_complex(value):
    return False
  return _converted(low, context) <= context.re(value) <= _converted(high, context)


def same(x, y) -> bool:
  """Whether two trees are the same quantity wherever both have a value."""
  if x == y:
    return True
  letters = symbols(x) | symbols(y)
  if not letters:
    return _same_at(x, y, {}) is True
  return _agree(((x, y),), letters)


def proportional(x, y, positive: bool) -> bool:
  """Whether x is a constant times y, neither being zero; `positive`: a positive constant."""
  letters = symbols(x) | symbols(y)
  if not letters or symbols(x) != symbols(y):
    return False
  ratios = [ratio for index in range(_POINTS)
            if (ratio := _ratio(x, y, _point(letters, index, False))) is not None]
  if len(ratios) < 3 or any(_is_complex(r) or r == 0 or (positive and r < 0) for r in ratios):
    return False
  return all(_close(ratio, ratios[0], _DIGITS[0]) for ratio in ratios[1:])


def linear(tree, letter: str) -> tuple[Fraction, Fraction] | None:
  """a and b where the tree is a·letter + b with rational a and b."""
  values = []
  for at in (0, 1, 2, -3):
    try:
      values.append(_value(tree, {letter: Fraction(at)}, _context(_DIGITS[0])))
    except _ERRORS:
      return None
  if not all(isinstance(v, Fraction) for v in values):
    return None
  b, a = values[0], values[1] - values[0]
  return (a, b) if values[2] == 2 * a + b and values[3] == -3 * a + b else None


def _agree(pairs, letters) -> bool:
  (x, y), = pairs
  used_x, used_y = _heads(x) & _WHOLE, _heads(y) & _WHOLE
  decided = 0
  if used_x or used_y:
    for index in range(3 * _POINTS):
      verdict = _same_at(x, y, _point(letters, index, True))
      if verdict is False:
        return False
      decided += verdict is True
    if decided < 3:
      return False
    if used_x == used_y or (used_x | used_y) & {'binom', 'factorial'}:
      return True
  decided = 0
  for index in range(_POINTS):
    verdict = _same_at(x, y, _point(letters, index, False), real=index >= 3)
    if verdict is False:
      return False
    decided += verdict is True
  return decided >= 2


def _point(letters, index: int, whole: bool) -> dict:
  """A value for each letter, by its name: the same in every comparison."""
  point = {}
  for letter in letters:
    draw = zlib.crc32(f'{letter} {index}'.encode()) % 10007
    value = Fraction(1 + draw % 14) if whole else Fraction(draw + 4000, 5003)
    point[letter] = -value if index >= 3 and draw % 2 and not whole else value
  return point


def _rounded_point(point: Mapping, context) -> dict:
  # A large power of a fraction has too many digits to be kept exactly.
  return {letter: value if value.denominator == 1 else _converted(value, context)
          for letter, value in point.items()}


def _same_at(x, y, point: Mapping, real: bool = False) -> bool | None:
  """Equal, different, or None where one of them has no value (or none that is real)."""
  for digits in _DIGITS[:1 + (_size(x) + _size(y) < _MAX_NODES_TWICE)]:
    context = _context(digits)
    try:
      at = _rounded_point(point, context)
      a, b = _value(x, at, context), _value(y, at, context)
    except _ERRORS:
      continue
    if real and (_is_complex(a) or _is_complex(b)):
      return None
    if not _close(a, b, digits):
      return False
    if max(_length(a), _length(b)) < digits // 4:
      return True
  return None


def _ratio(x, y, point):
  context = _context(_DIGITS[0])
  try:
    at = _rounded_point(point, context)
    a, b = _value(x, at, context), _value(y, at, context)
    return _divided(a, b, context)
  except _ERRORS:
    return None


def _length(value) -> int:
  """Digits of a rational number; an approximation has none to compare with."""
  if not isinstance(value, Fraction):
    return 0
  return (value.numerator.bit_length() + value.denominator.bit_length()) * 3 // 10


def _close(a, b, digits: int) -> bool:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a == b
  context = _context(digits)
  a, b = _converted(a, context), _converted(b, context)
  return abs(a - b) <= context.mpf(10) ** -(digits // 2) * max(abs(a), abs(b))


def _is_complex(value) -> bool:
  if isinstance(value, Fraction) or not hasattr(value, 'imag'):
    return False
  return abs(value.imag) > abs(value) * mpmath.mpf(10) ** -40


def _heads(tree) -> frozenset:
  if not isinstance(tree, tuple) or not tree:
    return frozenset()
  own = {tree[0]} if isinstance(tree[0], str) else set()
  if tree[0] == 'function':
    own.add(tree[1])
  return frozenset(own).union(*(_heads(child) for child in tree if isinstance(child, tuple)))


def _size(tree) -> int:
  return 1 + sum(_size(child) for child in tree if isinstance(child, tuple))


def _value(tree, point: Mapping, context):
  """Fraction, mpf or mpc; raises UndefinedError, or an error of arithmetic."""
  head = tree[0]
  if head == 'number':
    return _bounded(tree[1], context)
  if head == 'symbol':
    return _letter(tree[1], point, context)
  if head == 'function':
    return _function(tree[1], tree[2], point, context)
  if head == 'call':
    return _call(tree, point, context)
  if head not in _RULES:
    raise UndefinedError(head)
  children = tree[1] if head in ('add', 'multiply') else tree[1:]
  return _RULES[head]([_value(child, point, context) for child in children], context)


def _letter(name: str, point, context):
  if name == 'pi':
    return +context.pi
  if name == 'e':
    return +context.e
  if name == 'i':
    return context.mpc(0, 1)
  return point[name]


def _call(tree, point, context):
  """An unknown function's value: drawn by its name and the values of its arguments."""
  given = [context.nstr(_converted(_value(a, point, context), context), 25) for a in tree[2]]
  draw = zlib.crc32(' '.join([tree[1], *given]).encode())
  return Fraction(draw % 100_003 + 40_000, 50_021)


def _sum(values, context):
  if all(isinstance(v, Fraction) for v in values):
    total = values[0]
    for value in values[1:]:
      total = _bounded(total + value, context)
    return total
  values = [_converted(v, context) for v in values]
  total = sum(values[1:], values[0])
  # What is left of equal terms is their rounding, not a number.
  if abs(total) < max(map(abs, values)) * context.mpf(10) ** -(context.dps * 4 // 5):
    return Fraction(0)
  return _bounded(total, context)


def _product(values, context):
  total = values[0]
  for value in values[1:]:
    if not (isinstance(total, Fraction) and isinstance(value, Fraction)):
      total, value = _converted(total, context), _converted(value, context)
    total = _bounded(total * value, context)
  return total


def _divided(a, b, context):
  if b == 0:
    raise UndefinedError('division by zero')
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _bounded(a / b, context)
  return _bounded(_converted(a, context) / _converted(b, context), context)


def _power(base, exponent, context):
  if base == 0:
    if isinstance(exponent, Fraction) and exponent > 0:
      return Fraction(0)
    raise UndefinedError('a power of zero')
  if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if base not in (1, -1) and bits * abs(exponent) > 2 * _MAX_INTEGER_BITS:
      raise UndefinedError('a power too large')
    return _bounded(base ** int(exponent if abs(base) != 1 else exponent % 2), context)
  if isinstance(exponent, Fraction) and isinstance(base, Fraction) and base > 0 and (
      exponent.denominator <= 64 and abs(exponent.numerator) <= 64):
    root = _exact_root(base, exponent.denominator)
    if root is not None:
      return _power(root, Fraction(exponent.numerator), context)
  base, exponent = _converted(base, context), _converted(exponent, context)
  if abs(exponent * context.log(base)) > 2 * context.dps:
    raise UndefinedError('a power too large')
  return _bounded(base ** exponent, context)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
  parts = []
  for part in (value.numerator, value.denominator):
    if index == 2:
      root = math.isqrt(part)
    elif part.bit_length() < 900:
      root = round(part ** (1 / index))
    else:
      return None
    if root ** index != part:
      return None
    parts.append(root)
  return Fraction(*parts)


def _root(value, index, context):
  if not isinstance(index, Fraction) or index.denominator != 1 or not 2 <= index <= 64:
    return _power(value, _divided(Fraction(1), index, context), context)
  if isinstance(value, Fraction):
    if value < 0 and index % 2:
      return -_root(-value, index, context)
    root = _exact_root(value, int(index)) if value >= 0 else None
    if root is not None:
      return root
  value = _converted(value, context)
  if not _is_complex(value) and context.re(value) < 0 and index % 2:
    return -((-value) ** (context.mpf(1) / int(index)))
  return _bounded(context.sqrt(value) if index == 2 else value ** (context.mpf(1) / int(index)),
                  context)


def _function(name: str, arguments, point, context):
  angle = name in ('sin', 'cos', 'tan', 'cot', 'sec', 'csc')
  if angle and 'degrees' in _heads(arguments[0]):
    arguments = (_in_radians(arguments[0]),)
  values = [_value(argument, point, context) for argument in arguments]
  if name == 'sqrt':
    return _root(values[0], values[1] if values[1:] else Fraction(2), context)
  if name == 'binom':
    return _binomial(*values)
  if name in ('floor', 'ceil'):
    return _rounded(name, values[0], context)
  if name == 'abs':
    return abs(values[0])
  if name == 'log' and values[1:]:
    return _divided(_function_of('log', values[0], context),
                    _function_of('log', values[1], context), context)
  return _function_of(name, values[0], context)


def _function_of(name, value, context):
  if name in _INVERSES:
    return _divided(Fraction(1), _function_of(_INVERSES[name], value, context), context)
  value = _converted(value, context)
  if name == 'exp' and abs(value) > 2 * context.dps or abs(value) > 10 ** 20:
    raise UndefinedError('an argument too large')
  if name == 'log' and value == 0:
    raise UndefinedError('the logarithm of zero')
  result = getattr(context, _NAMED.get(name, name))(value)
  if name != 'exp' and abs(result) < context.mpf(10) ** -(context.dps * 4 // 5):
    return Fraction(0)
  return _bounded(result, context)


def _in_radians(tree):
  if tree[0] == 'degrees':
    return 'multiply', (tree[1], ('divide', ('symbol', 'pi'), ('number', Fraction(180))))
  return tuple(_in_radians(child) if isinstance(child, tuple) and child
               and isinstance(child[0], str) else
               tuple(_in_radians(c) for c in child) if isinstance(child, tuple) else child
               for child in tree)


def _whole(value) -> int:
  if not isinstance(value, Fraction) or value.denominator != 1 or (
      not 0 <= value <= _MAX_FACTORIAL):
    raise UndefinedError('no number of things')
  return int(value)


def _binomial(n, k):
  return Fraction(math.comb(_whole(n), _whole(k)))


def _rounded(name: str, value, context) -> Fraction:
  if isinstance(value, Fraction):
    return Fraction(math.floor(value) if name == 'floor' else math.ceil(value))
  if _is_complex(value):
    raise UndefinedError('the floor of a complex number')
  value = context.re(value)
  nearest = int(context.nint(value))
  if abs(value - nearest) < context.mpf(10) ** -(context.dps // 2):
    return Fraction(nearest)
  return Fraction(int(context.floor(value) if name == 'floor' else context.ceil(value)))


def _bounded(value, context):
  if isinstance(value, Fraction):
    limit = _MAX_INTEGER_BITS if value.denominator == 1 else _MAX_FRACTION_BITS
    if value.numerator.bit_length() + value.denominator.bit_length() > limit:
      raise UndefinedError('too many digits')
    return value
  size = abs(value)
  # So that no rounding error grows into the digits that are compared.
  if not context.mpf(10) ** -(context.dps * 3 // 10) < size < context.mpf(10) ** (
      context.dps * 3 // 10) and size != 0:
    raise UndefinedError('too large or too small')
  return value


def _converted(value, context):
  if isinstance(value, Fraction):
    return context.mpf(value.numerator) / value.denominator
  return value


_RULES = {
    'add': _sum,
    'multiply': _product,
    'negate': lambda values, context: -values[0],
    'divide': lambda values, context: _divided(*values, context),
    'power': lambda values, context: _power(*values, context),
    'factorial': lambda values, context: Fraction(math.factorial(_whole(values[0]))),
    'percent': lambda values, context: _divided(values[0], Fraction(100), context),
    'degrees': lambda values, context: values[0],
}
