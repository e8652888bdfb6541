r"""Spelling normalization and tokenization of an answer's text.

Synonyms become one token ('\leq', '\le' and '<='), and wrappers are removed ('\text{17}' is 17).
"""

import functools
import re
import unicodedata
from typing import NamedTuple

from exgrpo_jax.grading.answers.tree import Tree
from exgrpo_jax.grading.answers.units import MULTIPLIERS, UNITS

# ---- Spelling ----

# '\dfrac' and '\tfrac' become '\frac', '×' becomes '\times', and thousands lose their separators.
# Nothing is evaluated.


def paired(text: str) -> dict[str, str]:
  """Parse a text in which spellings alternate with their replacements; return them as a dict."""
  words = text.split()
  return dict(zip(words[::2], words[1::2], strict=True))


_SIGNS = paired(r"""
− - – - — - ‐ - ÷ / ∕ / ⁄ / ％ % ， , ； ; ： : （ ( ） ) ＝ = ＋ + ． .
× \times · \cdot ⋅ \cdot ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ≈ \approx ∞ \infty π \pi √ \sqrt ∛ \sqrt[3]
° ^\circ º ^\circ ± \pm ∓ \mp ∪ \cup ∩ \cap ∈ \in ∖ \setminus ∅ \emptyset ℝ \mathbb{R}
α \alpha β \beta γ \gamma θ \theta λ \lambda μ \mu ω \omega φ \phi σ \sigma τ \tau ρ \rho
Ω \Omega ∘ \circ ∂ \partial ∇ \nabla Δ \Delta δ \delta ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
‑ - ℃ ^\circ\text{C} € \text{euros} £ \text{pounds} ¥ \text{yuan} ₹ \text{rupees} ¢ \text{cents}""")
_SPACES = '\u00a0\u202f\u2009'
_INVISIBLE = '\u200b\u200c\u200d\ufeff\u2061\u2062'
_UNICODE = str.maketrans(
  {
    # A space separates a command from the next text.
    **{character: text + ' ' * text[-1].isalpha() for character, text in _SIGNS.items()},
    **dict.fromkeys(_SPACES, ' '),
    **dict.fromkeys(_INVISIBLE, ''),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
  }
)

# Superscripts, subscripts and fractions in one character.
_SMALL_CHARACTERS = re.compile('(?P<raised>[¹²³⁰-ⁿ]+)|(?P<lowered>[₀-ₜ]+)|[¼-¾⅐-⅞]')

_DOUBLED_BACKSLASH = (
  r'(?<!\\)\\\\(?=(?:[dtc]?frac|left|right|sqrt|pi|leq?|geq?|neq?|cdot|times|infty|text'
  r'|cup|circ|begin|end|theta|in|pm|quad)(?![A-Za-z]))'
)
# Commands that only affect the layout.
_STYLES = (
  r'(?:displaystyle|limits|small|large|Large|LARGE|[hH]uge|bf|it|ensuremath|fbox)(?![a-zA-Z])'
)
_COLOR = r'(?:text)?color ?(?:\[\w+\])?\{[^{}]*\}'
_DISPLAY = r'(?:begin|end) ?\{(?:(?:align|gather)(?:ed)?|equation|split)\*?\} ?&?'
_TH = r'(?:st|nd|rd|th|\\(?:text|mathrm|textsuperscript) ?\{ ?(?:st|nd|rd|th) ?\})'
_TEXT_UNIT = r'\\(?:text|mathrm) ?\{([^{}]*)\}(\^\{?-?[0-9]\}?)?'
_PAIR = r'(\w{1,9})(?: and|,) (\w{1,9})\b'
_REPLACEMENTS = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    # A doubled backslash, as in JSON, but not the end of a matrix row.
    (_DOUBLED_BACKSLASH, r'\\'),
    (r'\\(?:left|right|[bB]igg?|[bB]ig[lr])(?![a-zA-Z])\s?\.?', ''),
    (rf'\\(?:{_STYLES}|{_COLOR}|{_DISPLAY}|\\(?= ?& ?=)) ?', ''),
    (r'& ?=', '='),  # of an aligned equation
    # '@' marks an unambiguous thousands separator until `_remove_thousands` runs.
    (r'(?<!\\),\s*\\!\s*', '@'),  # 32,\!349
    (r'\{\s?,\s?\}\s*', '@'),  # 14{,}916
    (r'(?<=[0-9])\s+@', '@'),
    (r'(?<!\\)\\!', ''),
    (r'(?<!\\)\\[,;: >]|~|(?<!\\)\\(?:q?quad|thinspace(?![a-zA-Z]))', ' '),
    (r'(?<![A-Za-z\\])([A-Za-z])\{ ?(\([^(){}]*\)) ?\}', r'\1\2'),  # sympy's 'f{(x)}'
    (r'(?<!\\)\\[()\[\]$]', ' '),  # math delimiters and money
    (r'\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])', r'\\frac'),
    (
      rf'(?<=[0-9]) *\\frac ?\{{ ?{_TEXT_UNIT} ?\}} ?\{{ ?{_TEXT_UNIT} ?\}}',
      r' \\text{\1\2/(\3\4)}',
    ),
    (r'\\[dt]binom(?![a-zA-Z])', r'\\binom'),
    (r'\\(?:top|intercal|(?:mathsf|mathrm) ?T)(?![a-zA-Z])', 'T'),
    (r'\\frac\s?([0-9])\s?([0-9])', r'\\frac{\1}{\2}'),
    (r'\\(?:textbf|textit|textrm|textnormal|textsf|mbox|hbox|rm(?= ?\{))(?![a-zA-Z])', r'\\text'),
    (r'\\mathbb\s?\{?([RZNQC])\}?', r'\\mathbb_\1 '),
    (r'(?i)\\text\s?\{\s?(?:\\?%|percent|pct)\s?\}|\\?%|\bper\s?cent(?:age)?\b|\bpct\b', ' % '),
    (r'(?<=[0-9]) ?x ?(?=10 ?\^)', r'\\times '),
    (r'(?:(?<=[A-Za-z)\]\'}])|(?<=_[0-9]))\s*\\circ\s*(?=[A-Za-z\\(\[])', r'\\compose '),
    (r'\\(?:degree|circ)(?![a-zA-Z])', r'\\circ '),
    (r'\\text\{(euros|pounds|yuan|rupees)\} ?([0-9][0-9.,]*)', r'\2 \\text{\1}'),
    (r'\\mathrm ?d(?=[A-Za-z\\ }])', 'd'),
    (r'\\(?:boldsymbol|bm|pmb)(?![a-zA-Z])', r'\\mathbf'),
    (r'(?<![A-Za-z\\])LCM(?![A-Za-z])', 'lcm'),
    (r'(?<![A-Za-z\\])(?:GCD|GCF|HCF|hcf|gcf)(?![A-Za-z])', 'gcd'),
    (rf'(?i)\b(?:the )?(?:least|lowest) common multiple of {_PAIR}', r'lcm(\1,\2)'),
    (rf'(?i)\b(?:the )?(?:great|high)est common (?:divisor|factor) of {_PAIR}', r'gcd(\1,\2)'),
    (rf'(?<![\w.])([0-9]+) ?(?:\^ ?\{{ ?{_TH} ?\}}|\^? ?{_TH})(?![A-Za-z])', r'\1'),
    (r'\^\s?\{?\s?\\circ\s?\}?', r'\\circ '),
    (r'\bnp\.|\bmath\.|\\underline(?![a-z])', ''),
    (r'(?:\\text\{)?\s+for (?:all|every|any|each)\b[^,;]*$', ''),
  )
)
_INDEX = r'(?:\{ ?(\w+) ?\}|(\w))'
_CHOICES = re.compile(rf'(?:\{{ ?\}}|(?<![\w)}}\] ]))[_^] ?{_INDEX} ?C ?_ ?{_INDEX}')  # {}_nC_k
_MODULUS = re.compile(
  r' *(?:\\text ?\{)? ?\(?(?:\\text ?\{)? ?\\?[pb]?mod(?:ulo)?[ {}]*([0-9]+)[ )}]*$'
)
_THOUSANDS = re.compile(
  r'(?<![0-9.,@])[1-9][0-9]{0,2}(?:(?:,[0-9]{3}){1,5}+|(?:@[0-9]{3})++|(?:\'[0-9]{3})++'
  r'|(?:\.[0-9]{3}){2,}+(?!\.))'
  r'(?![0-9]|[,@][0-9])'
)
_SPACED_THOUSANDS = re.compile(r'(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})++(?![0-9]| [0-9]| ?/)')


@functools.lru_cache(maxsize=16)  # one comparison normalizes an answer several times
def normalize_spelling(text: str) -> str:
  """Normalize an answer's spelling and join its lines."""
  text = ' '.join(_SMALL_CHARACTERS.sub(_spell_out, text).translate(_UNICODE).split())
  for pattern, replacement in _REPLACEMENTS:
    text = pattern.sub(replacement, text)
  if 'mod' in text:
    text = _MODULUS.sub(r' \\pmod{\1}', text)
  if 'C' in text:
    text = _CHOICES.sub(r'\\binom{\1\2}{\3\4}', text)
  text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(' ', ''), text)
  text = _remove_thousands(text)
  return text.strip().removesuffix('.').strip()


def _spell_out(match: re.Match[str]) -> str:
  r"""Return '^{12}' for '¹²', '_{2}' for '₂', and ' \frac{1}{2}' for '½'."""
  text = unicodedata.normalize('NFKC', match[0])
  if match.lastgroup:
    return f'{"^" if match.lastgroup == "raised" else "_"}{{{text}}}'
  top, _, bottom = text.partition('\N{FRACTION SLASH}')
  return f' \\frac{{{top}}}{{{bottom}}}'


def _remove_thousands(text: str) -> str:
  """Remove thousands separators, but not the commas that separate items in brackets.

  '7,425,000' is one number; '(3,331)' and '3, 331' are pairs. '(1,050, 2)' contains 1050
  and 2, because no number starts with a zero.
  """
  parts, end, depth = [], 0, 0
  for match in _THOUSANDS.finditer(text):
    gap = text[end : match.start()]
    depth += sum(gap.count(c) for c in '([') - sum(gap.count(c) for c in ')]')
    depth += gap.count(r'\{') - gap.count(r'\}')
    number = match[0]
    if depth <= 0 or ',0' in number or number[-4] != ',':
      number = re.sub("[@,'.]", '', number)
    parts += [gap, number]
    end = match.end()
  return (''.join(parts) + text[end:]).replace('@', ', ')


_MAX_TOKENS = 1200

_FUNCTIONS = 'sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt abs'
_FUNCTIONS += ' gcd lcm'
_SYMBOLS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho
sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi
Omega hbar ell odot infty emptyset mho nabla partial prime max min
mathbb_R mathbb_Z mathbb_N mathbb_Q mathbb_C"""
_ACCENTS = 'dot ddot hat bar vec tilde overline overrightarrow widehat widetilde mathbf'

# Command names.
FUNCTIONS, SYMBOLS, ACCENTS, BIG_OPERATORS = (
  frozenset(names.split()) for names in (_FUNCTIONS, _SYMBOLS, _ACCENTS, 'sum prod int lim')
)


class Token(NamedTuple):
  """A lexical unit of an answer."""

  kind: str  # 'number', 'command', 'word', 'text', 'mark', 'tree' (already parsed) or 'end'
  text: str  # a command without its backslash
  spaced: bool  # True if white space precedes it
  tree: Tree = ()  # set only for kind 'tree'


_TOKEN = re.compile(
  r'(?P<number>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,4}(?![0-9A-Za-z^]))?)'
  r'|\\(?P<wrapper>text|mathrm|mathbf|mathit|mathsf|operatorname)'
  r'\s*\{(?P<inner>(?:[^{}]|\{[^{}]*\})*+)\}'
  r'|\\(?P<command>[A-Za-z]+(?:_[RZNQC](?![A-Za-z]))?|[{}|%\\])'
  r'|(?P<word>[A-Za-z]+)'
  r'|(?P<mark>\*\*|<=|>=|!=|==|[-+*/^_=<>()\[\]{}|,;:!%&\'])'
)
_UNIT_POWER = r'[A-Za-z]+(?:\^\{?-?[0-9]\}?)?'
_UNIT_PRODUCT = rf'{_UNIT_POWER}(?:\s?[/.* ]\s?{_UNIT_POWER})*+'
_UNIT = re.compile(rf'{_UNIT_PRODUCT}(?:\s?/\s?\(\s?{_UNIT_PRODUCT}\s?\))?')
_COMMANDS = paired("""
leq le leqslant le geq ge geqslant ge neq ne lt < gt > cdot * ast * div /
lvert | rvert | vert | mid | colon : land , lor , langle ( rangle ) lbrace { rbrace }
lbrack [ rbrack ] simeq approx sim approx backslash setminus smallsetminus setminus
varnothing emptyset""")
_KEYWORDS = paired("""
and , or , pi pi infinity infty inf infty oo infty asin arcsin acos arccos atan arctan""")
_MARKS = paired('== = ** ^ <= le >= ge != ne')
# Words that are never names of variables, so that 'not 0' is not a product, which would be 0.
_DOUBTS = frozenset(
  ('not', 'nor', 'neither', 'either', 'never', 'maybe', 'perhaps', 'possibly', 'probably', 'but')
)
# Values of _COMMANDS that are marks.
_COMMAND_MARKS = frozenset('*/|:,()[]<>%')


def tokenize(text: str) -> list[Token] | None:
  """Tokenize a normalized text; return None if it has unknown characters or too many tokens."""
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
  kind, text = match.lastgroup, match[match.lastgroup or 0]
  if kind == 'number':
    return [Token('number', text, spaced)]
  if kind == 'inner':
    return _unwrap(match['wrapper'], text, spaced)
  if kind == 'word':
    return _split_letters(text, spaced)
  if kind == 'command':
    name = _COMMANDS.get(text, text)
    is_mark = name in _COMMAND_MARKS and text not in ('{', '}')
    return [Token('mark' if is_mark else 'command', name, spaced)]
  name = _MARKS.get(text, text)
  return [Token('command' if name.isalpha() else 'mark', name, spaced)]


def _unwrap(wrapper: str, inner: str, spaced: bool) -> list[Token]:
  r"""Tokenize '\wrapper{inner}' as mathematics if possible, else as one text token."""
  content = ' '.join(inner.replace(r'\cdot', '*').split())
  if content.strip(',. ').lower() in ('and', 'or', 'and/or'):
    return [Token('mark', ',', spaced)]
  if wrapper == 'mathbf' and re.fullmatch('[A-Za-z]', content):
    return [Token('command', wrapper, spaced), Token('word', content, spaced=False)]
  is_letter = content in ('e', 'i', 'd') and wrapper != 'text'
  if content in FUNCTIONS or content in _KEYWORDS or is_letter:
    return _split_letters(content, spaced)
  first, _, rest = content.partition(' ')
  if first.lower() in MULTIPLIERS and rest:  # 'million dollars'
    return [Token('text', first, spaced=True), *_unwrap(wrapper, rest, spaced=True)]
  if content.endswith(' and'):  # '1 \text{ hour and } 30 \text{ minutes}'
    content = content.removesuffix(' and')
    return [*_unwrap(wrapper, content, spaced), Token('mark', ',', spaced=True)]
  if _UNIT.fullmatch(content):
    return [Token('text', content, spaced=True)]
  if not any(c.isalpha() for c in content) or re.search('[0-9()]', content):
    tokens = tokenize(inner)  # '\text{17}', '\text{(B)}'
    if tokens is not None:
      return tokens
  return [Token('text', content, spaced=True)]


def _split_letters(word: str, spaced: bool) -> list[Token]:
  """Split a run of letters into tokens: a single name, or the one-letter factors of a product."""
  if word in _KEYWORDS:
    keyword = _KEYWORDS[word]
    return [Token('mark' if keyword == ',' else 'command', keyword, spaced)]
  if word in FUNCTIONS:
    return [Token('command', word, spaced)]
  if word.lower() in _DOUBTS:
    return [Token('text', word, spaced)]
  for name in FUNCTIONS:
    if word.startswith(name) and len(word) == len(name) + 1:  # 'sinx'
      return [Token('command', name, spaced), Token('word', word[-1], spaced=False)]
  if word.lower() in UNITS or len(word) > 3:
    return [Token('word', word, spaced)]
  return [Token('word', letter, spaced and index == 0) for index, letter in enumerate(word)]
