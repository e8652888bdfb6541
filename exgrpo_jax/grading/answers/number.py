"""Evaluation of expression trees.

Rational numbers are evaluated exactly; other numbers are evaluated to a given number of digits. All
sizes are bounded; a number that is too large counts as undefined.
"""

import functools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import mpmath

from exgrpo_jax.grading.answers.tree import Tree, heads, rewrite

Number = Any  # a Fraction, or an mpf or mpc of a Context
Context = Any  # an mpmath.MPContext, whose functions are attached at run time
Point = Mapping[str, Number]  # the value of each unknown

_MAX_INTEGER_BITS = 33_300  # 10^4 digits
_MAX_FRACTION_BITS = 8_000
_MAX_FACTORIAL = 1000
_DIVISORS = {'gcd': math.gcd, 'lcm': math.lcm}
_RECIPROCALS = {'sec': 'cos', 'csc': 'sin', 'cot': 'tan'}
_MPMATH_NAMES = {'arcsin': 'asin', 'arccos': 'acos', 'arctan': 'atan'}


class UndefinedError(ArithmeticError):
  """Raised if a value does not exist or exceeds the bounds."""


# Errors that `evaluate` may raise.
ERRORS = (ArithmeticError, ValueError, TypeError, KeyError)


@functools.cache
def context_of(digits: int) -> Context:
  """Return the mpmath context for a precision. It is never modified, so threads may share it."""
  context = mpmath.MPContext()
  context.dps = digits
  return context


def is_complex(value: Number) -> bool:
  """Return True if the imaginary part is larger than rounding error."""
  if isinstance(value, Fraction) or not hasattr(value, 'imag'):
    return False
  return abs(value.imag) > abs(value) * mpmath.mpf(10) ** -40


def evaluate(tree: Tree, point: Point, context: Context) -> Number:
  """Return the value of a tree at a point; raises one of ERRORS if it has no value."""
  match tree:
    case 'number', value:
      return _check_bounds(value, context)
    case 'symbol', ('pi' | 'e') as name:
      return +getattr(context, name)
    case 'symbol', name:
      return context.mpc(0, 1) if name == 'i' else point[name]
    case 'function', name, arguments:
      return _evaluate_function(name, arguments, point, context)
    # Pseudo-random, but the same for the same name, arguments and point. Even f(2) depends on the
    # point, because its value is unknown, like a letter's.
    case 'call', name, arguments:
      values = [to_float(evaluate(child, point, context), context) for child in arguments]
      texts = [name, str(point.get(f'{name}()')), *(context.nstr(v, 25) for v in values)]
      checksum = zlib.crc32(' '.join(texts).encode())
      return Fraction(checksum % 100_003 + 40_000, 50_021)
    case 'multiply', factors:  # lazily, to stop as soon as the product is too large
      return _product((evaluate(child, point, context) for child in factors), context)
    case 'add', terms:
      return _sum([evaluate(child, point, context) for child in terms], context)
  return _operate(tree, point, context)


def _operate(tree: Tree, point: Point, context: Context) -> Number:
  match tree:
    case 'negate', x:
      return -evaluate(x, point, context)
    case 'divide', x, y:
      return divide(evaluate(x, point, context), evaluate(y, point, context), context)
    case 'power', x, y:
      return _power(evaluate(x, point, context), evaluate(y, point, context), context)
    case 'factorial', x:
      return Fraction(math.factorial(_count(evaluate(x, point, context))))
    case 'percent', x:
      return divide(evaluate(x, point, context), Fraction(100), context)
    case 'degrees', x:
      return evaluate(x, point, context)  # only functions of an angle convert degrees
  raise UndefinedError(f'{tree[0]!r} is not a number')


def _sum(values: Sequence[Number], context: Context) -> Number:
  if all(isinstance(v, Fraction) for v in values):
    total = values[0]
    for value in values[1:]:
      total = _check_bounds(total + value, context)
    return total
  values = [to_float(v, context) for v in values]
  total = sum(values[1:], values[0])
  # Terms that cancel leave rounding error, which is treated as zero.
  if abs(total) < max(map(abs, values)) * context.mpf(10) ** -(context.dps * 4 // 5):
    return Fraction(0)
  return _check_bounds(total, context)


def _product(values: Iterable[Number], context: Context) -> Number:
  total: Number = Fraction(1)
  for value in values:
    if not (isinstance(total, Fraction) and isinstance(value, Fraction)):
      total, value = to_float(total, context), to_float(value, context)
    total = _check_bounds(total * value, context)
  return total


def divide(a: Number, b: Number, context: Context) -> Number:
  """Return the quotient a / b; raises one of ERRORS if it is undefined."""
  if b == 0:
    raise UndefinedError('division by zero')
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _check_bounds(a / b, context)
  return _check_bounds(to_float(a, context) / to_float(b, context), context)


def _power(base: Number, exponent: Number, context: Context) -> Number:
  if base == 0:
    if isinstance(exponent, Fraction) and exponent > 0:
      return Fraction(0)
    raise UndefinedError('zero raised to a power that is not positive')
  if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if base not in (1, -1) and bits * abs(exponent) > 2 * _MAX_INTEGER_BITS:
      raise UndefinedError('the power is too large')
    return _check_bounds(base ** int(exponent if abs(base) != 1 else exponent % 2), context)
  are_rational = isinstance(base, Fraction) and isinstance(exponent, Fraction)
  if are_rational and base > 0 and exponent.denominator <= 64:
    root = _exact_root(base, exponent.denominator)
    if root is not None:
      return _power(root, Fraction(exponent.numerator), context)
  base, exponent = to_float(base, context), to_float(exponent, context)
  if abs(exponent * context.log(base)) > 2 * context.dps:
    raise UndefinedError('the power is too large')
  return _check_bounds(base**exponent, context)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
  """Return the rational root of a nonnegative number; None if it is irrational or too large."""
  parts = value.numerator, value.denominator
  if index == 2:
    roots = tuple(map(math.isqrt, parts))
  elif max(parts).bit_length() < 900:
    roots = tuple(round(part ** (1 / index)) for part in parts)
  else:
    return None
  return Fraction(*roots) if all(r**index == part for r, part in zip(roots, parts)) else None


def _root(value: Number, index: Number, context: Context) -> Number:
  if index == 2 and not isinstance(value, Fraction):
    return _check_bounds(context.sqrt(value), context)
  is_odd = isinstance(index, Fraction) and index % 2 == 1
  if is_odd and not is_complex(value) and context.re(to_float(value, context)) < 0:
    return -_root(-value, index, context)
  return _power(value, divide(Fraction(1), index, context), context)


def _evaluate_function(
  name: str, arguments: Sequence[Tree], point: Point, context: Context
) -> Number:
  takes_angle = name in ('sin', 'cos', 'tan', 'cot', 'sec', 'csc')
  if takes_angle and 'degrees' in heads(arguments[0]):
    arguments = (rewrite(arguments[0], _in_radians),)
  values = [evaluate(argument, point, context) for argument in arguments]
  if name == 'sqrt':
    return _root(values[0], values[1] if values[1:] else Fraction(2), context)
  if name == 'binom':
    return Fraction(math.comb(*map(_count, values)))
  if name in ('floor', 'ceil'):
    return _floor_or_ceil(name, values[0], context)
  if name in _DIVISORS:
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
      raise UndefinedError('only integers have divisors')
    return Fraction(_DIVISORS[name](*map(int, values)))
  if name == 'abs':
    return abs(values[0])
  if name == 'log' and values[1:]:
    return divide(_apply('log', values[0], context), _apply('log', values[1], context), context)
  return _apply(name, values[0], context)


def _apply(name: str, value: Number, context: Context) -> Number:
  """Apply a function of one number; angles are in radians."""
  if name in _RECIPROCALS:
    return divide(Fraction(1), _apply(_RECIPROCALS[name], value, context), context)
  value = to_float(value, context)
  if (name == 'exp' and abs(value) > 2 * context.dps) or abs(value) > 10**20:
    raise UndefinedError('the argument is too large')
  if name == 'log' and value == 0:
    raise UndefinedError('the logarithm of zero')
  result = getattr(context, _MPMATH_NAMES.get(name, name))(value)
  if name != 'exp' and abs(result) < context.mpf(10) ** -(context.dps * 4 // 5):
    return Fraction(0)
  return _check_bounds(result, context)


def _in_radians(node: Tree) -> Tree | None:
  if node[0] != 'degrees':
    return None
  return 'multiply', (node[1], ('divide', ('symbol', 'pi'), ('number', Fraction(180))))


def _count(value: Number) -> int:
  """Return the argument of a factorial or a binomial coefficient as an int."""
  if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= _MAX_FACTORIAL:
    raise UndefinedError(f'a count must be an integer from 0 to {_MAX_FACTORIAL}')
  return int(value)


def _floor_or_ceil(name: str, value: Number, context: Context) -> Fraction:
  if isinstance(value, Fraction):
    return Fraction(math.floor(value) if name == 'floor' else math.ceil(value))
  if is_complex(value):
    raise UndefinedError('a complex number has no floor or ceiling')
  value = context.re(value)
  nearest = int(context.nint(value))
  if abs(value - nearest) < context.mpf(10) ** -(context.dps // 2):
    return Fraction(nearest)
  return Fraction(int(context.floor(value) if name == 'floor' else context.ceil(value)))


def _check_bounds(value: Number, context: Context) -> Number:
  """Return the value; raises UndefinedError if it has too many digits or is too large or small."""
  if isinstance(value, Fraction):
    limit = _MAX_INTEGER_BITS if value.denominator == 1 else _MAX_FRACTION_BITS
    if value.numerator.bit_length() + value.denominator.bit_length() > limit:
      raise UndefinedError('too many digits')
    return value
  # Within these bounds, rounding errors stay below the digits that are compared.
  high = context.mpf(10) ** (context.dps * 3 // 10)
  low = context.mpf(10) ** -(context.dps * 3 // 10)
  if value != 0 and not low < abs(value) < high:
    raise UndefinedError('too large or too small')
  return value


def to_float(value: Number, context: Context) -> Number:
  """Convert a Fraction to an mpf in the context; return other numbers unchanged."""
  if isinstance(value, Fraction):
    return context.mpf(value.numerator) / value.denominator
  return value
