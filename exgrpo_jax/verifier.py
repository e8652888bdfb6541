"""Text to answer to verdict: does a response end in the right answer?

Two answers are equal when they are the same exact number or the same normalised
text. Nothing is evaluated, and every input is handled in time linear in its
length: responses come from a model that is rewarded for what passes here.
"""

import collections
import dataclasses
import re
from fractions import Fraction

from exgrpo_jax.config import setting

# How two answers are compared.
KINDS = ('math', 'choice', 'text')

# Longer answers are compared as they stand. Also keeps int() far below the 4,300
# digits at which Python refuses to convert.
_MAX_LENGTH = 2000

# Possessive quantifiers (++) forbid backtracking, which keeps matching linear. Exponents
# stop at three digits: 1e999999999 is a string of a few bytes and a number of a gigabyte.
_DECIMAL = r'(?:(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)'
_SIGNED = rf'[+-]?{_DECIMAL}'
_EXPONENT = r'[+-]?[0-9]{1,3}(?![0-9])'
_PERCENT = r'(?:\\?%|percent(?:age)?\b|pct\b)'

_BOX = re.compile(r'\\boxed\s*+\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # an escaped brace is not a brace
_ANSWER_IS = re.compile(r'answer\s++is\b', re.IGNORECASE)
_SENTENCE = re.compile(r'[:\s*]*+(.*?)\**(?:\.(?:\s|$)|\n|$)')
_NUMBER_AND_WORDS = re.compile(rf'(-?\\?\$?{_DECIMAL})\s+[A-Za-z]{{2,}}[A-Za-z ]*')
_NUMBER_IN_PROSE = re.compile(
    rf'(?<![\w.])[+-]?(?:\\[dtc]?frac\{{{_SIGNED}\}}\{{{_SIGNED}\}}'
    rf'|{_DECIMAL}(?:e{_EXPONENT})?(?:/{_DECIMAL})?)(?:\s?{_PERCENT})?', re.IGNORECASE)

_CLEANING = tuple((re.compile(pattern), new) for pattern, new in (
    (r'[−–]', '-'),
    (r'\\(?:left|right)(?![a-zA-Z])', ''),
    (r',\\!\s*', ','),  # 32,\!349
    (r'\{,\}', ','),  # 14{,}916
    (r'(?<!\\)\\!', ''),
    (r'(?<!\\)\\[,;: ]|~', ' '),
    (r'(?<!\\)\\[()\[\]]|\\?\$', ''),  # math delimiters and money alike
    (r'\\[dtc]frac(?![a-zA-Z])', r'\\frac'),
    (r'\\(?:textbf|textit|textrm|textnormal|mbox)(?![a-zA-Z])', r'\\text'),
    (r'\\math(?:rm|bf|it)\s*\{([^{}]*)\}', r'\1'),
    (rf'(?i)\s*(?:\\text\s*\{{\s*{_PERCENT}\s*\}}|{_PERCENT})', '%'),
    (r'\\(frac|sqrt)\s*([0-9])', r'\\\1{\2}'),  # \frac12, \sqrt3
    (r'(\\frac\{[^{}]*\})\s*([0-9])', r'\1{\2}'),
    (r'\s+', ' '),
))
_UNIT = re.compile(r'(?:\\text ?\{[^{}0-9]*\}(?: ?\^ ?\{?[23]\}?)?|\^ ?\{? ?\\circ ?\}?) ?$')
_TEXT = re.compile(r'\\text ?\{([^{}]*)\}')
_CHOICE = re.compile(r'\(?([A-Z])[).:]?', re.IGNORECASE)

_SPACED = re.compile(r'[+-]?[0-9]{1,3}(?: [0-9]{3})++(?:\.[0-9]++)?')
_FRACTION = re.compile(
    rf'([+-]?) ?(?:\\frac ?\{{ ?({_SIGNED})\.? ?\}} ?\{{ ?({_SIGNED})\.? ?\}}'
    rf'|({_DECIMAL})\.? ?/ ?({_SIGNED}))\.?')
_SCIENTIFIC = re.compile(
    rf'(?:({_SIGNED})\.?(?:[eE]({_EXPONENT}))?'
    rf'|(?:({_SIGNED}) ?(?:\\times|\\cdot|[×x*]) ?)?10 ?\^ ?\{{? ?({_EXPONENT}) ?\}}?)\.?')


@dataclasses.dataclass(frozen=True)
class Config:
  """What a response must look like before its answer is compared."""

  require_think: bool = setting(
      None, "a response without '</think>' is wrong; the training reward asks for it")
  require_box: bool = setting(
      None, r"only \boxed{...} is an answer; off, '####', 'the answer is' and the last "
      'number count too')


def is_correct(response: str, answer: str, config: Config) -> bool:
  """Whether the response's answer equals the ground truth. Never raises, never hangs."""
  given = extract(response, config)
  return given is not None and _equal(given, answer)


def extract(response: str, config: Config) -> str | None:
  r"""The answer a response gives, as written, or None.

  What stands before the last '</think>' is thought, not answer. Of several boxes
  the last counts; one that is not closed, as where a response was cut, is no
  answer. Without any box: what follows the last '####', else what follows the
  last 'answer is', else the last number.
  """
  thought, closed, text = response.rpartition('</think>')
  if config.require_think and not closed:
    return None
  box = _last(_BOX, text)
  if box:
    answer = _until_closed(text, box.end())
  elif config.require_box:
    answer = None
  else:
    answer = _from_prose(text)
  return (answer or '').strip() or None


def _until_closed(text: str, start: int) -> str | None:
  """The text from `start` to the brace that closes the one before it."""
  depth = 1
  for match in _BRACE.finditer(text, start):
    depth += {'{': 1, '}': -1}.get(match[0], 0)
    if depth == 0:
      return text[start:match.start()]
  return None


def _from_prose(text: str) -> str | None:
  _, marked, tail = text.rpartition('####')
  if marked:
    return tail.strip().partition('\n')[0]
  said = _last(_ANSWER_IS, text)
  if said:
    sentence = _SENTENCE.match(text[said.end():said.end() + _MAX_LENGTH])[1].strip()
    counted = _NUMBER_AND_WORDS.fullmatch(sentence)  # '18 dollars per day'
    return counted[1] if counted else sentence
  number = _last(_NUMBER_IN_PROSE, text.replace('$', ''))
  return number[0] if number else None


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
  matches = collections.deque(pattern.finditer(text), maxlen=1)
  return matches[0] if matches else None


def _equal(given: str, truth: str) -> bool:
  if max(len(given), len(truth)) > _MAX_LENGTH:
    return given.strip() == truth.strip()
  given, truth = _cleaned(given), _cleaned(truth)
  given_text, true_text = _text(given), _text(truth)
  if not true_text:
    return False
  return (given_text == true_text or _same_choice(given_text, true_text)
          or _same_number(given, truth))


def _cleaned(answer: str) -> str:
  """The answer with one spelling for what LaTeX can spell in several ways."""
  for pattern, new in _CLEANING:
    answer = pattern.sub(new, answer)
  return answer.strip().removesuffix('.').strip()


def _text(cleaned: str) -> str:
  # A space between two digits stays: '1 1/2' is not '11/2'.
  text = ' '.join(_TEXT.sub(r'\1', cleaned).split())
  return re.sub(r'(?<![0-9]) | (?![0-9])', '', text).removesuffix('.')


def _same_choice(given: str, truth: str) -> bool:
  """Multiple choice: 'C', 'c', '(C)' and 'C.' are one, where the truth is a capital A-J."""
  given_letter, true_letter = _CHOICE.fullmatch(given), _CHOICE.fullmatch(truth)
  return bool(given_letter and true_letter and true_letter[1] in 'ABCDEFGHIJ'
              and given_letter[1].upper() == true_letter[1])


def _same_number(given: str, truth: str) -> bool:
  """Exact equality; 20% equals 0.2, and also 20, as questions ask 'what percentage'."""
  given_number, true_number = _number(given), _number(truth)
  if given_number is None or true_number is None:
    return False
  (x, x_percent), (y, y_percent) = given_number, true_number
  if x == y or x_percent == y_percent:
    return x == y
  return x == 100 * y if x_percent else 100 * x == y


def _number(cleaned: str) -> tuple[Fraction, bool] | None:
  """The value and whether a percent sign follows it; None if it is not one number.

  A unit, which is what stands in \\text after a number or a degree sign, is dropped.
  """
  text = _TEXT.sub(r'\1', _UNIT.sub('', cleaned)).strip()
  percent = text.endswith('%')
  text = text.removesuffix('%').strip()
  if text.startswith('(') and text.endswith(')'):
    text = text[1:-1].strip()
  if _SPACED.fullmatch(text):
    text = text.replace(' ', '')
  value = _value(text)
  return None if value is None else (value, percent)


def _value(text: str) -> Fraction | None:
  text = text.replace('+ ', '+').replace('- ', '-')
  if match := _FRACTION.fullmatch(text):
    sign, *parts = match.groups()
    top, bottom = (_decimal(part) for part in parts if part)
    return (-1 if sign == '-' else 1) * top / bottom if bottom else None
  if match := _SCIENTIFIC.fullmatch(text):
    plain, exponent, mantissa, power = match.groups()
    return _decimal(plain or mantissa or '1') * Fraction(10) ** int(exponent or power or 0)
  return None


def _decimal(text: str) -> Fraction:
  return Fraction(text.replace(',', ''))
