r"""LaTeX or plain mathematics to tokens, with one spelling for what has several.

'\dfrac', '\tfrac' and '\frac' are one command, '×' is '\times', thousands lose
their separators, '\text{17}' is 17. Nothing is evaluated.
"""

import re
from typing import NamedTuple

from exgrpo_jax.grading.answers.units import UNITS

MAX_TOKENS = 1200

_FUNCTIONS = 'sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt abs'
_GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho
sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi
Omega hbar ell odot infty emptyset mho nabla partial prime max min
mathbb_R mathbb_Z mathbb_N mathbb_Q mathbb_C"""
_ACCENTS = 'dot ddot hat bar vec tilde overline overrightarrow widehat widetilde'
FUNCTIONS, GREEK, ACCENTS, BIG = (
  frozenset(names.split()) for names in (_FUNCTIONS, _GREEK, _ACCENTS, 'sum prod int lim')
)


class Token(NamedTuple):
  kind: str  # 'number', 'command', 'word', 'text', 'mark'
  text: str  # a command without its backslash
  spaced: bool  # whether white space stands before it


_UNICODE = str.maketrans(
  {
    '−': '-',
    '–': '-',
    '—': '-',
    '‐': '-',
    '×': r'\times ',
    '·': r'\cdot ',
    '⋅': r'\cdot ',
    '÷': '/',
    '∕': '/',
    '⁄': '/',
    '≤': r'\le ',
    '≥': r'\ge ',
    '⩽': r'\le ',
    '⩾': r'\ge ',
    '≠': r'\ne ',
    '≈': r'\approx ',
    '∞': r'\infty ',
    'π': r'\pi ',
    '√': r'\sqrt ',
    '°': r'^\circ ',
    'º': r'^\circ ',
    '±': r'\pm ',
    '∓': r'\mp ',
    '∪': r'\cup ',
    '∩': r'\cap ',
    '∈': r'\in ',
    '∅': r'\emptyset ',
    'ℝ': r'\mathbb{R}',
    '％': '%',
    '⁰': '^0',
    '¹': '^1',
    '²': '^2',
    '³': '^3',
    '⁴': '^4',
    '⁵': '^5',
    '⁶': '^6',
    '⁷': '^7',
    '⁸': '^8',
    '⁹': '^9',
    '½': r' \frac{1}{2}',
    '¼': r' \frac{1}{4}',
    '¾': r' \frac{3}{4}',
    '⅓': r' \frac{1}{3}',
    '⅔': r' \frac{2}{3}',
    'α': r'\alpha ',
    'β': r'\beta ',
    'γ': r'\gamma ',
    'θ': r'\theta ',
    'λ': r'\lambda ',
    'μ': r'\mu ',
    'ω': r'\omega ',
    'φ': r'\phi ',
    'σ': r'\sigma ',
    'τ': r'\tau ',
    'ρ': r'\rho ',
    '，': ',',
    '；': ';',
    '：': ':',
    '（': '(',
    '）': ')',
    '＝': '=',
    '＋': '+',
    '．': '.',
    '\u00a0': ' ',
    '\u202f': ' ',
    '\u2009': ' ',
    '\u200b': '',
    '\u200c': '',
    '\u200d': '',
    '\ufeff': '',
    '\u2061': '',
    '\u2062': '',
    '€': r'\text{euros}',
    '£': r'\text{pounds}',
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
  }
)

_DOUBLED = (
  r'(?<!\\)\\\\(?=(?:[dtc]?frac|left|right|sqrt|pi|leq?|geq?|neq?|cdot|times|infty|text'
  r'|cup|circ|begin|end|theta|in|pm|quad)(?![A-Za-z]))'
)
_SPELLINGS = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (_DOUBLED, r'\\'),  # a backslash escaped once too often, but for a matrix's row ends
    (r'\$\s*([,;])\s*\$', r'\1 '),
    (
      r'\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|limits)(?![a-zA-Z])'
      r'\s?\.?',
      '',
    ),
    (r'(?<!\\),\s*\\!\s*', '@'),  # 32,\!349
    (r'\{\s?,\s?\}\s*', '@'),  # 14{,}916
    (r'(?<=[0-9])\s+@', '@'),
    (r'(?<!\\)\\!', ''),
    (r'(?<!\\)\\[,;: >]|~|(?<!\\)\\(?:quad|qquad|thinspace)(?![a-zA-Z])', ' '),
    (r'(?<![A-Za-z\\])([A-Za-z])\{ ?(\([^(){}]*\)) ?\}', r'\1\2'),  # sympy's 'f{(x)}'
    (r'(?<!\\)\\[()\[\]$]', ' '),  # math delimiters and money
    (r'\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])', r'\\frac'),
    (r'\\frac\s?([0-9])\s?([0-9])', r'\\frac{\1}{\2}'),
    (r'\\(?:textbf|textit|textrm|textnormal|textsf|mbox|hbox)(?![a-zA-Z])', r'\\text'),
    (r'\\mathbb\s?\{?([RZNQC])\}?', r'\\mathbb_\1 '),
    (r'(?i)\\text\s?\{\s?(?:\\?%|percent|pct)\s?\}|\\?%|\bper\s?cent(?:age)?\b|\bpct\b', ' % '),
    (r'(?<=[0-9]) ?x ?(?=10 ?\^)', r'\\times '),
    (r'\\(?:degree|circ)(?![a-zA-Z])', r'\\circ '),
    (r'\^\s?\{?\s?\\circ\s?\}?', r'\\circ '),
    (r'\bnp\.|\bmath\.|\\underline(?![a-z])', ''),
    (r'(?:\\text\{)?\s+for (?:all|every|any|each)\b[^,;]*$', ''),
  )
)
_THOUSANDS = re.compile(
  r'(?<![0-9.,@])[1-9][0-9]{0,2}(?:(?:,[0-9]{3}){1,5}+|(?:@[0-9]{3})++)'
  r'(?![0-9]|[,@][0-9])'
)
_SPACED_THOUSANDS = re.compile(r'(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})++(?![0-9]| [0-9]| ?/)')

_TOKEN = re.compile(
  r'(?P<number>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,4}(?![0-9A-Za-z^]))?)'
  r'|\\(?P<wrapper>text|mathrm|mathbf|mathit|mathsf|operatorname)\s*\{(?P<inner>(?:[^{}]|\{[^{}]*\})*+)\}'
  r'|\\(?P<command>[A-Za-z]+(?:_[RZNQC](?![A-Za-z]))?|[{}|%\\])'
  r'|(?P<word>[A-Za-z]+)'
  r'|(?P<mark>\*\*|<=|>=|!=|==|[-+*/^_=<>()\[\]{}|,;:!%&\'])'
)
_UNIT_POWER = r'[A-Za-z]+(?:\^\{?-?[0-9]\}?)?'
_UNIT = re.compile(rf'{_UNIT_POWER}(?:\s?[/.* ]\s?{_UNIT_POWER})*+')
_COMMANDS = {
  'leq': 'le',
  'leqslant': 'le',
  'geq': 'ge',
  'geqslant': 'ge',
  'neq': 'ne',
  'lt': '<',
  'gt': '>',
  'cdot': '*',
  'times': '*',
  'ast': '*',
  'div': '/',
  'lvert': '|',
  'rvert': '|',
  'vert': '|',
  'mid': '|',
  'colon': ':',
  'land': ',',
  'lor': ',',
  'langle': '(',
  'rangle': ')',
  'lbrace': '{',
  'rbrace': '}',
  'simeq': 'approx',
  'sim': 'approx',
  'lbrack': '[',
  'rbrack': ']',
  'backslash': 'setminus',
  'lg': 'log',
  'varnothing': 'emptyset',
}
_MARKS = {'<=': 'le', '>=': 'ge', '!=': 'ne', '==': '=', '**': '^'}
_WORDS = {
  'and': ',',
  'or': ',',
  'pi': 'pi',
  'infinity': 'infty',
  'inf': 'infty',
  'oo': 'infty',
  'asin': 'arcsin',
  'acos': 'arccos',
  'atan': 'arctan',
}
_MARKED = frozenset('*/|:,()[]<>%')


def spelled(text: str) -> str:
  """The text with one spelling for what LaTeX and Unicode can spell in several ways."""
  text = ' '.join(text.translate(_UNICODE).split())
  for pattern, new in _SPELLINGS:
    text = pattern.sub(new, text)
  text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(' ', ''), text)
  text = _without_thousands(text)
  return text.strip().removesuffix('.').strip()


def _without_thousands(text: str) -> str:
  """Without thousands separators: inside brackets a comma parts two numbers.

  '7,425,000' is one number; '(3,331)' is a pair, and so is '3, 331'. '(1,050, 2)'
  is 1050 and 2, for no number starts with a zero.
  """
  parts, end, depth = [], 0, 0
  for match in _THOUSANDS.finditer(text):
    between = text[end : match.start()]
    depth += sum(between.count(c) for c in '([') - sum(between.count(c) for c in ')]')
    depth += between.count(r'\{') - between.count(r'\}')
    plain = depth <= 0 or '@' in match[0] or ',0' in match[0]
    parts += [between, match[0].replace('@', ',')]
    if plain:
      parts[-1] = parts[-1].replace(',', '')
    end = match.end()
  return (''.join(parts) + text[end:]).replace('@', ', ')


def tokens(text: str) -> list[Token] | None:
  """Tokens of a spelled text, or None where a sign is unknown or there are too many."""
  found, at, end = [], 0, len(text)
  while at < end:
    start = at
    while at < end and (text[at].isspace() or text[at] == '$'):
      at += 1
    if at == end:
      break
    match = _TOKEN.match(text, at)
    if not match or len(found) >= MAX_TOKENS:
      return None
    found += _tokens_of(match, at > start)
    at = match.end()
  return found


def _tokens_of(match: re.Match, spaced: bool) -> list[Token]:
  if match['number']:
    return [Token('number', match['number'], spaced)]
  if match['wrapper']:
    return _unwrapped(match['wrapper'], match['inner'], spaced)
  if match['command']:
    name = _COMMANDS.get(match['command'], match['command'])
    mark = name in _MARKED and match['command'] not in ('{', '}')
    return [Token('mark' if mark else 'command', name, spaced)]
  if match['word']:
    return _words(match['word'], spaced)
  mark = match['mark']
  if mark in ('<=', '>=', '!='):
    return [Token('command', _MARKS[mark], spaced)]
  return [Token('mark', _MARKS.get(mark, mark), spaced)]


def _unwrapped(wrapper: str, inner: str, spaced: bool) -> list[Token]:
  content = ' '.join(inner.split())
  if content.strip(',. ').lower() in ('and', 'or', 'and/or'):
    return [Token('mark', ',', spaced)]
  letter = content in ('e', 'i', 'd') or (
    wrapper == 'mathbf' and len(content) == 1 and content.isascii() and content.isalpha()
  )
  if content in FUNCTIONS or content in _WORDS or (letter and wrapper != 'text'):
    return _words(content, spaced)
  if _UNIT.fullmatch(content):
    return [Token('text', content, True)]
  if not any(c.isalpha() for c in content) or re.search('[0-9()]', content):
    found = tokens(inner)  # '\text{17}', '\text{(B)}'
    if found is not None:
      return found
  return [Token('text', content, True)]


def _words(word: str, spaced: bool) -> list[Token]:
  """A run of letters: a name, or letters that are multiplied."""
  lower = word.lower()
  if word in _WORDS:
    known = _WORDS[word]
    return [Token('mark' if known == ',' else 'command', known, spaced)]
  if word in FUNCTIONS:
    return [Token('command', word, spaced)]
  for name in FUNCTIONS:
    if word.startswith(name) and len(word) == len(name) + 1:  # 'sinx'
      return [Token('command', name, spaced), Token('word', word[-1], False)]
  if lower in UNITS or len(word) > 3:
    return [Token('word', word, spaced)]
  return [Token('word', letter, spaced and index == 0) for index, letter in enumerate(word)]
