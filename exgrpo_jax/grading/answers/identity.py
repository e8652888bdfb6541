"""Algebraic comparison of two expressions, used if evaluation at several points is inconclusive.

Each expression becomes a quotient of two polynomials, which sympy multiplies and adds. The unknowns
are the letters and everything that isn't polynomial in the letters: roots, sines, factorials, and
powers with a letter in the exponent. Expressions that are equal for all values of the unknowns
count as the same. If the unknowns are only letters and factorials, all other expressions count as
different. To bound the work, the number of products of two terms is limited.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers.tree import Tree, heads, size, subtract, symbols

Polynomial = Any  # a sympy.polys.rings.PolyElement; sympy takes most of a second to import
Quotient = tuple[Polynomial, Polynomial]

_NUM_GENERATORS = 24  # unknowns: letters and everything treated like a letter
_MAX_NODES = 300
_MAX_PRODUCTS = 20_000  # term products in a whole comparison
_MAX_BITS = 40_000  # bits of a coefficient
_MAX_EXPONENT = 10**12
_MAX_GAP = 60  # between the arguments of two factorials if one is computed from the other
_MAX_PRIME = 10**6  # larger numbers are not factored
_CONSTANTS = frozenset({'pi', 'e', 'i'})


class _UndecidedError(ValueError):
  """Raised if an expression cannot be converted within the bounds or a divisor may be zero."""


def same_expression(x: Tree, y: Tree) -> bool | None:
  """Return True if two trees denote the same quantity, else False; None if algebra cannot tell."""
  return _decide(x, y, lambda a, b: a == b)


def proportional_expressions(x: Tree, y: Tree, positive: bool) -> bool:
  """Return True if x is a constant times y, and neither is zero.

  `positive` requires a positive constant.
  """

  def are_proportional(a: Polynomial, b: Polynomial) -> bool:
    if not a or not b or a.monic() != b.monic():
      return False
    return not positive or a.LC * b.LC > 0

  return _decide(x, y, are_proportional) is True


def _decide(x: Tree, y: Tree, compare: Callable[[Polynomial, Polynomial], bool]) -> bool | None:
  """Apply `compare` to two polynomials whose ratio is x / y; return None if undecided."""
  if size(x) + size(y) > _MAX_NODES:
    return None
  try:
    algebra = _Algebra(bool(symbols(x) | symbols(y)))
    algebra.find_factorials(x)
    algebra.find_factorials(y)
    (x_top, x_bottom), (y_top, y_bottom) = algebra.quotient(x), algebra.quotient(y)
    is_so = compare(algebra.multiply(x_top, y_bottom), algebra.multiply(y_top, x_bottom))
  except _UndecidedError:
    return None
  return True if is_so else (False if algebra.is_decisive else None)


class _Algebra:
  """Conversion of trees to quotients of polynomials in one ring."""

  def __init__(self, has_letters: bool) -> None:
    self.is_decisive = True  # set to False once two unknowns may be related
    self._has_letters = has_letters
    self._ring = _ring()
    self._one = self._ring.one, self._ring.one
    self._products = 0
    self._unknowns: list[tuple[Any, ...]] = []  # the meaning of each generator in use
    self._functions: set[int] = set()  # generators that may be zero even if no letter is
    self._factorials: dict[Polynomial, list[int]] = {}  # rest of an argument -> integers split off

  def quotient(self, tree: Tree) -> Quotient:
    head = tree[0]
    if head == 'number':
      return self._number(tree[1]), self._ring.one
    if head == 'symbol':
      self.is_decisive &= tree[1] not in _CONSTANTS
      return self._unknown(tree), self._ring.one
    if head in ('add', 'multiply'):
      combine = self._add if head == 'add' else self._multiply
      return functools.reduce(combine, map(self.quotient, tree[1]))
    if head == 'negate':
      top, bottom = self.quotient(tree[1])
      return -top, bottom
    if head in ('divide', 'percent'):
      divisor = tree[2] if head == 'divide' else ('number', Fraction(100))
      return self._multiply(self.quotient(tree[1]), self._inverse(self.quotient(divisor)))
    if head == 'power':
      return self._power(self.quotient(tree[1]), self._polynomial(tree[2]))
    if head == 'factorial':
      return self._factorial(self._polynomial(tree[1]))
    if head in ('function', 'call'):
      return self._function(head, tree[1], tree[2])
    raise _UndecidedError

  # Arithmetic within bounds.

  def multiply(self, x: Polynomial, y: Polynomial) -> Polynomial:
    self._products += len(x) * len(y)
    if self._products > _MAX_PRODUCTS or _bits(x) + _bits(y) > _MAX_BITS:
      raise _UndecidedError
    return x * y

  def _multiply(self, x: Quotient, y: Quotient) -> Quotient:
    return self.multiply(x[0], y[0]), self.multiply(x[1], y[1])

  def _add(self, x: Quotient, y: Quotient) -> Quotient:
    if x[1] == y[1]:
      return x[0] + y[0], x[1]
    return self.multiply(x[0], y[1]) + self.multiply(y[0], x[1]), self.multiply(x[1], y[1])

  def _inverse(self, x: Quotient) -> Quotient:
    """Return 1/x; raises _UndecidedError if x may be zero everywhere, like sqrt(2) sqrt(2) - 2.

    A nonzero polynomial in letters is not zero everywhere, and neither is its product with powers
    and factorials.
    """
    top, bottom = x
    unknowns = _generators(top)
    others = [index for index in unknowns if self._unknowns[index][0] != 'symbol']
    if not top or not self._functions.isdisjoint(unknowns):
      raise _UndecidedError
    if len({tuple(monomial[index] for index in others) for monomial in top}) > 1:
      raise _UndecidedError
    return bottom, top

  def _number(self, value: Fraction) -> Polynomial:
    return self._ring.ground_new(self._ring.domain(value.numerator, value.denominator))

  def _unknown(self, meaning: tuple[Any, ...]) -> Polynomial:
    """Return the generator with this meaning; allocate it on first use."""
    if meaning not in self._unknowns:
      self._unknowns.append(meaning)
    index = self._unknowns.index(meaning)
    if index >= _NUM_GENERATORS:
      raise _UndecidedError
    return self._ring.gens[index]

  def _polynomial(self, tree: Tree) -> Polynomial:
    """Convert a tree to a polynomial, as required for exponents and factorial arguments."""
    top, bottom = self.quotient(tree)
    if not bottom.is_ground or not bottom:
      raise _UndecidedError
    return top * (1 / bottom.LC)

  # Powers.

  def _power(self, base: Quotient, exponent: Polynomial) -> Quotient:
    """Raise a base to a power; a sum in the exponent is split: x^(n + 3/2) is x^n * x * x^(1/2)."""
    if not base[0]:
      raise _UndecidedError
    result = self._one
    for monomial, coefficient in exponent.terms():
      count, denominator = int(coefficient.numerator), int(coefficient.denominator)
      if not any(monomial):
        integer_part, count = divmod(count, denominator)
        result = self._multiply(result, self._integer_power(base, integer_part))
      if count:
        result = self._multiply(result, self._unknown_power(base, (monomial, denominator), count))
    return result

  def _unknown_power(self, base: Quotient, exponent: tuple[Any, ...], count: int) -> Quotient:
    """Return (base^(m/d))^count for noninteger m/d, with a separate unknown for each prime."""
    self.is_decisive = False
    primes = self._positive_factors(base)
    if primes is None:
      unknown = self._unknown(('power', self._normal(base), *exponent))
      if not self._functions.isdisjoint(_generators(base[0])):
        self._functions |= _generators(unknown)
      return self._integer_power((unknown, self._ring.one), count)
    monomial, denominator = exponent
    result = self._one
    for prime, times in primes:
      power = count * times
      if not any(monomial):  # sqrt(8) is 2 sqrt(2)
        integer_part, power = divmod(power, denominator)
        factor = self._number(Fraction(prime) ** integer_part), self._ring.one
        result = self._multiply(result, factor)
      unknown = self._unknown(('power', prime, *exponent)), self._ring.one
      result = self._multiply(result, self._integer_power(unknown, power))
    return result

  def _positive_factors(self, base: Quotient) -> list[tuple[Any, int]] | None:
    """Factor a base that is a positive rational number into primes and their exponents.

    Returns None if the base is anything else, or if its numerator or denominator is too large.
    """
    from sympy import Rational, factorrat

    top, bottom = base
    if not (top.is_ground and bottom.is_ground):
      return None
    value = top.LC / bottom.LC
    if value <= 0 or max(value.numerator, value.denominator) > _MAX_PRIME:
      return None
    factors: Any = factorrat(Rational(int(value.numerator), int(value.denominator)))
    return [(int(prime), int(times)) for prime, times in factors.items()]

  def _integer_power(self, base: Quotient, count: int) -> Quotient:
    if count < 0:
      return self._integer_power(self._inverse(base), -count)
    if count > _MAX_EXPONENT:
      raise _UndecidedError
    if all(part.is_ground for part in base) and count * max(map(_bits, base)) > _MAX_BITS // 2:
      factors = self._positive_factors(base)  # the power is too large to store
      if factors is None:
        raise _UndecidedError
      self.is_decisive = False
      powers = (
        self._integer_power((self._unknown(('prime', prime)), self._ring.one), times * count)
        for prime, times in factors
      )
      return functools.reduce(self._multiply, powers, self._one)
    return self._polynomial_power(base[0], count), self._polynomial_power(base[1], count)

  def _polynomial_power(self, base: Polynomial, count: int) -> Polynomial:
    if len(base) == 1:
      if _bits(base) > 1 and _bits(base) * count > _MAX_BITS:
        raise _UndecidedError
      return base**count
    result = self._ring.one
    for bit in f'{count:b}':
      result = self.multiply(result, result)
      if bit == '1':
        result = self.multiply(result, base)
    return result

  # Factorials and functions.

  def find_factorials(self, tree: Any) -> None:
    """Collect the arguments of all factorials, so that (n + 2)! can become a multiple of n!."""
    if not isinstance(tree, tuple) or not tree or not heads(tree) & {'factorial', 'binom'}:
      return
    for child in tree:
      self.find_factorials(child)
    arguments = (tree[1],) if tree[0] == 'factorial' else ()
    if tree[:2] == ('function', 'binom'):
      arguments = (*tree[2], subtract(*tree[2]))
    for argument in arguments:
      if not heads(argument) & {'factorial', 'binom'}:
        rest, integer = self._split(self._polynomial(argument))
        self._factorials.setdefault(rest, []).append(integer)

  def _split(self, argument: Polynomial) -> tuple[Polynomial, int]:
    """Split a polynomial into a rest, whose constant term is in [0, 1), and an integer."""
    constant = argument.coeff(1)
    integer = int(constant.numerator // constant.denominator)
    rest = argument - integer
    self.is_decisive &= all(value.denominator == 1 for value in rest.values())
    return rest, integer

  def _factorial(self, argument: Polynomial) -> Quotient:
    """Write (r + i)! as the smallest nearby factorial (r + j)! times the factors in between."""
    rest, integer = self._split(argument)
    if rest not in self._factorials or (not rest and integer < 0):
      raise _UndecidedError
    integers, start = sorted(self._factorials[rest], reverse=True), integer
    for candidate in integers:
      if start - _MAX_GAP <= candidate < start:
        start = candidate
    if not rest and start <= _MAX_GAP:
      return self._number(Fraction(math.factorial(integer))), self._ring.one
    # Distant factorials become related unknowns. A number's factorial is related to other numbers.
    self.is_decisive &= bool(rest) and integers[0] - integers[-1] <= _MAX_GAP
    factors = (rest + factor for factor in range(start + 1, integer + 1))
    result = self._unknown(('factorial', rest, start))
    return functools.reduce(self.multiply, factors, result), self._ring.one

  def _binomial(self, n: Polynomial, k: Polynomial) -> Quotient:
    if k.is_ground and 0 <= k.coeff(1) <= _MAX_GAP and k.coeff(1).denominator == 1:
      count = int(k.coeff(1))
      top = functools.reduce(self.multiply, (n - j for j in range(count)), self._ring.one)
      return top, self._number(Fraction(math.factorial(count)))
    bottom = self._multiply(self._factorial(k), self._factorial(n - k))
    return self._multiply(self._factorial(n), self._inverse(bottom))

  def _function(self, head: str, name: str, arguments: Sequence[Tree]) -> Quotient:
    if name == 'binom':
      return self._binomial(*map(self._polynomial, arguments))
    if name == 'sqrt' and len(arguments) == 1:
      return self._power(self.quotient(arguments[0]), self._number(Fraction(1, 2)))
    quotients = tuple(self._normal(self.quotient(argument)) for argument in arguments)
    if not self._has_letters or all(top.is_ground and low.is_ground for top, low in quotients):
      raise _UndecidedError  # its value is a number, which may be zero
    self.is_decisive = False
    unknown = self._unknown((head, name, quotients))
    self._functions |= _generators(unknown)
    return unknown, self._ring.one

  def _normal(self, x: Quotient) -> Quotient:
    """Divide a quotient's numerator by its denominator if the denominator is a constant."""
    top, bottom = x
    return (top * (1 / bottom.LC), self._ring.one) if bottom.is_ground and bottom else x


def _generators(polynomial: Polynomial) -> set[int]:
  """Return the indices of the generators that occur in a polynomial."""
  return {index for monomial in polynomial for index, power in enumerate(monomial) if power}


def _bits(polynomial: Polynomial) -> int:
  """Return the maximum, over all coefficients, of numerator bits + denominator bits - 1."""
  parts = ((int(value.numerator), int(value.denominator)) for value in polynomial.values())
  return max((top.bit_length() + bottom.bit_length() - 1 for top, bottom in parts), default=1)


@functools.cache
def _ring() -> Any:
  from sympy.polys.domains import QQ
  from sympy.polys.rings import PolyRing

  return PolyRing([f'x{index}' for index in range(_NUM_GENERATORS)], QQ)
