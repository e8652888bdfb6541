r"""Derivatives, differentials and integrals, whose `d` and `\partial` are no factors.

They become calls of unknown functions: `\frac{ds}{dt}` is the call 'd/dt' of s, and `dx` the call
'd' of x. So they equal themselves, with any spelling of their operand, but no product of letters.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers.tree import Tree, make_product, symbols

_SIGNS = ('d', 'partial', 'delta')
# Letters that a differential without a fraction or an integral may have.
_GREEK = ('theta', 'phi', 'rho', 'tau', 'omega', 'lambda')
_VARIABLES = frozenset((*'xyztrsuvwpqfVASEQTPNIUHLRWM', *_GREEK))
_COEFFICIENTS = {'b', 'c'}  # beside them d is the next letter


def with_forms(tree: Tree) -> Tree:
  """Replace derivatives, differentials and integrands of a tree by calls."""
  is_letter = symbols(tree) >= _COEFFICIENTS or _count_lone_signs(tree) > 0
  return _replace(tree, has_differentials=not is_letter)


def without_differentials(tree: Any) -> Any:
  """Return a tree with 'dv' as a product, as it is where the ground truth has a distance d."""
  if not isinstance(tree, tuple) or not tree:
    return tree
  if tree[:2] == ('call', 'd'):
    return 'multiply', (('symbol', 'd'), *tree[2])
  return tuple(map(without_differentials, tree))


def _replace(tree: Any, has_differentials: bool) -> Any:
  if not isinstance(tree, tuple) or not tree:
    return tree
  if tree[0] == 'divide' and (derivative := _derivative(tree, has_differentials)):
    return derivative
  if tree[0] == 'call' and tree[1].startswith('int_'):
    return 'call', tree[1], tuple(_replace(argument, True) for argument in tree[2])
  if tree[0] == 'multiply':
    factors = [_replace(factor, has_differentials) for factor in tree[1]]
    factors = _applied(factors)
    return make_product(_differentials(factors) if has_differentials else factors)
  return tuple(_replace(child, has_differentials) for child in tree)


def _derivative(tree: Tree, has_differentials: bool) -> Tree | None:
  r"""Return `\frac{d^2y}{dx^2}` as the call 'd^2/dxdx' of y; without operand as an 'operator'."""
  if tree[1][0] == 'negate':
    positive = _derivative(('divide', tree[1][1], tree[2]), has_differentials)
    return positive and ('negate', positive)
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
  """Return what a derivative is taken by, such as 'dxdx' for `dx^2`; '' for another product."""
  text = ''
  for sign, variable in zip(factors[::2], factors[1::2], strict=len(factors) % 2 == 0):
    times = 1
    if variable[0] == 'power' and variable[2][0] == 'number' and 0 < variable[2][1] < 10:
      times, variable = int(variable[2][1]), variable[1]
    if sign[0] != 'symbol' or sign[1] not in _SIGNS or variable[0] != 'symbol':
      return ''
    text += f'{sign[1]}{variable[1]}' * times
  return text if len(factors) % 2 == 0 else ''


def _applied(factors: Sequence[Tree]) -> list[Tree]:
  """Return the factors with each operator applied to the product of all that follow it."""
  for index, factor in enumerate(factors):
    if factor[0] == 'operator' and index + 1 < len(factors):
      operand = make_product(_applied(factors[index + 1 :]))
      return [*factors[:index], ('call', factor[1], (operand,))]
  return list(factors)


def _differentials(factors: Sequence[Tree]) -> list[Tree]:
  """Return the factors with 'd' and the variable after it as one call."""
  found: list[Tree] = []
  for factor in factors:
    is_variable = factor[0] == 'symbol' and factor[1].partition('_')[0] in _VARIABLES
    if found and found[-1] == ('symbol', 'd') and is_variable:
      found[-1] = ('call', 'd', (factor,))
    else:
      found.append(factor)
  return found


def _count_lone_signs(tree: Any) -> int:
  """Count the times that 'd' stands without a variable after it, outside of derivatives."""
  if not isinstance(tree, tuple) or not tree:
    return 0
  if tree == ('symbol', 'd'):
    return 1
  if tree[0] == 'divide' and _derivative(tree, has_differentials=False):
    return 0
  if tree[0] == 'multiply':
    return sum(map(_count_lone_signs, _differentials(tree[1])))
  return sum(map(_count_lone_signs, tree))
