"""Binomial coefficients that are written as C(n, k) or C_n^k."""

from typing import Any

from exgrpo_jax.grading.answers import latex
from exgrpo_jax.grading.answers.cursor import UnreadableError
from exgrpo_jax.grading.answers.tokens import tokenize
from exgrpo_jax.grading.answers.tree import Tree, heads, symbols

_NAME = 'C'


def read_coefficients(given: Tree, truth: Tree) -> tuple[Tree, Tree]:
  """Both trees, one with its C(n, k) as binomial coefficients where it can mean nothing else.

  C may also name a point or a constant. So a response's is a coefficient only if the truth has no C
  of its own, and a truth's only if the response has a coefficient or a factorial instead.
  """
  if _names(given) and not _names(truth):
    return _replace(given), truth
  if _names(truth) and not _names(given) and heads(given) & {'binom', 'factorial'}:
    return given, _replace(truth)
  return given, truth


def _names(tree: Tree) -> list[str]:
  """Names of C, C_n or C()."""
  return [name for name in symbols(tree) if name.removesuffix('()').partition('_')[0] == _NAME]


def _replace(tree: Any) -> Any:
  if not isinstance(tree, tuple) or not tree:
    return tree
  if tree[:2] == ('call', _NAME) and len(tree[2]) == 2:
    return _coefficient(tree, *tree[2])
  if tree[0] == 'power' and tree[1][0] == 'symbol' and tree[1][1].startswith(f'{_NAME}_'):
    try:
      total = latex.parse(tokenize(tree[1][1].removeprefix(f'{_NAME}_')) or ())
    except (UnreadableError, RecursionError):
      return tree
    return _coefficient(tree, total, tree[2])
  return tuple(map(_replace, tree))


def _coefficient(tree: Tree, total: Tree, count: Tree) -> Tree:
  """The coefficient, unless more are to be chosen than there are: C(2, 3) is a point."""
  if total[0] == count[0] == 'number' and not 0 <= count[1] <= total[1]:
    return tree
  return 'function', 'binom', (total, count)
