"""The parser's grammar, from lists of relations down to powers; latex.py reads the operands."""

import abc
import itertools
import re
import string
from collections.abc import Callable, Sequence
from fractions import Fraction

from exgrpo_jax.grading.answers.operators import is_vector
from exgrpo_jax.grading.answers.tokens import (
  ACCENTS,
  BIG_OPERATORS,
  FUNCTIONS,
  SYMBOLS,
  Token,
  paired,
)
from exgrpo_jax.grading.answers.tree import MINUS_ONE, Tree, make_product, make_sum, symbols
from exgrpo_jax.grading.answers.units import (
  LETTERS,
  MULTIPLIERS,
  NUMBER_WORDS,
  OPERATION_WORDS,
  UNITS,
  joined,
  measure,
  normalize_unit,
)

# ---- Reading tokens one by one ----

_MAX_DEPTH = 40  # levels of nested brackets and sums


class UnreadableError(ValueError):
  """Raised for text that the parser cannot read as mathematics."""


_END = Token('end', '', spaced=False)


class Cursor:
  """Base class of the parser; each method of a subclass reads one construct and stops after it."""

  def __init__(self, tokens: Sequence[Token]) -> None:
    self._tokens = list(tokens)
    self._at = 0
    self._depth = 0  # nesting depth
    self._bars = 0  # number of absolute values open in this bracket; if positive, '|' closes one

  def at_end(self) -> bool:
    """Return True if all tokens have been read."""
    return self._at >= len(self._tokens)

  def peek(self) -> Token:
    """Return the next token without reading it; at the end, return a token of kind 'end'."""
    return _END if self.at_end() else self._tokens[self._at]

  def _advance(self) -> Token:
    token = self.peek()
    self._at += 1
    return token

  def _next_is(self, *texts: str) -> bool:
    """Return True if the next token is one of these marks or commands."""
    token = self.peek()
    return token.kind in ('mark', 'command') and token.text in texts

  def _accept(self, *texts: str) -> str:
    """Read the next token if it is one of these marks or commands; return its text, else ''."""
    return self._advance().text if self._next_is(*texts) else ''

  def _next_is_mark(self, text: str) -> bool:
    r"""Return True if the next token is this mark; '{' means a grouping brace, not a set's '\{'."""
    token = self.peek()
    return token.kind == 'mark' and token.text == text

  def _integer_is_next(self) -> bool:
    return self.peek().kind == 'number' and self.peek().text.isdecimal()

  def _expect(self, kind: str, text: str) -> None:
    """Read the next token; raises UnreadableError unless it has this kind and text."""
    token = self._advance()
    if token.kind != kind or token.text != text:
      raise UnreadableError(f'expected {text!r}, not {token.text!r}')

  def _split_digit(self) -> str:
    r"""Read only the first digit of an integer, as LaTeX does in 'x_12'."""
    digits = self.peek().text
    self._tokens[self._at] = Token('number', digits[1:], spaced=False)
    return digits[0]

  def _enter(self) -> None:
    """Increment `_depth`, whose limit bounds the recursion; the caller decrements it afterwards."""
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise UnreadableError('nested too deeply')

  def _put_back(self, start: int, tree: Tree) -> None:
    """Replace the tokens read since `start` with one token that contains their tree.

    Reading them again would take time exponential in the nesting depth.
    """
    self._tokens[start : self._at] = [Token('tree', '', spaced=False, tree=tree)]
    self._at = start


_RELATIONS = paired('= = < < > > le <= ge >= ne != approx ~ in in equiv =')

# Spellings of the fraction in a mixed number, where n is any number. Each spelling is mapped to a
# string with one character per token.
_FRACTION_PARTS = {'n/n': 'n/n', 'frac{n}{n}': 'f{n}{n}', 'fracn{n}': 'fn{n}', 'frac{n}n': 'f{n}n'}

# Words that cannot start a unit: '5 where n = 2' is not 5 of some unit. Neither are '5 more' and
# '5 two', but '5 more apples' and '5 two-dollar bills' are. '7 ten-thousandths' is not 7.
_NON_UNIT_WORDS = """where when if for with not maybe is but then perhaps either than about only
unless parts score and at half tens wrong incorrect etc possibly probably unsure guess false never
unknown impossible undefined excluded versus alternatively double doubled halved nor neither"""
_NON_UNITS = OPERATION_WORDS.union(_NON_UNIT_WORDS.split())
_BEFORE_UNITS = NUMBER_WORDS.union(
  ('more', 'less', 'of', 'double', 'false', 'unknown', 'impossible', 'undefined', 'excluded')
)
_NOT_IN_UNITS = frozenset({'or', 'than', 'most', 'least', 'not'})  # anywhere: '5 more than x'

_OPERAND_COMMANDS = FUNCTIONS.union(SYMBOLS, ACCENTS, BIG_OPERATORS).union(
  ('frac', 'binom', 'begin', '{', 'lfloor', 'lceil', 'angle', 'triangle')
)

FUNCTION_LETTERS = frozenset('fgh')
_ITEM_ENDS = frozenset(',;)]}&\\') | {'end'}
_SMALL_WORDS = ('ii', 'iv', 'vi', 'ix', 'xi', 'no', 'on', 'up', 'go', 'so', 'do', 'ok')
_WORDS_WITH_X = ('axe', 'box', 'fix', 'fox', 'max', 'mix', 'six', 'tax', 'wax', 'zip', 'zoo')
_ROMAN = re.compile('M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})')


def is_roman(text: str) -> bool:
  """Return True for an uppercase Roman numeral."""
  return bool(text and _ROMAN.fullmatch(text))


def is_word(text: str) -> bool:
  """Return True if a run of letters is a word, numeral or sequence, not a product of variables.

  Capitals and names such as Amy are words. Three or more lowercase letters are a word unless they
  are consecutive in the alphabet (abc), contain no vowel (mgh), or contain x or z (abx). A few
  known words may contain x or z. aba is a word too, because in a product, the two a's would be
  adjacent. Two lowercase letters are a product, except for a few words.
  """
  if text.isupper():
    return True
  if len(text) < 3:
    return text in _SMALL_WORDS
  has_vowel = not set('aeiouy').isdisjoint(text.lower())
  if not text.islower():
    return text[0].isupper() and (has_vowel or not text[1:].islower())
  if text[0] == text[2] != text[1] or is_roman(text.upper()):
    return True
  is_run = ''.join(sorted(text)) in string.ascii_lowercase
  return has_vowel and not is_run and (set('xz').isdisjoint(text) or text in _WORDS_WITH_X)


def joined_units(trees: Sequence[Tree], is_list: bool) -> Tree | None:
  """Add quantities such as 1 hour and 30 minutes; return None if that is impossible.

  `is_list` means that a comma or 'and' separates the quantities.
  """
  if any(tree[0] != 'unit' for tree in trees):
    return None
  _, total, unit = trees[0]
  previous_unit = unit
  for _, value, smaller in trees[1:]:
    ratio = joined(unit, smaller, is_list)
    if not ratio or not joined(previous_unit, smaller, is_list):
      return None
    total = ('add', (total, ('multiply', (value, ('number', ratio)))))
    previous_unit = smaller
  return 'unit', total, unit


class Grammar(Cursor, abc.ABC):
  """A parser for lists of relations whose sides consist of sums, products and powers."""

  @abc.abstractmethod
  def _atom(self) -> Tree:
    """Read an operand."""

  @abc.abstractmethod
  def _symbol_or_call(self, symbol: Tree, letter: str) -> Tree:
    """Return the symbol, or a call if the bracket after the symbol contains arguments."""

  # Lists and relations.

  def answer(self) -> Tree:
    """Read a whole answer: items separated by commas, or groups separated by semicolons."""
    groups: list[list[Tree]] = [[]]
    while not self.at_end():
      groups[-1].append(self._relation())
      if self._accept(';'):
        groups.append([])
      elif self._accept(','):
        while self._accept(','):  # 'a, and b' has two commas
          pass
      else:
        break
    groups = [group for group in groups if group]
    if not groups:
      raise UnreadableError('there are no tokens')
    if len(groups) > 1 and max(map(len, groups)) > 1:
      return 'list', tuple(('group', '(', ')', tuple(g)) if g[1:] else g[0] for g in groups)
    items = tuple(item for group in groups for item in group)
    return items[0] if len(items) == 1 else ('list', items)

  def _relation(self) -> Tree:
    sides = [None if self._next_relation() else self._dashed() or self._side()]
    operators = []
    while operator := self._next_relation():
      self._advance()
      if operator == '=' and self._next_is('<', '>'):  # '=<'
        operator = self._advance().text + '='
      operators.append(operator)
      sides.append(self._side())
    if operators:
      return 'relation', tuple(operators), tuple(sides)
    (tree,) = sides
    assert tree is not None  # without a relation ahead, a side was parsed
    return tree

  def _side(self) -> Tree:
    """Read a ratio or sum; if it consists only of letters, like 'XIV', also keep the text."""
    start, end = self._at, self._end_of_item('word')
    letters = [token.text for token in self._tokens[start:end]]
    tree = self._ratio()
    if self._at != end or len(letters) < 2 or any(len(letter) > 1 for letter in letters):
      return tree
    if ''.join(letters).islower() and any(token.spaced for token in self._tokens[start + 1 : end]):
      return tree
    return ('letters', ''.join(letters), tree) if is_word(''.join(letters)) else tree

  def _dashed(self) -> Tree | None:
    """Read numbers or capitals joined by '-', or a date written with '/'; return None otherwise."""
    start, end = self._at, self._end_of_item('number', 'word', '-', '/')
    texts = [token.text for token in self._tokens[start:end]]
    items, marks = texts[::2], set(texts[1::2])
    if len(texts) < 3 or len(texts) % 2 == 0 or marks not in ({'-'}, {'/'}):
      return None
    if not all(item[0].isdecimal() for item in items):
      is_sequence = len(items) > 2 and all(len(item) == 1 and item.isupper() for item in items)
      return ('dashed', tuple(items), self._ratio()) if is_sequence and marks == {'-'} else None
    is_date = len(items) == 3 and sorted(map(len, items))[1:] in ([2, 4], [1, 4])
    if marks == {'/'} and len(items) != 3:
      return None
    has_year = len(items[0]) == 4 and '.' not in items[0]
    is_padded = any(item[0] == '0' and item.isdecimal() and len(item) > 1 for item in items)
    numbers = tuple(map(Fraction, items))
    if is_date or has_year or is_padded:  # not a difference
      self._at = end
      return 'dashed', numbers, None
    return 'dashed', numbers, self._ratio()

  def _end_of_item(self, *kinds: str) -> int:
    """Return the position after tokens of these kinds if the item ends there; otherwise `_at`."""
    tokens, end = self._tokens, self._at
    while end < len(tokens) and (tokens[end].kind in kinds or tokens[end].text in kinds):
      end += 1
    return end if self._ends_item(end) else self._at

  def _ends_item(self, at: int) -> bool:
    kind, text, *_ = self._tokens[at] if at < len(self._tokens) else _END
    is_end = text in _ITEM_ENDS or text in _RELATIONS
    return kind == 'end' or (kind in ('mark', 'command') and is_end)

  def _next_relation(self) -> str | None:
    token = self.peek()
    return _RELATIONS.get(token.text) if token.kind in ('mark', 'command') else None

  def _ratio(self) -> Tree:
    terms = [self._union()]
    while self._accept(':'):
      terms.append(self._union())
    return terms[0] if len(terms) == 1 else ('ratio', tuple(terms))

  def _union(self) -> Tree:
    r"""Parse a sum or a combination of sets, or two of these joined by '\choose'."""
    tree = self._sets()
    if self._accept('choose'):
      tree = 'function', 'binom', (tree, self._sets())
    return tree

  def _sets(self) -> Tree:
    """Read a sum, an intersection of sets, or a union, possibly minus other sets."""
    members, operator = [self._sum()], 'cap' if self._next_is('cap') else 'cup'
    while self._accept(operator):
      members.append(self._sum())
    head = 'intersection' if operator == 'cap' else 'union'
    tree = members[0] if len(members) == 1 else (head, tuple(members))
    while operator == 'cup' and self._accept('setminus'):
      tree = ('minus', tree, self._sum())
    if self._next_is('cup', 'cap', 'setminus'):
      raise UnreadableError('a mix of unions, intersections and differences needs brackets')
    return tree

  # Sums and products.

  def _sum(self) -> Tree:
    self._enter()
    terms: list[Tree] = [] if self._next_is('pm', 'mp') else [self._signed(self._factors)]
    while sign := self._accept('+', '-', 'pm', 'mp'):
      term = self._signed(self._factors)
      if sign in '+-':
        terms.append(('negate', term) if sign == '-' else term)
      else:
        left = make_sum(terms) if terms else None
        terms = [('plusminus', 1 if sign == 'pm' else -1, left, term)]
    self._depth -= 1
    return make_sum(terms)

  def _signed(self, operand: Callable[[], Tree]) -> Tree:
    """Read any leading '+' and '-' signs and the operand after them."""
    negative = False
    while sign := self._accept('+', '-'):
      negative ^= sign == '-'
    tree = operand()
    return ('negate', tree) if negative else tree

  def _factors(self) -> Tree:
    starts_with_integer = self._integer_is_next()
    factors = [self._power()]
    while True:
      if operator := self._accept('*', 'times', 'compose', '/'):
        factors = self._apply_operator(operator, factors)
      elif starts_with_integer and (mixed_number := self._mixed_number(factors[0])):
        factors = [self._postfixed(mixed_number)]
      elif new_factors := self._multiplier_or_unit(factors):
        factors = new_factors
      elif self._starts_factor():
        if self.peek().kind == 'number' and factors[-1][0] in ('number', 'unit'):
          factors = [self._with_smaller_unit(factors)]
        else:
          factors.append(self._power())
      else:
        return make_product(factors)
      starts_with_integer = False  # only the integer may precede the fraction

  def _apply_operator(self, operator: str, factors: Sequence[Tree]) -> list[Tree]:
    """Read the right operand of `operator` and combine it with the factors."""
    *others, last = factors
    if operator == 'compose':
      return [*others, ('compose', (last, self._power()))]
    kind, text, *_ = self.peek()
    is_unit = kind in ('text', 'word') and text.lower() in UNITS
    if operator == '/' and is_unit and not symbols(tuple(factors)):
      return [('unit', make_product(factors), f'/{self._unit()}')]  # '20/\text{hour}'
    if operator == '/':
      return [('divide', make_product(factors), self._differential() or self._signed(self._power))]
    factor = self._signed(self._power)
    if is_vector(last) and (is_vector(factor) or last == ('symbol', 'nabla')):
      return [*others, ('dot' if operator == '*' else 'cross', last, factor)]
    return [*factors, factor]

  def _differential(self) -> Tree | None:
    """Read the 'dx' in 'dy/dx'; return None for anything else."""
    tokens = self._tokens[self._at : self._at + 2]
    if len(tokens) < 2 or tokens[0].text not in ('d', 'partial') or tokens[1].kind != 'word':
      return None
    return make_product([self._power(), self._power()])

  def _mixed_number(self, integer: Tree) -> Tree | None:
    r"""Read the fraction in '1 1/2' or '1\frac{1}{2}' and add it to the integer, or return None."""
    kinds = ''.join(
      token.text if token.kind in ('mark', 'command') else token.kind[0]
      for token in self._tokens[self._at : self._at + 7]
    )
    spelling = next((s for s in _FRACTION_PARTS if kinds.startswith(s)), None)
    if integer[0] != 'number' or not spelling:
      return None
    if spelling == 'n/n' and not self.peek().spaced:
      return None
    count = len(_FRACTION_PARTS[spelling])
    top, *_, bottom = [
      token.text for token in self._tokens[self._at : self._at + count] if token.kind == 'number'
    ]
    if not (top.isdecimal() and bottom.isdecimal() and 0 < int(top) < int(bottom)):
      return None
    self._at += count
    return 'number', integer[1] + Fraction(int(top), int(bottom))

  def _starts_factor(self) -> bool:
    token = self.peek()
    if token.kind in ('number', 'word', 'tree'):
      return True
    if token.kind == 'mark':
      return token.text in '([{' or (token.text == '|' and not self._bars)
    return token.kind == 'command' and token.text in _OPERAND_COMMANDS

  # Units.

  def _multiplier_or_unit(self, factors: Sequence[Tree]) -> list[Tree] | None:
    """Read a multiplier or unit and add it to the factors; return None if there is neither."""
    kind, text, *_ = self.peek()
    may_be_unit = kind in ('text', 'word') and factors[-1][0] != 'unit'
    may_be_unit = may_be_unit and not symbols(tuple(factors))  # letters after letters are factors
    if may_be_unit and text.lower() in MULTIPLIERS:
      return [*factors, ('number', MULTIPLIERS[self._advance().text.lower()])]
    if unit := self._letter_unit(factors):
      return [('unit', make_product(factors), unit)]
    is_volume = text == 'hr' and factors[-1] == ('symbol', 'pi')  # of a cylinder
    if kind == 'text':
      is_unit = re.match(r'/?[A-Za-z]', text) is not None
    else:
      is_unit = len(text) > 1 and (text.lower() in UNITS or text.islower())
    if may_be_unit and is_unit and not is_volume:
      return [('unit', make_product(factors), self._unit())]
    return None

  def _with_smaller_unit(self, factors: Sequence[Tree]) -> Tree:
    """Parse the '30 minutes' in '1 hour 30 minutes' and add it to the hour."""
    smaller = [self._power()]
    while smaller[0][0] != 'unit' and (new_factors := self._multiplier_or_unit(smaller)):
      smaller = new_factors
    total = joined_units((*factors, *smaller), is_list=False)
    if total is None:
      raise UnreadableError('a number cannot follow another number')
    return total

  def _letter_unit(self, factors: Sequence[Tree]) -> str | None:
    """Read a unit that could be a variable, as in '5 m/s' and '20°C'; return None otherwise."""
    token, start = self.peek(), self._at
    if len(factors) == 1 and factors[0][0] == 'number' and token.text == 'Omega' and token.spaced:
      return 'ohm' if self._ends_item(self._at + 1) and self._advance() else None
    if token.kind not in ('word', 'text'):
      return None
    is_temperature = len(factors) == 1 and factors[0][0] == 'degrees' and token.text in ('C', 'F')
    if is_temperature and self._ends_item(self._at + 1):
      return f'degree {self._advance().text}'
    are_numbers = all((f[1] if f[0] == 'power' else f)[0] == 'number' for f in factors)
    if not are_numbers or not token.spaced:
      return None
    rest = itertools.takewhile(
      lambda after: after.kind == 'word' and not after.spaced, self._tokens[start + 1 :]
    )
    if ''.join((token.text, *(after.text for after in rest))) not in LETTERS:  # such as 'kPa'
      return None
    try:
      unit = self._unit()
    except UnreadableError:
      unit = ''
    # '2 m g h' and '3 m / k' are products.
    if '^-' not in unit and any(token.spaced for token in self._tokens[start + 1 : self._at]):
      unit = ''
    ends = self.at_end() or self._next_is(',', ';') or self.peek().kind == 'number'
    if unit and measure(normalize_unit(unit)) and ends:
      return unit
    self._at = start
    return None

  def _unit(self) -> str:
    unit = self._advance().text
    while self._unit_goes_on(unit):
      token = self._advance()
      part = '^' + self._unit_exponent() if token.text == '^' else token.text
      unit += ' ' * token.spaced + part
    words = re.findall('[a-z]+', unit.lower())
    first, second = [*words, ''][:2]
    can_start = first not in _NON_UNITS or (first in _BEFORE_UNITS and second)
    is_number = (first == 'point' or first in NUMBER_WORDS) and second in OPERATION_WORDS
    if not can_start or is_number or not _NOT_IN_UNITS.isdisjoint(words):
      raise UnreadableError(f'{unit!r} is not a unit')
    return unit

  def _unit_goes_on(self, unit: str) -> bool:
    if self._next_is('*'):
      return any(t.kind == 'text' or t.text in LETTERS for t in self._tokens[self._at + 1 :][:1])
    brackets = ['('] * unit.endswith('/') + [')'] * (unit.count('(') > unit.count(')'))
    return self.peek().kind in ('text', 'word') or self._next_is('/', '^', *brackets)

  def _unit_exponent(self) -> str:
    has_braces = self._next_is_mark('{')
    if has_braces:
      self._advance()
    exponent = self._accept('-') + self._advance().text
    if has_braces:
      self._expect('mark', '}')
    return exponent

  # Powers and marks after an operand.

  def _power(self) -> Tree:
    tree = self._postfixed(self._atom())
    if not self._accept('^'):
      return tree
    self._enter()
    if self._accept('prime'):
      tree = self._primed(tree)
      self._depth -= 1
      return self._symbol_or_call(tree, tree[1][0])
    exponent = self._argument(split=False)
    self._depth -= 1
    if exponent == ('symbol', 'prime'):
      return self._primed(tree)
    if exponent == MINUS_ONE and tree[0] == 'symbol' and tree[1] in FUNCTION_LETTERS:
      inverse = self._symbol_or_call(('symbol', f'{tree[1]}^-1'), tree[1])
      return inverse if inverse[0] == 'call' else ('power', tree, exponent)
    return self._postfixed(('power', tree, exponent))

  def _primed(self, tree: Tree) -> Tree:
    if tree[0] != 'symbol':
      raise UnreadableError('only a symbol can have a prime')
    return 'symbol', tree[1] + "'"

  def _postfixed(self, tree: Tree) -> Tree:
    while True:
      if self._accept('!'):
        tree = ('factorial', tree)
      elif self._accept('%'):
        tree = ('percent', tree)
      elif self._accept('circ'):
        tree = ('degrees', tree)
      elif self._accept("'"):
        tree = self._primed(tree)
        tree = tree if self._next_is("'") else self._symbol_or_call(tree, tree[1][0])
      else:
        return tree

  def _argument(self, split: bool = True) -> Tree:
    r"""Read a LaTeX argument: a group in braces or a single operand.

    With `split`, read only the first digit of an integer, as in '\frac12', but not in '2^12'.
    """
    if self._next_is_mark('{'):
      self._advance()
      tree = self._union()
      self._expect('mark', '}')
      return tree
    if split and self._integer_is_next() and len(self.peek().text) > 1:
      return 'number', Fraction(int(self._split_digit()))
    if split and self.peek().kind == 'word' and len(self.peek().text) == 1:
      return 'symbol', self._advance().text  # '\frac x2' is x/2
    if self._next_is('-', '+'):
      return self._signed(lambda: self._argument(split=False))
    return self._atom() if split else self._power()
