r"""Tokens to an expression tree, by a bounded recursive descent.

A tree is a tuple: its head, then its children. Heads:

  ('number', Fraction)         ('symbol', name)          ('infinity',)
  ('add', (terms…))            ('multiply', (factors…))  ('negate', x)
  ('divide', x, y)             ('power', x, y)           ('plusminus', sign, x, y)
  ('function', name, (x…))     ('call', name, (x…))      ('factorial', x)
  ('percent', x)               ('degrees', x)            ('unit', x, name)
  ('group', '(', ')', (x…))    ('set', (x…))             ('braces', (x…))
  ('list', (x…))               ('rows', ((x…)…))         ('relation', (operators…), (sides…))
  ('union', (x…))              ('minus', x, y)           ('ratio', (x…))   ('text', words)

Letters in a row are multiplied, except that f(x), x(t) and I(0) are calls.
"""

import re
from fractions import Fraction

from exgrpo_jax.grading.answers.atoms import Atoms
from exgrpo_jax.grading.answers.cursor import (
  UnreadableError,
  added,
  has_symbol,
  multiplied,
  too_deep,
)
from exgrpo_jax.grading.answers.tokens import ACCENTS, BIG, FUNCTIONS, GREEK, Token
from exgrpo_jax.grading.answers.units import UNITS

_RELATIONS = {
  '=': '=',
  '<': '<',
  '>': '>',
  'le': '<=',
  'ge': '>=',
  'ne': '!=',
  'approx': '~',
  'in': 'in',
  'equiv': '=',
}

# The tokens that make a mixed number of the integer before them; n is a number.
_PARTS = {'n/n': 'n/n', 'frac{n}{n}': 'f{n}{n}', 'fracn{n}': 'fn{n}', 'frac{n}n': 'f{n}n'}

_NO_UNITS = frozenset(
  (
    'where',
    'when',
    'if',
    'for',
    'with',
    'not',
    'maybe',
    'is',
    'but',
    'then',
    'perhaps',
    'either',
    'than',
    'about',
    'mod',
    'only',
    'plus',
    'minus',
    'times',
    'unless',
    'except',
  )
)


def parse(found: list[Token]):
  """The tree of an answer's tokens; raises UnreadableError."""
  reader = _Grammar(found)
  tree = reader.answer()
  if not reader.ended():
    raise UnreadableError(str(reader.here().text))
  if too_deep(tree):
    raise UnreadableError('too deep')
  return tree


class _Grammar(Atoms):
  """Lists of relations between sums of products of powers of atoms."""

  # Lists and relations.

  def answer(self):
    """Items between commas; between semicolons, groups of them."""
    groups = [[]]
    while not self.ended():
      groups[-1].append(self.relation())
      if self._is(';'):
        self._next()
        groups.append([])
      elif not self._commas():
        break
    groups = [group for group in groups if group]
    if not groups:
      raise UnreadableError('nothing')
    if len(groups) > 1 and max(map(len, groups)) > 1:
      return 'list', tuple(('group', '(', ')', tuple(g)) if g[1:] else g[0] for g in groups)
    items = tuple(item for group in groups for item in group)
    return items[0] if len(items) == 1 else ('list', items)

  def _commas(self) -> bool:
    found = False
    while self._is(','):  # 'a, and b' has two
      self._next()
      found = True
    return found

  def relation(self):
    sides = [None if self._relation_here() else self._ratio()]
    operators = []
    while operator := self._relation_here():
      self._next()
      if operator == '=' and self._is('<', '>'):  # '=<'
        operator = self._next().text + '='
      operators.append(operator)
      sides.append(self._ratio())
    return ('relation', tuple(operators), tuple(sides)) if operators else sides[0]

  def _relation_here(self) -> str | None:
    token = self.here()
    return _RELATIONS.get(token.text) if token.kind in ('mark', 'command') else None

  def _ratio(self):
    parts = [self._union()]
    while self._is(':'):
      self._next()
      parts.append(self._union())
    return parts[0] if len(parts) == 1 else ('ratio', tuple(parts))

  def _union(self):
    parts = [self._sum()]
    while self._is('cup'):
      self._next()
      parts.append(self._sum())
    tree = parts[0] if len(parts) == 1 else ('union', tuple(parts))
    if self._is('setminus'):
      self._next()
      tree = ('minus', tree, self._sum())
    return tree

  # Sums, products, powers.

  def _sum(self):
    self.deeper()
    tree = (
      ('plusminus', 1 if self._next().text == 'pm' else -1, None, self._product())
      if self._is('pm', 'mp')
      else self._product()
    )
    terms = [tree]
    while self._is('+', '-', 'pm', 'mp'):
      sign, term = self._next().text, self._product()
      if sign in ('pm', 'mp'):
        terms = [('plusminus', 1 if sign == 'pm' else -1, added(terms), term)]
      else:
        terms.append(term if sign == '+' else ('negate', term))
    self._depth -= 1
    return added(terms)

  def _product(self):
    negative = self.sign()
    tree = self._factors()
    return ('negate', tree) if negative else tree

  def _factors(self):
    factors, literal = [], self._integer_here()
    factors.append(self._power())
    while True:
      if self._is('*'):
        self._next()
        factors.append(self._signed())
      elif self._is('/'):
        self._next()
        factors = [('divide', multiplied(factors), self._signed())]
      elif literal and len(factors) == 1 and (mixed := self._fraction_part(factors[0])):
        factors = [mixed]
      elif self._unit_here(factors):
        factors = [('unit', multiplied(factors), self._unit())]
      elif self._starts_factor():
        if self.here().kind == 'number' and factors[-1][0] in ('number', 'unit'):
          raise UnreadableError('two numbers in a row')
        factors.append(self._power())
      else:
        return multiplied(factors)
      literal = False

  def _signed(self):
    negative = self.sign()
    tree = self._power()
    return ('negate', tree) if negative else tree

  def _integer_here(self) -> bool:
    return self.here().kind == 'number' and self.here().text.isdecimal()

  def _fraction_part(self, whole):
    r"""The mixed number '1 1/2' or '1\frac{1}{2}', where that is what stands here."""
    kinds = ''.join(
      t.text if t.kind in ('mark', 'command') else t.kind[0]
      for t in self._tokens[self._at : self._at + 7]
    )
    found = next((f for f in _PARTS if kinds.startswith(f)), None)
    if whole[0] != 'number' or not found or (found == 'n/n' and not self.here().spaced):
      return None
    top, *_, bottom = [
      t.text for t in self._tokens[self._at : self._at + len(_PARTS[found])] if t.kind == 'number'
    ]
    if not (top.isdecimal() and bottom.isdecimal() and 0 < int(top) < int(bottom)):
      return None
    self._at += len(_PARTS[found])
    return 'number', whole[1] + Fraction(int(top), int(bottom))

  def _unit_here(self, factors) -> bool:
    token = self.here()
    if token.kind not in ('text', 'word') or factors[-1][0] == 'unit' or has_symbol(factors):
      return False
    if token.kind == 'text':
      return bool(re.match(r'[A-Za-z]', token.text))
    return len(token.text) > 1 and (token.text.lower() in UNITS or token.text.islower())

  def _unit(self) -> str:
    words = [self._next().text]
    if words[0].lower() in _NO_UNITS:
      raise UnreadableError(words[0])
    while self.here().kind in ('text', 'word') or self._is('/', '^'):
      token = self._next()
      if token.text == '^':
        braced = self._brace('{')
        if braced:
          self._next()
        exponent = self._next()
        if exponent.text == '-':
          exponent = Token('number', '-' + self._next().text, False)
        if braced:
          self._take('mark', '}')
        words.append('^' + exponent.text)
      else:
        words.append(token.text)
    return ' '.join(words)

  def _starts_factor(self) -> bool:
    token = self.here()
    if token.kind in ('number', 'word', 'tree'):
      return True
    if token.kind == 'mark':
      return token.text in '([{' or (token.text == '|' and not self._bars)
    return token.kind == 'command' and (
      token.text in FUNCTIONS
      or token.text in GREEK
      or token.text in ACCENTS
      or token.text in BIG
      or token.text
      in ('frac', 'binom', 'begin', '{', 'lfloor', 'lceil', 'angle', 'triangle', 'overline')
    )

  def _power(self):
    tree = self._postfixed(self._atom())
    if self._is('^'):
      self._next()
      self.deeper()
      if self._is('prime'):
        self._next()
        tree = self._primed(tree)
        self._depth -= 1
        return self._called(tree, tree[1][0]) if tree[0] == 'symbol' else tree
      exponent = self._argument(split=False)
      self._depth -= 1
      if exponent == ('symbol', 'prime'):
        return self._primed(tree)
      tree = self._postfixed(('power', tree, exponent))
    return tree

  def _primed(self, tree):
    if tree[0] != 'symbol':
      raise UnreadableError('a prime')
    return 'symbol', tree[1] + "'"

  def _postfixed(self, tree):
    while True:
      if self._is('!'):
        self._next()
        tree = ('factorial', tree)
      elif self._is('%'):
        self._next()
        tree = ('percent', tree)
      elif self._is('circ'):
        self._next()
        tree = ('degrees', tree)
      elif self._is("'"):
        self._next()
        tree = self._primed(tree)
      else:
        return tree

  def _argument(self, split: bool = True):
    r"""What LaTeX takes as an argument: a group in braces or one sign ('\frac12')."""
    if self._brace('{'):
      self._next()
      tree = self._union()
      self._take('mark', '}')
      return tree
    token = self.here()
    if split and token.kind == 'number' and len(token.text) > 1 and token.text.isdecimal():
      self._tokens[self._at] = Token('number', token.text[1:], False)
      return 'number', Fraction(int(token.text[0]))
    if self._is('-', '+'):
      return ('negate', self._argument(False)) if self.sign() else self._argument(False)
    return self._power() if not split else self._atom()
