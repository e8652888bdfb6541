r"""Products whose order can matter: matrices, vectors, operators, functions and group elements.

Letters commute unless the notation suggests otherwise: an inverse next to other letters
(`P^{-1}AP`), a transpose (`A^T`), a commutator (`AB - BA`), `\circ`, a vector's arrow or bold
face, a hat, `\nabla` or `\partial`. Such letters become 3x3 matrices, and two expressions are the
same if they agree for several choices of matrices. Vectors become antisymmetric matrices, whose
commutator represents the cross product.
"""

import functools
import itertools
import operator
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers.number import (
  ERRORS,
  Context,
  Point,
  UndefinedError,
  context_of,
  evaluate,
  to_float,
)
from exgrpo_jax.grading.answers.tree import (
  MINUS_ONE,
  Tree,
  heads,
  make_product,
  nodes,
  rewrite,
  size,
  symbols,
)

Matrix = Any  # a 3x3 mpmath matrix

_DIGITS = 50
_NUM_CHOICES = 2
_MAX_EXPONENT = 12
_MAX_NODES = 400  # nodes in both trees; larger pairs count as different
_MAX_TERMS = 24  # terms in a sum that is searched for commutators
_QUANTITIES = frozenset('mnrtvpqlde')  # lowercase letters that name numbers, not group elements
_VECTORS = ('vec ', 'overrightarrow ', 'mathbf ')
_DERIVATIVES = ('nabla', 'partial')
_OPERATORS = ('hat ', 'widehat ', *_DERIVATIVES)
_TRANSPOSES = (('symbol', 'T'), ('symbol', 'H'))
_ORDERED = frozenset({'compose', 'dot', 'cross'})  # heads that occur only in noncommuting products
_GREEK_CAPITALS = ('Gamma', 'Delta', 'Theta', 'Lambda', 'Sigma', 'Phi', 'Psi', 'Omega', 'Pi', 'Xi')


def is_vector(tree: Tree) -> bool:
  r"""Return True if a tree is marked as a vector or an operator, as `2\vec{u} + \hat{k}` is."""
  head = tree[0]
  if head == 'symbol':
    return tree[1].startswith(_VECTORS + _OPERATORS)
  if head in ('add', 'multiply'):
    return any(map(is_vector, tree[1]))
  return head == 'cross' or (head in ('negate', 'divide', 'power') and is_vector(tree[1]))


def in_one_face(x: Tree, y: Tree) -> tuple[Tree, Tree]:
  r"""Set letters in bold on both sides if only one side uses bold: v becomes `\mathbf{v}`."""
  x_bold, y_bold = ({n for n in symbols(tree) if n.startswith('mathbf ')} for tree in (x, y))
  if bool(x_bold) == bool(y_bold):
    return x, y
  bold = {('symbol', name.removeprefix('mathbf ')): ('symbol', name) for name in x_bold | y_bold}
  return rewrite(x, bold.get), rewrite(y, bold.get)


# ---- Which letters do not commute ----


def ordered_letters(answer: Tree, truth: Tree) -> frozenset[str]:
  """Return the letters of both trees for which the order of multiplication may matter.

  There are usually none. A capital letter counts as a number if it is part of a divisor in the
  truth. A lowercase letter counts as a number if it is part of a divisor on either side.
  """
  names = symbols(answer) | symbols(truth)
  letters = {name for name in names if name.startswith(_VECTORS + _OPERATORS)}
  divisors = _divisors(truth) | {name for name in _divisors(answer) if not _is_capital(name)}
  for tree in (answer, truth):
    for node in nodes(tree):
      letters |= _ordered_in(node, divisors)
  if any(map(_is_capital, letters)):
    letters |= {name for name in names if _is_capital(name)}
  if _has_transpose(answer) or _has_transpose(truth):
    letters -= {'T', 'H'}
  return frozenset(letters)


def _ordered_in(node: Tree, divisors: frozenset[str]) -> set[str]:
  """Return the letters that do not commute, judging by one node; excludes marked vectors."""
  head = node[0]
  if head == 'compose':
    return set(_letters(node))
  if head == 'multiply':
    return _ordered_in_product(node[1], divisors)
  if head == 'power':
    base, exponent = node[1:]
    is_transpose = exponent in _TRANSPOSES and bool(_letters(base))
    if is_transpose and (exponent[1] == 'T' or all(map(_is_capital, _letters(base)))):
      return set(_letters(base))
    is_capital = base[0] == 'symbol' and _is_capital(base[1])
    if _is_inverse(node) and is_capital and base[1] not in divisors:
      return {base[1]}
  if head == 'add':
    return _ordered_in_commutator(node[1])
  return set()


def _ordered_in_product(factors: Sequence[Tree], divisors: frozenset[str]) -> set[str]:
  """Return the letters of a product with an inverse (a^{-1}b, xyx^{-1}) or a transpose (X'y)."""
  letters = {name for factor in factors for name in _letters(factor)}
  if any(name.startswith(_DERIVATIVES) for name in letters):
    return letters  # they act on the next factors
  if any(name.endswith("'") and name[0].isupper() for name in letters):
    return letters  # X' may be the transpose of X
  inverses = [factor[1] for factor in factors if _is_inverse(factor)]
  others = [factor for factor in factors if not _is_inverse(factor) and symbols(factor)]
  if any(base in others for base in inverses):
    return letters
  are_elements = all(base[0] == 'symbol' and base[1] not in divisors for base in inverses)
  are_bare = all(factor[0] == 'symbol' for factor in factors if not _is_inverse(factor))
  if inverses and are_elements and are_bare and len(factors) > 1 and not letters & _QUANTITIES:
    return letters - set(divisors)
  return set()


def _ordered_in_commutator(terms: Sequence[Tree]) -> set[str]:
  """Return the letters of each product that appears in two orders in a sum, as in 'AB + BA'."""
  if len(terms) > _MAX_TERMS:  # when in doubt, capitals do not commute
    return {name for term in terms for name in _letters(term) if _is_capital(name)}
  products = [(term[1] if term[0] == 'negate' else term, term[0] == 'negate') for term in terms]
  names: set[str] = set()
  for (y, y_is_negative), (x, x_is_negative) in itertools.combinations(products, 2):
    are_products = x[0] == y[0] == 'multiply'
    if are_products and x != y and sorted(map(repr, x[1])) == sorted(map(repr, y[1])):
      letters = {name for factor in x[1] for name in _letters(factor)}
      if x_is_negative != y_is_negative or all(map(_is_capital, letters)):
        names |= letters
  return names


def _is_inverse(tree: Tree) -> bool:
  return tree[0] == 'power' and tree[2] == MINUS_ONE


def _is_capital(name: str) -> bool:
  """Return True for A, A_1 and Lambda, but not for words or marked letters."""
  stem = name.partition('_')[0]
  return (len(stem) == 1 and stem.isupper()) or stem in _GREEK_CAPITALS


def _letters(tree: Tree) -> frozenset[str]:
  """Return the names in a tree, except those in calls, such as 'f()'."""
  return frozenset(name for name in symbols(tree) if not name.endswith('()'))


def _divisors(tree: Tree) -> frozenset[str]:
  return frozenset().union(*(_letters(node[2]) for node in nodes(tree) if node[0] == 'divide'))


def _has_transpose(tree: Tree) -> bool:
  return any(node[0] == 'power' and node[2] in _TRANSPOSES for node in nodes(tree))


# ---- Comparison ----


def same_in_order(x: Tree, y: Tree, letters: frozenset[str]) -> bool:
  """Return True if two trees agree for every tested choice of matrices for `letters`."""
  values = _values(x, y, letters)
  return bool(values) and all(_is_zero(a - b, (a, b)) for a, b in values)


def proportional_in_order(x: Tree, y: Tree, letters: frozenset[str], positive: bool) -> bool:
  """Return True if x is a constant times y for all tested matrices, and neither is zero."""
  values = _values(x, y, letters)
  if not values:
    return False
  ratios = []
  for a, b in values:
    row, column = max(((i, j) for i in range(3) for j in range(3)), key=lambda at: abs(b[at]))
    if _norm(b) == 0 or _is_zero(a, (b,)):
      return False
    ratio = a[row, column] / b[row, column]
    if not _is_zero(a - ratio * b, (a,)):
      return False
    ratios.append(ratio)
  is_constant = all(abs(r - ratios[0]) <= abs(ratios[0]) * _tolerance() for r in ratios)
  return is_constant and (not positive or ratios[0] > 0)


def _values(x: Tree, y: Tree, letters: frozenset[str]) -> list[tuple[Matrix, Matrix]]:
  """Evaluate both trees for each choice of matrices; return [] if either has no value."""
  if (heads(x) | heads(y)) & {'plusminus', 'percent', 'unit'} or size(x) + size(y) > _MAX_NODES:
    return []
  names, are_transposed = symbols(x) | symbols(y), _has_transpose(x) or _has_transpose(y)
  algebras = [_Algebra(letters, names, are_transposed, index) for index in range(_NUM_CHOICES)]
  try:
    return [(algebra.value(x), algebra.value(y)) for algebra in algebras]
  except ERRORS:
    return []


def _is_zero(matrix: Matrix, others: Sequence[Matrix]) -> bool:
  return _norm(matrix) <= _tolerance() * max(map(_norm, others))


def _tolerance() -> Any:
  return context_of(_DIGITS).mpf(10) ** (-_DIGITS // 2)


def _norm(matrix: Matrix) -> Any:
  return max(map(abs, matrix))


class _Algebra:
  """Evaluator that represents trees as matrices; a number c becomes c times the identity."""

  def __init__(
    self, letters: frozenset[str], names: frozenset[str], are_transposed: bool, index: int
  ) -> None:
    self._context: Context = context_of(_DIGITS)
    self._letters = letters
    self._are_transposed = are_transposed  # if so, vectors cannot be antisymmetric matrices
    self._index = index
    numbers = names - letters
    self._point: Point = {n: Fraction(self._checksum(n) + 4000, 5003) for n in numbers}

  def value(self, tree: Tree) -> Matrix:
    """Return the value of a tree as a matrix; raises one of ERRORS if it has no value."""
    head = tree[0]
    if head == 'symbol' and tree[1] in self._letters:
      value, name = self._random(tree[1]), tree[1]
      is_small = name.startswith(_VECTORS) and not name.removeprefix('mathbf ')[:1].isupper()
      return value - value.T if is_small and not self._are_transposed else value
    if not symbols(tree) & self._letters and not heads(tree) & _ORDERED:
      return self._number(to_float(evaluate(tree, self._point, self._context), self._context))
    if head == 'negate':
      return -self.value(tree[1])
    if head == 'divide':
      return self.value(tree[1]) * self.value(tree[2]) ** -1
    if head == 'power':
      return self._power(tree[1], tree[2])
    if head in ('add', 'multiply'):
      values = map(self.value, tree[1])
      return functools.reduce(operator.add if head == 'add' else operator.mul, values)
    if head == 'compose':
      # The matrix in between makes f after g differ from fg. The matrix is its own inverse, so
      # inverting a composition inverts and swaps the functions.
      outer, inner = map(self.value, tree[1])
      base = self._random('compose')
      middle = base * self._context.diag([1, 1, -1]) * base**-1
      return outer * middle * inner
    if head in ('dot', 'cross'):
      return self._product_of_vectors(head, tree[1], tree[2])
    if head in ('function', 'call'):
      return self._unknown(head, tree[1], tree[2])
    raise UndefinedError(f'{head!r} is not a matrix')

  def _power(self, base: Tree, exponent: Tree) -> Matrix:
    value = self.value(base)
    if exponent in _TRANSPOSES:
      return value.T
    number: Any = None if symbols(exponent) else evaluate(exponent, {}, self._context)
    is_square = base[0] not in ('add', 'multiply') or not _has_transpose(base)
    min_exponent = -_MAX_EXPONENT if is_square else 0  # a matrix that isn't square has no inverse
    is_integer = isinstance(number, Fraction) and number.denominator == 1
    if is_integer and min_exponent <= number <= _MAX_EXPONENT:
      return value ** int(number)
    return self._unknown('power', repr(exponent), (base,))

  def _product_of_vectors(self, head: str, x: Tree, y: Tree) -> Matrix:
    if any(name.startswith(_DERIVATIVES) for name in symbols(x) | symbols(y)):
      return self._unknown(head, '', (x, y))  # an operator acts on the next factors
    a, b = self.value(x), self.value(y)
    return a * b - b * a if head == 'cross' else self._number(_dot(a, b))

  def _unknown(self, head: str, name: str, arguments: Sequence[Tree]) -> Matrix:
    """Return a pseudo-random matrix derived from a function's name and argument values."""
    values = list(map(self.value, arguments))
    if name == 'abs' and _is_zero(values[0] + values[0].T, (values[0],)):  # a vector
      return self._number(self._context.sqrt(_dot(values[0], values[0])))
    texts = [self._context.nstr(cell, 20) for value in values for cell in value]
    return self._random(' '.join((head, name, *texts)))

  def _random(self, name: str) -> Matrix:
    sums = [[self._checksum(f'{name} {i}{j}') for j in range(3)] for i in range(3)]
    return self._context.matrix(
      [[self._context.mpf(s + 1) / 4001 - 1 for s in row] for row in sums]
    )

  def _number(self, value: Any) -> Matrix:
    return self._context.eye(3) * value

  def _checksum(self, name: str) -> int:
    return zlib.crc32(f'{name} {self._index}'.encode()) % 10007


def _dot(a: Matrix, b: Matrix) -> Any:
  """Return the dot product of two vectors, given as antisymmetric matrices."""
  product = a * b
  return -sum(product[i, i] for i in range(3)) / 2


# ---- Derivatives, differentials and integrals ----

# Derivatives, differentials and integrals become calls of unknown functions: `\frac{ds}{dt}` calls
# 'd/dt' on s, and `dx` calls 'd' on x. Therefore, they match regardless of how the operand is
# written, but never equal a product of letters.

_SIGNS = ('d', 'partial', 'delta')
# Variables allowed in a differential outside a fraction or an integral.
_GREEK = ('theta', 'phi', 'rho', 'tau', 'omega', 'lambda')
_VARIABLES = frozenset((*'xyztrsuvwpqfVASEQTPNIUHLRWM', *_GREEK))
_COEFFICIENTS = {'b', 'c'}  # if both occur, d is the next coefficient


def with_forms(tree: Tree) -> Tree:
  """Replace a tree's derivatives, differentials and integrands with calls."""
  is_letter = symbols(tree) >= _COEFFICIENTS or _count_lone_signs(tree) > 0
  return _replace(tree, has_differentials=not is_letter)


def without_differentials(tree: Tree) -> Tree:
  """Read 'dv' in a tree as a product, in case d is a distance in the ground truth."""
  return rewrite(
    tree,
    lambda node: ('multiply', (('symbol', 'd'), *node[2])) if node[:2] == ('call', 'd') else None,
  )


def _replace(tree: Tree, has_differentials: bool) -> Tree:
  def replace(node: Tree) -> Tree | None:
    if node[0] == 'divide':
      return _derivative(node, has_differentials)
    if node[0] == 'call' and node[1].startswith('int_'):
      return 'call', node[1], tuple(_replace(argument, True) for argument in node[2])
    if node[0] == 'multiply':
      factors = _apply_operators([_replace(factor, has_differentials) for factor in node[1]])
      return make_product(_differentials(factors) if has_differentials else factors)
    return None

  return rewrite(tree, replace)


def _derivative(tree: Tree, has_differentials: bool) -> Tree | None:
  r"""Return `\frac{d^2y}{dx^2}` as a call of 'd^2/dxdx' on y or, without y, as an 'operator'."""
  if tree[1][0] == 'negate':
    derivative = _derivative(('divide', tree[1][1], tree[2]), has_differentials)
    return derivative and ('negate', derivative)
  factors, variables = _factors(tree[1]), _variables(_factors(tree[2]))
  start = next((i for i, factor in enumerate(factors) if _is_sign(factor)), None)
  if start is None or not variables:
    return None
  sign, *operand = factors[start:]
  order = Fraction(1)
  if sign[0] == 'power' and sign[2][0] == 'number':
    sign, order = sign[1], sign[2][1]
  name = f'{sign[1]}{f"^{order}" if order != 1 else ""}/{variables}'
  if not operand:
    return make_product([*factors[:start], ('operator', name)])
  call = 'call', name, (_replace(make_product(operand), has_differentials),)
  return make_product([*factors[:start], call])


def _is_sign(tree: Tree) -> bool:
  sign = tree[1] if tree[0] == 'power' else tree
  return sign[0] == 'symbol' and sign[1] in _SIGNS


def _factors(tree: Tree) -> Sequence[Tree]:
  return tree[1] if tree[0] == 'multiply' else (tree,)


def _variables(factors: Sequence[Tree]) -> str:
  """Return a derivative's variables, such as 'dxdx' for `dx^2`; '' for any other product."""
  text = ''
  for sign, variable in zip(factors[::2], factors[1::2], strict=len(factors) % 2 == 0):
    times = 1
    if variable[0] == 'power' and variable[2][0] == 'number' and 0 < variable[2][1] < 10:
      times, variable = int(variable[2][1]), variable[1]
    if sign[0] != 'symbol' or sign[1] not in _SIGNS or variable[0] != 'symbol':
      return ''
    text += f'{sign[1]}{variable[1]}' * times
  return text if len(factors) % 2 == 0 else ''


def _apply_operators(factors: Sequence[Tree]) -> list[Tree]:
  """Apply each operator to the product of all factors after it."""
  for index, factor in enumerate(factors):
    if factor[0] == 'operator' and index + 1 < len(factors):
      operand = make_product(_apply_operators(factors[index + 1 :]))
      return [*factors[:index], ('call', factor[1], (operand,))]
  return list(factors)


def _differentials(factors: Sequence[Tree]) -> list[Tree]:
  """Merge each 'd' and the variable after it into one call."""
  new_factors: list[Tree] = []
  for factor in factors:
    is_variable = factor[0] == 'symbol' and factor[1].partition('_')[0] in _VARIABLES
    if new_factors and new_factors[-1] == ('symbol', 'd') and is_variable:
      new_factors[-1] = ('call', 'd', (factor,))
    else:
      new_factors.append(factor)
  return new_factors


def _count_lone_signs(tree: Any) -> int:
  """Count every 'd' that is not part of a derivative and has no variable after it."""
  if not isinstance(tree, tuple) or not tree:
    return 0
  if tree == ('symbol', 'd'):
    return 1
  if tree[0] == 'divide' and _derivative(tree, has_differentials=False):
    return 0
  if tree[0] == 'multiply':
    return sum(map(_count_lone_signs, _differentials(tree[1])))
  return sum(map(_count_lone_signs, tree))
