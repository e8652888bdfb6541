"""Recursive-descent parser, with bounded depth, that turns tokens into an expression tree.

This module reads the operands: numbers, names, brackets, functions, matrices. Adjacent letters are
multiplied, except that f(x), x(t) and I(0) are calls.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers.grammar import FUNCTION_LETTERS, Grammar, UnreadableError
from exgrpo_jax.grading.answers.tokens import ACCENTS, BIG_OPERATORS, FUNCTIONS, SYMBOLS, Token
from exgrpo_jax.grading.answers.tree import MINUS_ONE, Tree, is_too_deep, make_product
from exgrpo_jax.grading.answers.units import UNITS

_CLOSING = {'(': ')', '[': ']'}
# Accents above the repeating part of a decimal.
_REPEATING = ('overline', 'bar', 'dot', 'hat', 'widehat')
_MATRICES = ('pmatrix', 'bmatrix', 'matrix', 'array', 'Bmatrix', 'smallmatrix')


def parse(tokens: Sequence[Token]) -> Tree:
  """Parse an answer's tokens into a tree; raises UnreadableError if they cannot be parsed."""
  parser = _Parser(tokens)
  tree = parser.answer()
  if not parser.at_end():
    raise UnreadableError(f'{parser.peek().text!r} is not allowed here')
  if is_too_deep(tree):
    raise UnreadableError('nested too deeply')
  return tree


class _Parser(Grammar):
  """The parser for whole answers."""

  def _atom(self) -> Tree:
    self._enter()
    token = self._advance()
    if token.kind == 'tree':
      tree = token.tree
    elif token.kind == 'number':
      tree = self._number(token)
    elif token.kind == 'word':
      tree = self._name(token.text)
    elif token.kind == 'command':
      tree = self._command(token.text)
    elif token.kind == 'mark':
      tree = self._bracketed(token.text)
    elif token.kind == 'text' and (len(token.text) == 1 or self._next_is('_', '=')):
      tree = self._name(token.text)
    else:
      raise UnreadableError(f'{token.text or "the end"!r} cannot start an operand')
    self._depth -= 1
    return tree

  # Numbers and names.

  def _number(self, token: Token) -> Tree:
    value = Fraction(token.text.removesuffix('.'))
    if '.' in token.text and self._repeating_is_next():
      digits = ''
      while self._repeating_is_next():  # '0.\dot{1}\dot{2}' has two accents
        self._advance()
        digits += self._subscript()
      if not digits.isdecimal():
        raise UnreadableError(f'{digits!r} cannot be the repeating part of a decimal')
      shift = 10 ** len(token.text.partition('.')[2])
      value += Fraction(int(digits), (10 ** len(digits) - 1) * shift)
    return 'number', value

  def _repeating_is_next(self) -> bool:
    text = ''.join(token.text for token in self._tokens[self._at + 1 : self._at + 3])
    return self._next_is(*_REPEATING) and text.removeprefix('{')[:1].isdecimal()

  def _name(self, name: str) -> Tree:
    if name in UNITS and len(name) < 4:  # a unit cannot start here, so 'mg' is m times g
      letters = [Token('word', letter, spaced=False) for letter in name]
      self._tokens[self._at : self._at] = letters
      name = self._advance().text
    if self._accept('_'):
      name = f'{name}_{self._subscript()}'
    elif len(name) == 1 and self._integer_is_next() and not self.peek().spaced:
      name = f'{name}_{self._advance().text}'  # 'x1'
    return self._symbol_or_call(('symbol', name), name.rpartition(' ')[2][0])

  def _subscript(self) -> str:
    """Read a LaTeX argument that is a name, such as a subscript, and join its tokens."""
    if not self._next_is_mark('{'):
      if self._integer_is_next() and len(self.peek().text) > 1:
        return self._split_digit()
      return self._advance().text
    self._advance()
    depth, parts = 1, []
    while depth:
      token = self._advance()
      if token.kind == 'end':
        raise UnreadableError('a subscript is not closed')
      if token.kind == 'mark':
        depth += {'{': 1, '}': -1}.get(token.text, 0)
      parts.append(token.text)
    return ''.join(parts[:-1])

  def _symbol_or_call(self, symbol: Tree, letter: str) -> Tree:
    if not self._next_is_mark('(') or symbol[1] == 'pi':
      return symbol
    start = self._at
    self._advance()
    inner = self._bracketed('(')
    arguments = inner[3] if inner[0] == 'group' else (inner,)
    are_plain = all(
      argument[0] in ('symbol', 'number') or (argument[0] == 'add' and len(argument[1]) == 1)
      for argument in arguments
    )
    is_half_open = inner[0] == 'group' and inner[1:3] == ('(', ']')
    has_groups = inner[:2] == ('group', '[') or any(item[0] == 'group' for item in arguments)
    is_primed = "'" in symbol[1] and letter.islower()  # A'(B + C) is a product
    is_function = letter in FUNCTION_LETTERS or is_primed or are_plain or has_groups
    if is_function and not is_half_open:
      return 'call', symbol[1], arguments
    self._put_back(start, inner)
    return symbol

  # Brackets.

  def _items(self) -> list[Tree]:
    items = [self._relation()]
    while self._accept(',', ';'):
      items.append(self._relation())
    return items

  def _bracketed(self, mark: str) -> Tree:
    """Read the rest of a group after its opening bracket, brace or bar."""
    if mark in _CLOSING:
      return self._parenthesized(mark)
    if mark == '{':
      items = self._items()
      self._expect('mark', '}')
      return items[0] if len(items) == 1 else ('braces', tuple(items))
    if mark == '|':
      self._bars += 1
      tree = self._sum()
      self._expect('mark', '|')
      self._bars -= 1
      return 'function', 'abs', (tree,)
    raise UnreadableError(f'{mark!r} cannot start an operand')

  def _parenthesized(self, mark: str) -> Tree:
    bars, self._bars = self._bars, 0
    items = self._items()
    self._bars = bars
    closing = self._advance()
    if closing.kind != 'mark' or closing.text not in ')]':
      raise UnreadableError('a bracket is not closed')
    if len(items) > 1:
      return 'group', mark, closing.text, tuple(items)
    if closing.text != _CLOSING[mark]:
      raise UnreadableError('a half-open interval needs two endpoints')
    (item,) = items
    # A sum with one term, because '(2)(3)' is a product but '2 3' is not.
    return ('add', (item,)) if item[0] == 'number' else item

  def _set(self) -> Tree:
    r"""Read what follows '\{': a set, or the condition in '\{x \mid x < 5\}'."""
    bars, self._bars = self._bars, 1  # '|' ends the variable, not an absolute value
    items = [] if self._next_is('}') else self._items()
    self._bars = bars
    if len(items) == 1 and self._accept('|'):
      items = self._items()
      self._expect('command', '}')
      return items[0] if len(items) == 1 else ('list', tuple(items))
    self._expect('command', '}')
    if items and all(item[0] == 'relation' for item in items):
      _, operators, (first, *sides) = items[0]
      if first and first[0] == 'ratio' and len(first[1]) == 2:  # '\{x : x < 5\}'
        items[0] = ('relation', operators, (first[1][1], *sides))
        return items[0] if len(items) == 1 else ('list', tuple(items))
    return 'set', tuple(items)

  # Commands.

  def _command(self, name: str) -> Tree:
    if name in FUNCTIONS:
      return self._function(name)
    if name in BIG_OPERATORS:
      return self._big_operator(name)
    if name in ACCENTS:
      return self._accented(name)
    if name in ('frac', 'binom'):
      arguments = self._argument(), self._argument()
      return ('divide', *arguments) if name == 'frac' else ('function', 'binom', arguments)
    if name in ('lfloor', 'lceil'):
      tree = self._sum()
      self._expect('command', 'r' + name[1:])
      return 'function', name[1:], (tree,)
    if name in ('angle', 'triangle'):
      return self._angle(name)
    if name == '{':
      return self._set()
    if name == 'begin':
      return self._matrix()
    return self._command_symbol(name)

  def _command_symbol(self, name: str) -> Tree:
    if name == 'infty':
      return ('infinity',)
    if name == 'emptyset':
      return 'set', ()
    if name == 'Delta' and (self.peek().kind == 'word' or self.peek().text in SYMBOLS):
      return self._accented(name)  # the change in the variable that follows
    if name in SYMBOLS:
      return self._name(name)
    raise UnreadableError(f'\\{name} is unknown')

  def _accented(self, accent: str) -> Tree:
    inner = self._subscript() if self._next_is_mark('{') else self._advance().text
    if inner in ('(', ''):
      raise UnreadableError('an accent must be placed on a name')
    return self._name(f'{accent} {inner}')

  def _angle(self, name: str) -> Tree:
    parts = []
    while self.peek().kind == 'word':
      parts.append(self._advance().text)
      if self._accept('_'):
        parts.append('_' + self._subscript())
    return 'symbol', f'{name} {"".join(parts)}'

  def _big_operator(self, name: str) -> Tree:
    """Read a sum, integral or limit as a call whose arguments are its upper bound and operand.

    The call is never evaluated.
    """
    lower, upper = self._scripts(self._subscript)
    return 'call', f'{name}_{lower or ""}', (upper or ('number', Fraction(0)), self._factors())

  def _scripts(self, lower: Callable[[], Any]) -> tuple[Any, Tree | None]:
    """Read a subscript (using `lower`) and a superscript in either order; a missing one is None."""
    subscript = superscript = None
    while mark := self._accept('_', '^'):
      if mark == '_':
        subscript = lower()
      else:
        superscript = self._argument(split=False)
    return subscript, superscript

  def _function(self, name: str) -> Tree:
    if name == 'sqrt':
      return self._root()
    base, exponent = self._scripts(self._argument)
    has_brackets = any(self._next_is_mark(mark) for mark in '{([')
    argument = self._atom() if has_brackets else self._signed(self._unbracketed)
    if name in ('gcd', 'lcm') and argument[0] == 'group':
      tree = ('function', name, argument[3])
    elif name == 'lg' or (name == 'log' and base is not None):
      tree = ('function', 'log', (argument, base or ('number', Fraction(10))))
    else:
      tree = ('function', 'log' if name == 'ln' else name, (argument,))
    if exponent == MINUS_ONE and 'arc' + name in FUNCTIONS:
      return 'function', 'arc' + name, (argument,)
    return tree if exponent is None else ('power', tree, exponent)

  def _root(self) -> Tree:
    index = None
    if self._accept('['):
      index = self._sum()
      self._expect('mark', ']')
    argument = self._argument(split=False) if self._next_is_mark('{') else self._atom()
    return 'function', 'sqrt', (argument,) if index is None else (argument, index)

  def _unbracketed(self) -> Tree:
    """Read a function's argument that is not in brackets, such as the '2 t' in 'sin 2 t'.

    It ends at a sign, a bracket or another function.
    """
    factors = [self._power()]
    ends = (*FUNCTIONS, '(', '[', '|')
    while self._starts_factor() and self.peek().text not in ends:
      factors.append(self._power())
    return make_product(factors)

  def _matrix(self) -> Tree:
    environment = self._subscript()
    if environment not in _MATRICES:
      raise UnreadableError(f'the environment {environment!r} is not a matrix')
    if environment == 'array' and self._next_is_mark('{'):
      self._subscript()  # the alignment of its columns
    rows: list[list[Tree]] = [[]]
    while not self._next_is('end'):
      rows[-1].append(self._relation())
      if self._accept('\\'):
        if not self._next_is('end'):
          rows.append([])
      elif not self._accept('&') and not self._next_is('end'):
        raise UnreadableError('a matrix is not closed')
    self._advance()
    self._subscript()  # the environment's name again
    if len({len(row) for row in rows}) != 1:
      raise UnreadableError('the rows of a matrix differ in length')
    return 'rows', tuple(map(tuple, rows))
