"""Expression trees to numbers: rational ones exactly, others to a given number of digits.

Everything is bounded: what would be too large to hold has no value here.
"""

import functools
import math
import zlib
from collections.abc import Mapping
from fractions import Fraction

import mpmath

_MAX_INTEGER_BITS = 33_300  # 10^4 digits
_MAX_FRACTION_BITS = 8_000
_MAX_FACTORIAL = 1000
_INVERSES = {'sec': 'cos', 'csc': 'sin', 'cot': 'tan'}
_NAMED = {'arcsin': 'asin', 'arccos': 'acos', 'arctan': 'atan'}


class UndefinedError(ArithmeticError):
  """No number, or none within the bounds."""


# What `value` may raise.
ERRORS = (ArithmeticError, ValueError, TypeError, KeyError)


@functools.cache
def context_of(digits: int):
  """Numbers of one precision; it is never changed, so that threads may share it."""
  context = mpmath.MPContext()
  context.dps = digits
  return context


def is_complex(value) -> bool:
  if isinstance(value, Fraction) or not hasattr(value, 'imag'):
    return False
  return abs(value.imag) > abs(value) * mpmath.mpf(10) ** -40


def heads(tree) -> frozenset:
  if not isinstance(tree, tuple) or not tree:
    return frozenset()
  own = {tree[0]} if isinstance(tree[0], str) else set()
  if tree[0] == 'function':
    own.add(tree[1])
  return frozenset(own).union(*(heads(child) for child in tree if isinstance(child, tuple)))


def value_of(tree, point: Mapping, context):
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
  if head not in _RULES and head != 'multiply':
    raise UndefinedError(head)
  if head == 'multiply':  # stops at the first factor too many
    return _product((value_of(child, point, context) for child in tree[1]), context)
  children = tree[1] if head == 'add' else tree[1:]
  return _RULES[head]([value_of(child, point, context) for child in children], context)


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
  given = [context.nstr(converted(value_of(a, point, context), context), 25) for a in tree[2]]
  draw = zlib.crc32(' '.join([tree[1], *given]).encode())
  return Fraction(draw % 100_003 + 40_000, 50_021)


def _sum(values, context):
  if all(isinstance(v, Fraction) for v in values):
    total = values[0]
    for value in values[1:]:
      total = _bounded(total + value, context)
    return total
  values = [converted(v, context) for v in values]
  total = sum(values[1:], values[0])
  # What is left of equal terms is their rounding, not a number.
  if abs(total) < max(map(abs, values)) * context.mpf(10) ** -(context.dps * 4 // 5):
    return Fraction(0)
  return _bounded(total, context)


def _product(values, context):
  total = Fraction(1)
  for value in values:
    if not (isinstance(total, Fraction) and isinstance(value, Fraction)):
      total, value = converted(total, context), converted(value, context)
    total = _bounded(total * value, context)
  return total


def divided(a, b, context):
  if b == 0:
    raise UndefinedError('division by zero')
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _bounded(a / b, context)
  return _bounded(converted(a, context) / converted(b, context), context)


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
  if (
    isinstance(exponent, Fraction)
    and isinstance(base, Fraction)
    and base > 0
    and (exponent.denominator <= 64)
  ):
    root = _exact_root(base, exponent.denominator)
    if root is not None:
      return _power(root, Fraction(exponent.numerator), context)
  base, exponent = converted(base, context), converted(exponent, context)
  if abs(exponent * context.log(base)) > 2 * context.dps:
    raise UndefinedError('a power too large')
  return _bounded(base**exponent, context)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
  parts = []
  for part in (value.numerator, value.denominator):
    if index == 2:
      root = math.isqrt(part)
    elif part.bit_length() < 900:
      root = round(part ** (1 / index))
    else:
      return None
    if root**index != part:
      return None
    parts.append(root)
  return Fraction(*parts)


def _root(value, index, context):
  if not isinstance(index, Fraction) or index.denominator != 1 or not 2 <= index <= 64:
    return _power(value, divided(Fraction(1), index, context), context)
  if isinstance(value, Fraction):
    if value < 0 and index % 2:
      return -_root(-value, index, context)
    root = _exact_root(value, int(index)) if value >= 0 else None
    if root is not None:
      return root
  value = converted(value, context)
  if not is_complex(value) and context.re(value) < 0 and index % 2:
    return -((-value) ** (context.mpf(1) / int(index)))
  return _bounded(
    context.sqrt(value) if index == 2 else value ** (context.mpf(1) / int(index)), context
  )


def _function(name: str, arguments, point, context):
  angle = name in ('sin', 'cos', 'tan', 'cot', 'sec', 'csc')
  if angle and 'degrees' in heads(arguments[0]):
    arguments = (_in_radians(arguments[0]),)
  values = [value_of(argument, point, context) for argument in arguments]
  if name == 'sqrt':
    return _root(values[0], values[1] if values[1:] else Fraction(2), context)
  if name == 'binom':
    return _binomial(*values)
  if name in ('floor', 'ceil'):
    return _rounded(name, values[0], context)
  if name == 'abs':
    return abs(values[0])
  if name == 'log' and values[1:]:
    return divided(
      _function_of('log', values[0], context), _function_of('log', values[1], context), context
    )
  return _function_of(name, values[0], context)


def _function_of(name, value, context):
  if name in _INVERSES:
    return divided(Fraction(1), _function_of(_INVERSES[name], value, context), context)
  value = converted(value, context)
  if (name == 'exp' and abs(value) > 2 * context.dps) or abs(value) > 10**20:
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
  return tuple(
    _in_radians(child)
    if isinstance(child, tuple) and child and isinstance(child[0], str)
    else tuple(_in_radians(c) for c in child)
    if isinstance(child, tuple)
    else child
    for child in tree
  )


def _whole(value) -> int:
  if (
    not isinstance(value, Fraction) or value.denominator != 1 or (not 0 <= value <= _MAX_FACTORIAL)
  ):
    raise UndefinedError('no number of things')
  return int(value)


def _binomial(n, k):
  return Fraction(math.comb(_whole(n), _whole(k)))


def _rounded(name: str, value, context) -> Fraction:
  if isinstance(value, Fraction):
    return Fraction(math.floor(value) if name == 'floor' else math.ceil(value))
  if is_complex(value):
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
  if (
    not context.mpf(10) ** -(context.dps * 3 // 10)
    < size
    < context.mpf(10) ** (context.dps * 3 // 10)
    and size != 0
  ):
    raise UndefinedError('too large or too small')
  return value


def converted(value, context):
  if isinstance(value, Fraction):
    return context.mpf(value.numerator) / value.denominator
  return value


_RULES = {
  'add': _sum,
  'negate': lambda values, context: -values[0],
  'divide': lambda values, context: divided(*values, context),
  'power': lambda values, context: _power(*values, context),
  'factorial': lambda values, context: Fraction(math.factorial(_whole(values[0]))),
  'percent': lambda values, context: divided(values[0], Fraction(100), context),
  'degrees': lambda values, context: values[0],
}
