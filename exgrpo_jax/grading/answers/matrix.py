"""Arithmetic of matrices whose cells are expression trees.

sympy computes powers and inverses, once for each size and exponent: of a matrix of unknowns, for
which the cells stand in afterwards.
"""

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers.tree import Tree, size

Rows = tuple[tuple[Tree, ...], ...]

_MAX_FACTORS = 3  # a product's cells grow by a factor with each matrix
_MAX_CELLS = 64
_MAX_ORDER = 4  # rows of a matrix of which a power is computed
_MAX_EXPONENT = 8
_MAX_INVERSE = 8  # order to the power of the exponent: 4 by 4 once, 2 by 2 three times
_MAX_PATHS = 64  # products that are added in a cell of a power
_MAX_NODES = 2000  # of a power's cells
TRANSPOSED: Tree = ('symbol', 'T')  # an exponent


def rows_of(tree: Tree) -> Rows | None:
  """The rows of a matrix, or of a sum, product, power or multiple of such; else None."""
  head = tree[0]
  if head == 'rows':
    return tree[1]
  if head == 'power' and (rows := rows_of(tree[1])):
    return tuple(zip(*rows, strict=True)) if tree[2] == TRANSPOSED else _power(rows, tree[2])
  if head == 'negate' and (rows := rows_of(tree[1])):
    return tuple(tuple(('negate', cell) for cell in row) for row in rows)
  if head == 'divide' and (rows := rows_of(tree[1])):
    return tuple(tuple(('divide', cell, tree[2]) for cell in row) for row in rows)
  if head not in ('add', 'multiply'):
    return None
  operands = [rows_of(operand) for operand in tree[1]]
  matrices = [rows for rows in operands if rows]
  if not 1 <= len(matrices) <= _MAX_FACTORS:
    return None
  if sum(len(rows) * len(rows[0]) for rows in matrices) > _MAX_CELLS:
    return None
  if head == 'add':
    return _add(matrices) if len(matrices) == len(operands) else None
  scalars = [operand for operand, rows in zip(tree[1], operands, strict=True) if not rows]
  return _multiply(scalars, matrices)


def _add(matrices: Sequence[Rows]) -> Rows | None:
  total, *others = matrices
  for rows in others:
    if (len(rows), len(rows[0])) != (len(total), len(total[0])):
      return None
    total = tuple(
      tuple(('add', cells) for cells in zip(*pair, strict=True))
      for pair in zip(total, rows, strict=True)
    )
  return total


def _multiply(scalars: Sequence[Tree], matrices: Sequence[Rows]) -> Rows | None:
  product, *others = matrices
  for rows in others:
    if len(product[0]) != len(rows):
      return None
    product = _dot(product, rows)
  if not scalars:
    return product
  return tuple(tuple(('multiply', (*scalars, cell)) for cell in row) for row in product)


def _dot(left: Rows, right: Rows) -> Rows:
  return tuple(
    tuple(
      ('add', tuple(('multiply', (row[k], right[k][j])) for k in range(len(right))))
      for j in range(len(right[0]))
    )
    for row in left
  )


def _power(rows: Rows, exponent: Tree) -> Rows | None:
  negative = exponent[0] == 'negate'
  number = exponent[1] if negative else exponent
  order = len(rows)
  if number[0] != 'number' or order != len(rows[0]) or order > _MAX_ORDER:
    return None
  count = number[1]
  if count.denominator != 1 or not 1 <= count <= _MAX_EXPONENT:
    return None
  if order ** (count - 1) > _MAX_PATHS or (negative and order**count > _MAX_INVERSE):
    return None
  unknowns = {f'c{i}{j}': rows[i][j] for i in range(order) for j in range(order)}
  if max(map(size, unknowns.values())) * order**count > _MAX_NODES:
    return None
  power = _generic_power(order, -int(count) if negative else int(count))
  return tuple(tuple(_substitute(cell, unknowns) for cell in row) for row in power)


@functools.cache
def _generic_power(order: int, exponent: int) -> tuple[tuple[Any, ...], ...]:
  """The cells, in sympy, of a power of the matrix of unknowns c00, c01 and so on."""
  import sympy

  matrix: Any = sympy.Matrix(order, order, lambda i, j: sympy.Symbol(f'c{i}{j}'))
  count = abs(exponent)
  power = matrix.adjugate() ** count / matrix.det() ** count if exponent < 0 else matrix**count
  return tuple(tuple(power[i, j] for j in range(order)) for i in range(order))


def _substitute(expression: Any, unknowns: Mapping[str, Tree]) -> Tree:
  """A polynomial quotient of sympy as a tree."""
  if expression.is_Symbol:
    return unknowns[expression.name]
  if expression.is_Rational:
    return 'number', Fraction(int(expression.p), int(expression.q))
  parts = tuple(_substitute(part, unknowns) for part in expression.args)
  if expression.is_Pow:
    return 'power', *parts
  return 'add' if expression.is_Add else 'multiply', parts
