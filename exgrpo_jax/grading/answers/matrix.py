"""Arithmetic of matrices whose cells are expression trees."""

from collections.abc import Sequence

from exgrpo_jax.grading.answers.tree import Tree

Rows = tuple[tuple[Tree, ...], ...]

_MAX_FACTORS = 3  # a product's cells grow by a factor with each matrix
_MAX_CELLS = 64


def rows_of(tree: Tree) -> Rows | None:
  """The rows of a matrix, or of a sum, product, quotient or multiple of such; else None."""
  head = tree[0]
  if head == 'rows':
    return tree[1]
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
