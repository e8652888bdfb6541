r"""An answer's text, in its normal spelling, to tokens.

Synonyms become one token ('\leq', '\le' and '<='), and wrappers are removed ('\text{17}' is 17).
"""

import re
from typing import NamedTuple

from exgrpo_jax.grading.answers.spelling import paired
from exgrpo_jax.grading.answers.tree import Tree
from exgrpo_jax.grading.answers.units import MULTIPLIERS, UNITS

_MAX_TOKENS = 1200

_FUNCTIONS = 'sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt abs'
_FUNCTIONS += ' gcd lcm'
_SYMBOLS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho
sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi
Omega hbar ell odot infty emptyset mho nabla partial prime max min
mathbb_R mathbb_Z mathbb_N mathbb_Q mathbb_C"""
_ACCENTS = 'dot ddot hat bar vec tilde overline overrightarrow widehat widetilde mathbf'

# Names of commands.
FUNCTIONS, SYMBOLS, ACCENTS, BIG_OPERATORS = (
  frozenset(names.split()) for names in (_FUNCTIONS, _SYMBOLS, _ACCENTS, 'sum prod int lim')
)


class Token(NamedTuple):
  """One lexical unit of an answer."""

  kind: str  # 'number', 'command', 'word', 'text', 'mark', 'tree' (already parsed) or 'end'
  text: str  # a command without its backslash
  spaced: bool  # whether white space precedes it
  tree: Tree = ()  # of kind 'tree' only


_TOKEN = re.compile(
  r'(?P<number>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,4}(?![0-9A-Za-z^]))?)'
  r'|\\(?P<wrapper>text|mathrm|mathbf|mathit|mathsf|operatorname)'
  r'\s*\{(?P<inner>(?:[^{}]|\{[^{}]*\})*+)\}'
  r'|\\(?P<command>[A-Za-z]+(?:_[RZNQC](?![A-Za-z]))?|[{}|%\\])'
  r'|(?P<word>[A-Za-z]+)'
  r'|(?P<mark>\*\*|<=|>=|!=|==|[-+*/^_=<>()\[\]{}|,;:!%&\'])'
)
_UNIT_POWER = r'[A-Za-z]+(?:\^\{?-?[0-9]\}?)?'
_UNIT = re.compile(rf'{_UNIT_POWER}(?:\s?[/.* ]\s?{_UNIT_POWER})*+')
_COMMANDS = paired("""
leq le leqslant le geq ge geqslant ge neq ne lt < gt > cdot * ast * div /
lvert | rvert | vert | mid | colon : land , lor , langle ( rangle ) lbrace { rbrace }
lbrack [ rbrack ] simeq approx sim approx backslash setminus smallsetminus setminus
lg log varnothing emptyset""")
_KEYWORDS = paired("""
and , or , pi pi infinity infty inf infty oo infty asin arcsin acos arccos atan arctan""")
_COMPARISONS = {'<=': 'le', '>=': 'ge', '!=': 'ne'}
_MARKS = {'==': '=', '**': '^'}
# Results of _COMMANDS that are marks.
_COMMAND_MARKS = frozenset('*/|:,()[]<>%')


def tokenize(text: str) -> list[Token] | None:
  """Tokens of a text in normal spelling; None for an unknown character, or too many tokens."""
  tokens: list[Token] = []
  at, end = 0, len(text)
  while at < end:
    start = at
    while at < end and (text[at].isspace() or text[at] == '$'):
      at += 1
    if at == end:
      break
    match = _TOKEN.match(text, at)
    if not match or len(tokens) >= _MAX_TOKENS:
      return None
    tokens += _make_tokens(match, spaced=at > start)
    at = match.end()
  return tokens


def _make_tokens(match: re.Match[str], spaced: bool) -> list[Token]:
  groups = match.groupdict('')
  if groups['number']:
    return [Token('number', groups['number'], spaced)]
  if groups['wrapper']:
    return _unwrap(groups['wrapper'], groups['inner'], spaced)
  if command := groups['command']:
    name = _COMMANDS.get(command, command)
    is_mark = name in _COMMAND_MARKS and command not in ('{', '}')
    return [Token('mark' if is_mark else 'command', name, spaced)]
  if groups['word']:
    return _split_letters(groups['word'], spaced)
  mark = groups['mark']
  if mark in _COMPARISONS:
    return [Token('command', _COMPARISONS[mark], spaced)]
  return [Token('mark', _MARKS.get(mark, mark), spaced)]


def _unwrap(wrapper: str, inner: str, spaced: bool) -> list[Token]:
  r"""Tokens of '\wrapper{inner}': what it says where it is mathematics, else one of text."""
  content = ' '.join(inner.split())
  if content.strip(',. ').lower() in ('and', 'or', 'and/or'):
    return [Token('mark', ',', spaced)]
  if wrapper == 'mathbf' and len(content) == 1 and content.isascii() and content.isalpha():
    return [Token('command', wrapper, spaced), Token('word', content, spaced=False)]
  is_letter = content in ('e', 'i', 'd') and wrapper != 'text'
  if content in FUNCTIONS or content in _KEYWORDS or is_letter:
    return _split_letters(content, spaced)
  first, _, rest = content.partition(' ')
  if first.lower() in MULTIPLIERS and rest:  # 'million dollars'
    return [Token('text', first, spaced=True), *_unwrap(wrapper, rest, spaced=True)]
  if _UNIT.fullmatch(content):
    return [Token('text', content, spaced=True)]
  if not any(c.isalpha() for c in content) or re.search('[0-9()]', content):
    tokens = tokenize(inner)  # '\text{17}', '\text{(B)}'
    if tokens is not None:
      return tokens
  return [Token('text', content, spaced=True)]


def _split_letters(word: str, spaced: bool) -> list[Token]:
  """Tokens of letters in a row: one name, or one-letter variables to be multiplied."""
  if word in _KEYWORDS:
    keyword = _KEYWORDS[word]
    return [Token('mark' if keyword == ',' else 'command', keyword, spaced)]
  if word in FUNCTIONS:
    return [Token('command', word, spaced)]
  for name in FUNCTIONS:
    if word.startswith(name) and len(word) == len(name) + 1:  # 'sinx'
      return [Token('command', name, spaced), Token('word', word[-1], spaced=False)]
  if word.lower() in UNITS or len(word) > 3:
    return [Token('word', word, spaced)]
  return [Token('word', letter, spaced and index == 0) for index, letter in enumerate(word)]
