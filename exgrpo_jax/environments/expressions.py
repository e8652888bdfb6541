"""A calculator for models: arithmetic on numbers only, in bounded time and memory."""

import ast
import operator
from collections.abc import Callable, Mapping

_LONGEST = 1000  # characters
_LARGEST = 10**100  # absolute value of an intermediate result
_LARGEST_POWER = 1000  # absolute value of an exponent

Number = int | float

_BINARY: Mapping[type, Callable[[Number, Number], Number]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
}
_UNARY: Mapping[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


# The model sees this docstring in its prompt and the errors as replies. Keep their words.
def calculate(expression: str) -> str:
  """Computes an arithmetic expression, with + - * / // % ** and parentheses.

  Args:
    expression: such as 3 * (4.5 - 2) ** 2.

  Returns:
    The number.
  """  # noqa: D401
  if len(expression) > _LONGEST:
    raise ValueError(f'an expression can have at most {_LONGEST} characters')
  return str(_value(ast.parse(expression.strip(), mode='eval').body))


def _value(node: ast.expr) -> Number:
  match node:
    case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
      value = number
    case ast.BinOp() if type(node.op) in _BINARY:
      left, right = _value(node.left), _value(node.right)
      if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_POWER:
        raise ValueError(f'an exponent is at most {_LARGEST_POWER}')
      value = _BINARY[type(node.op)](left, right)
    case ast.UnaryOp() if type(node.op) in _UNARY:
      value = _UNARY[type(node.op)](_value(node.operand))
    case _:
      raise ValueError('an expression may contain only numbers, + - * / // % ** and parentheses')
  if isinstance(value, complex) or not abs(value) <= _LARGEST:
    raise ValueError(f'numbers are real, and at most {_LARGEST:.0e}')
  return value
