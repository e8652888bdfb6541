"""What stands between two operators: numbers, names, brackets, functions, matrices."""

from fractions import Fraction

from exgrpo_jax.grading.answers.cursor import Cursor, UnreadableError, multiplied
from exgrpo_jax.grading.answers.tokens import ACCENTS, BIG, FUNCTIONS, GREEK, Token
from exgrpo_jax.grading.answers.units import UNITS

_CALLED = frozenset('fgh')
_CLOSING = {'(': ')', '[': ']'}


class Atoms(Cursor):
  """Reads atoms; what stands within their brackets is read by the subclass."""

  def _atom(self):
    self.deeper()
    token = self._next()
    if token.kind == 'tree':
      tree = token.text
    elif token.kind == 'number':
      tree = self._number(token)
    elif token.kind == 'word':
      tree = self._name(token.text)
    elif token.kind == 'command':
      tree = self._command(token.text)
    elif token.kind == 'mark':
      tree = self._bracketed(token.text)
    elif token.kind == 'text' and (len(token.text) == 1 or self._is('_', '=')):
      tree = self._name(token.text)
    else:
      raise UnreadableError(token.text or 'the end')
    self._depth -= 1
    return tree

  def _number(self, token: Token):
    text = token.text
    value = Fraction(text.rstrip('.') if text.endswith('.') else text)
    if self._is('overline') and '.' in text:
      self._next()
      self._take('mark', '{')
      digits = self._next().text
      self._take('mark', '}')
      if not digits.isdecimal():
        raise UnreadableError('a repeating decimal')
      shift = 10 ** len(text.partition('.')[2])
      value += Fraction(int(digits), (10 ** len(digits) - 1) * shift)
    return 'number', value

  def _name(self, name: str):
    if name in UNITS and len(name) < 4:  # 'mg' that is no unit here is m times g
      letters = [Token('word', letter, False) for letter in name]
      self._tokens[self._at : self._at] = letters
      name = self._next().text
    if self._is('_'):
      self._next()
      name = f'{name}_{self._subscript()}'
    elif (
      len(name) == 1
      and self.here().kind == 'number'
      and not self.here().spaced
      and self.here().text.isdecimal()
    ):
      name = f'{name}_{self._next().text}'  # 'x1'
    return self._called(('symbol', name), name[0])

  def _subscript(self) -> str:
    """The tokens of a subscript, run together."""
    if not self._brace('{'):
      token = self.here()
      if token.kind == 'number' and token.text.isdecimal() and len(token.text) > 1:
        self._tokens[self._at] = Token('number', token.text[1:], False)
        return token.text[0]
      return self._next().text
    self._next()
    depth, parts = 1, []
    while depth:
      token = self._next()
      if token.kind == 'end':
        raise UnreadableError('an open subscript')
      depth += {('mark', '{'): 1, ('mark', '}'): -1}.get(token[:2], 0)
      parts.append(token.text)
    return ''.join(parts[:-1])

  def _called(self, tree, letter: str):
    """A symbol, or a call of it where a bracket follows that holds an argument."""
    if not self._is('(') or self.here().kind != 'mark':
      return tree
    start = self._at
    self._next()
    inner = self._bracketed('(')
    arguments = inner[3] if inner[0] == 'group' else (inner,)
    plain = all(
      a[0] in ('symbol', 'number') or (a[0] == 'add' and len(a[1]) == 1) for a in arguments
    )
    half_open = inner[0] == 'group' and inner[2] != ')'
    if not half_open and (letter in _CALLED or "'" in tree[1] or plain):
      return 'call', tree[1], arguments
    self.put_back(start, inner)
    return tree

  def _items(self, *closing: str) -> tuple:
    items = [self.relation()]
    while self._is(',', ';') and not self._is(*closing):
      self._next()
      items.append(self.relation())
    return tuple(items)

  def _bracketed(self, mark: str):
    if mark in _CLOSING:
      bars, self._bars = self._bars, 0
      items = self._items(')', ']')
      self._bars = bars
      closing = self._next()
      if closing.kind != 'mark' or closing.text not in ')]':
        raise UnreadableError('an open bracket')
      if len(items) == 1 and closing.text == _CLOSING[mark]:
        return items[0] if items[0][0] != 'number' else ('add', items)  # (2)(3) is a product
      if len(items) == 1:
        raise UnreadableError('half a bracket')
      return 'group', mark, closing.text, items
    if mark == '{':
      items = self._items('}')
      if self._is('choose'):
        self._next()
        items = (('function', 'binom', (*items, self.relation())),)
      self._take('mark', '}')
      return items[0] if len(items) == 1 else ('braces', items)
    if mark == '|':
      self._bars += 1
      tree = self._sum()
      self._take('mark', '|')
      self._bars -= 1
      return 'function', 'abs', (tree,)
    raise UnreadableError(mark)

  def _command(self, name: str):
    if name == 'frac':
      return 'divide', self._argument(), self._argument()
    if name == 'binom':
      return 'function', 'binom', (self._argument(), self._argument())
    if name == 'infty':
      return ('infinity',)
    if name == '{':
      bars, self._bars = self._bars, 1  # a bar here ends the names of a set's elements
      items = () if self._is('}') else self._items('}', '|')
      self._bars = bars
      if self._is('|') and len(items) == 1:  # '{x | x < 5}' is its condition
        self._next()
        condition = self._items('}')
        self._take('command', '}')
        return condition[0] if len(condition) == 1 else ('list', condition)
      self._take('command', '}')
      if (
        len(items) == 1
        and items[0][0] == 'relation'
        and (first := items[0][2][0])
        and (first[0] == 'ratio' and len(first[1]) == 2)
      ):  # '{x : x < 5}'
        return 'relation', items[0][1], (first[1][1], *items[0][2][1:])
      return 'set', items
    if name in ('lfloor', 'lceil'):
      tree = self._sum()
      self._take('command', 'rfloor' if name == 'lfloor' else 'rceil')
      return 'function', name[1:], (tree,)
    if name in FUNCTIONS:
      return self._function(name)
    if name == 'begin':
      return self._matrix()
    if name in ACCENTS:
      inner = self._subscript() if self._brace('{') else self._next().text
      if inner == '(':  # '\vec(a)' names nothing that is known
        raise UnreadableError('an accent on a bracket')
      return self._name(f'{name} {inner}')
    if name in ('angle', 'triangle'):
      return self._angle(name)
    if name in BIG:
      return self._big(name)
    if name in GREEK:
      return self._name(name) if name != 'emptyset' else ('set', ())
    raise UnreadableError('\\' + name)

  def _angle(self, name: str):
    parts = []
    while self.here().kind == 'word':
      parts.append(self._next().text)
      if self._is('_'):
        self._next()
        parts.append('_' + self._subscript())
    return 'symbol', f'{name} {"".join(parts)}'

  def _big(self, name: str):
    """A sum or integral: its limits and what stands under it, not worked out."""
    limits = {'_': '', '^': ('number', Fraction(0))}
    while self._is('_', '^'):
      mark = self._next().text
      limits[mark] = self._subscript() if mark == '_' else self._argument(False)
    return 'call', f'{name}_{limits["_"]}', (limits['^'], self._factors())

  def _function(self, name: str):
    base = exponent = None
    if name == 'sqrt':
      if self._is('['):
        self._next()
        base = self._sum()
        self._take('mark', ']')
      argument = self._argument(False) if self._brace('{') else self._atom()
      return 'function', 'sqrt', (argument,) if base is None else (argument, base)
    while self._is('_', '^'):
      if self._next().text == '_':
        base = self._argument()
      else:
        exponent = self._argument(False)
    bracketed = self._brace('{') or self._brace('(') or self._brace('[')
    argument = self._atom() if bracketed else self._simple_factors()
    if name == 'log' and base is not None:
      tree = ('function', 'log', (argument, base))
    else:
      tree = ('function', {'lg': 'log', 'ln': 'log'}.get(name, name), (argument,))
    if exponent == ('negate', ('number', Fraction(1))) and 'arc' + name in FUNCTIONS:
      return 'function', 'arc' + name, (argument,)
    return tree if exponent is None else ('power', tree, exponent)

  def _simple_factors(self):
    """An argument without brackets: 'sin 2 t' reads on up to a sign or another function."""
    negative = self.sign()
    factors = [self._power()]
    while (
      self._starts_factor() and self.here().text not in FUNCTIONS and not self._is('(', '[', '|')
    ):
      factors.append(self._power())
    return ('negate', multiplied(factors)) if negative else multiplied(factors)

  def _matrix(self):
    name = self._subscript()
    if name not in ('pmatrix', 'bmatrix', 'matrix', 'array', 'Bmatrix', 'smallmatrix', 'cases'):
      raise UnreadableError(name)
    if name == 'array' and self._brace('{'):
      self._subscript()
    rows = [[]]
    while not self._is('end'):
      rows[-1].append(self.relation())
      if self._is('&'):
        self._next()
      elif self._is('\\'):
        self._next()
        if not self._is('end'):
          rows.append([])
      elif not self._is('end'):
        raise UnreadableError('an open matrix')
    self._next()
    self._subscript()
    if len({len(row) for row in rows}) != 1 or name == 'cases':
      raise UnreadableError('a ragged matrix')
    return 'rows', tuple(map(tuple, rows))
