r"""One spelling for what LaTeX, Unicode and plain text spell in several ways.

'\dfrac' and '\tfrac' become '\frac', '×' becomes '\times', and thousands lose their separators.
Nothing is evaluated.
"""

import functools
import re


def paired(text: str) -> dict[str, str]:
  """The words of a text in pairs: what is written, and what it is taken for."""
  words = text.split()
  return dict(zip(words[::2], words[1::2], strict=True))


_SYMBOLS = paired(r"""
− - – - — - ‐ - ÷ / ∕ / ⁄ / ％ % ， , ； ; ： : （ ( ） ) ＝ = ＋ + ． .
× \times · \cdot ⋅ \cdot ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ≈ \approx ∞ \infty π \pi √ \sqrt
° ^\circ º ^\circ ± \pm ∓ \mp ∪ \cup ∩ \cap ∈ \in ∖ \setminus ∅ \emptyset ℝ \mathbb{R}
⁰ ^0 ¹ ^1 ² ^2 ³ ^3 ⁴ ^4 ⁵ ^5 ⁶ ^6 ⁷ ^7 ⁸ ^8 ⁹ ^9
½ \frac{1}{2} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅓ \frac{1}{3} ⅔ \frac{2}{3}
α \alpha β \beta γ \gamma θ \theta λ \lambda μ \mu ω \omega φ \phi σ \sigma τ \tau ρ \rho
Ω \Omega ∘ \circ ∂ \partial ∇ \nabla Δ \Delta δ \delta ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
‑ - ℃ ^\circ\text{C} € \text{euros} £ \text{pounds}""")
_SPACES = '\u00a0\u202f\u2009'
_INVISIBLE = '\u200b\u200c\u200d\ufeff\u2061\u2062'
_UNICODE = str.maketrans(
  {
    # A space parts a command from what follows, and a fraction from an integer before it.
    **{
      character: f' {text}' if text.startswith('\\frac') else text + ' ' * text[-1].isalpha()
      for character, text in _SYMBOLS.items()
    },
    **dict.fromkeys(_SPACES, ' '),
    **dict.fromkeys(_INVISIBLE, ''),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
  }
)

_DOUBLED_BACKSLASH = (
  r'(?<!\\)\\\\(?=(?:[dtc]?frac|left|right|sqrt|pi|leq?|geq?|neq?|cdot|times|infty|text'
  r'|cup|circ|begin|end|theta|in|pm|quad)(?![A-Za-z]))'
)
_TH = r'(?:st|nd|rd|th|\\(?:text|mathrm|textsuperscript) ?\{ ?(?:st|nd|rd|th) ?\})'
_PAIR = r'(\w{1,9})(?: and|,) (\w{1,9})\b'
_REPLACEMENTS = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    # A backslash escaped twice, as in JSON, but not the end of a matrix row.
    (_DOUBLED_BACKSLASH, r'\\'),
    (r'\$\s*([,;])\s*\$', r'\1 '),
    (
      r'\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|limits)(?![a-zA-Z])'
      r'\s?\.?',
      '',
    ),
    # '@' marks what can only be a thousands separator, until `_remove_thousands`.
    (r'(?<!\\),\s*\\!\s*', '@'),  # 32,\!349
    (r'\{\s?,\s?\}\s*', '@'),  # 14{,}916
    (r'(?<=[0-9])\s+@', '@'),
    (r'(?<!\\)\\!', ''),
    (r'(?<!\\)\\[,;: >]|~|(?<!\\)\\(?:q?quad|thinspace(?![a-zA-Z]))', ' '),
    (r'(?<![A-Za-z\\])([A-Za-z])\{ ?(\([^(){}]*\)) ?\}', r'\1\2'),  # sympy's 'f{(x)}'
    (r'(?<!\\)\\[()\[\]$]', ' '),  # math delimiters and money
    (r'\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])', r'\\frac'),
    (r'\\[dt]binom(?![a-zA-Z])', r'\\binom'),
    (r'\\(?:top|intercal|(?:mathsf|mathrm) ?T)(?![a-zA-Z])', 'T'),
    (r'\\frac\s?([0-9])\s?([0-9])', r'\\frac{\1}{\2}'),
    (r'\\(?:textbf|textit|textrm|textnormal|textsf|mbox|hbox)(?![a-zA-Z])', r'\\text'),
    (r'\\mathbb\s?\{?([RZNQC])\}?', r'\\mathbb_\1 '),
    (r'(?i)\\text\s?\{\s?(?:\\?%|percent|pct)\s?\}|\\?%|\bper\s?cent(?:age)?\b|\bpct\b', ' % '),
    (r'(?<=[0-9]) ?x ?(?=10 ?\^)', r'\\times '),
    (r'(?:(?<=[A-Za-z)\]\'}])|(?<=_[0-9]))\s*\\circ\s*(?=[A-Za-z\\(\[])', r'\\compose '),
    (r'\\(?:degree|circ)(?![a-zA-Z])', r'\\circ '),
    (r'\\text\{(euros|pounds)\} ?([0-9][0-9.,]*)', r'\2 \\text{\1}'),
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
_THOUSANDS = re.compile(
  r'(?<![0-9.,@])[1-9][0-9]{0,2}(?:(?:,[0-9]{3}){1,5}+|(?:@[0-9]{3})++)'
  r'(?![0-9]|[,@][0-9])'
)
_SPACED_THOUSANDS = re.compile(r'(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})++(?![0-9]| [0-9]| ?/)')


@functools.lru_cache(maxsize=16)  # an answer is asked for several times in one comparison
def normalize_spelling(text: str) -> str:
  """The text in its normal spelling, on one line."""
  text = ' '.join(text.translate(_UNICODE).split())
  for pattern, replacement in _REPLACEMENTS:
    text = pattern.sub(replacement, text)
  if 'C' in text:
    text = _CHOICES.sub(r'\\binom{\1\2}{\3\4}', text)
  text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(' ', ''), text)
  text = _remove_thousands(text)
  return text.strip().removesuffix('.').strip()


def _remove_thousands(text: str) -> str:
  """Removes thousands separators, but not the commas that separate items in brackets.

  '7,425,000' is one number; '(3,331)' is a pair, and so is '3, 331'. '(1,050, 2)'
  is 1050 and 2, because no number starts with a zero.
  """
  parts, end, depth = [], 0, 0
  for match in _THOUSANDS.finditer(text):
    between = text[end : match.start()]
    depth += sum(between.count(c) for c in '([') - sum(between.count(c) for c in ')]')
    depth += between.count(r'\{') - between.count(r'\}')
    number = match[0].replace('@', ',')
    if depth <= 0 or '@' in match[0] or ',0' in match[0]:
      number = number.replace(',', '')
    parts += [between, number]
    end = match.end()
  return (''.join(parts) + text[end:]).replace('@', ', ')
