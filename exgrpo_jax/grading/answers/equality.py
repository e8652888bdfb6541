"""Whether two answers, as written, are the same: a model's, and the ground truth.

The truth decides how they are compared: a capital letter is a choice, a word is text.
In doubt they differ, because a model is rewarded for what passes here. A rounded decimal is
neither the fraction nor the irrational number, except that a truth of twelve digits or more
equals the irrational number that it rounds. How what they mean is compared: matching.py.
"""

import re
from fractions import Fraction

from exgrpo_jax.grading.answers import answer, matching, quantity
from exgrpo_jax.grading.answers.extraction import accepted_answers
from exgrpo_jax.grading.answers.spelling import normalize_spelling

_CHOICE = re.compile(r'\(?([A-Ja-j])(?:\)|\.|:)*')
_CHOSEN = re.compile(
  r'(?is)(?:the\s)?(?:answer|option|choice)?\s*(?:is\s)?:?\s*'
  r'\(?([A-J])(?:[).:]+(?:\s+(.*))?)?'
)
_OTHER_CHOICE = re.compile(r'(?<![A-Za-z])(?:\(?[A-J][).:]|(?i:or|and|maybe|not)\b)')
_DECIMAL = re.compile(r'-?[0-9]*\.[0-9]+')
_DECIMAL_COMMA = re.compile(r'-?[0-9]+,[0-9]+')
_LONG_DECIMAL_COMMA = re.compile(r'-?0,[0-9]{3,}')  # a list of 0 and 111 has a space
_MANY_DIGITS = 12  # from which a decimal stands for the irrational number that it rounds


def equal(given: str, truth: str, kind: str) -> bool:
  """Whether two answers, as written, are the same.

  Args:
    given: the model's answer.
    truth: the ground truth, a worked solution or sentence that has it, or a JSON list of accepted
      answers.
    kind: 'math', 'choice' or 'text'.
  """
  return any(_equal(given, accepted, kind) for accepted in accepted_answers(truth))


def _equal(given: str, truth: str, kind: str) -> bool:
  given, truth = strip_delimiters(given), strip_delimiters(truth)
  if not truth or not given:
    return False
  if max(len(given), len(truth)) > answer.MAX_LENGTH:
    return given == truth
  given_text = answer.normalize_text(normalize_spelling(given))
  true_text = answer.normalize_text(normalize_spelling(truth))
  if not true_text:  # nothing but dollars, periods and spaces
    return False
  choice = _CHOICE.fullmatch(true_text)
  if choice and (kind == 'choice' or (kind == 'math' and choice[1].isupper())):
    return _chosen_letter(given) == choice[1].upper()
  if kind != 'math':
    return given_text.lower() == true_text.lower()
  if given_text == true_text:
    return True
  return _same_decimal(given, truth) or matching.same(answer.read(given), answer.read(truth))


def strip_delimiters(text: str) -> str:
  """Removes the box, dollars or asterisks around an answer."""
  text = text.strip()
  if len(text) > 4 and text.startswith('**') and text.endswith('**'):
    text = text[2:-2].strip()
  if text.startswith('\\boxed{') and text.endswith('}'):
    text = text[len('\\boxed{') : -1].strip()
  if text.startswith('$') and text.endswith('$') and '$' not in text.strip('$'):
    text = text.strip('$').strip()
  return text[:-1].strip() if text.endswith('\\') and not text.endswith('\\\\') else text


def _chosen_letter(given: str) -> str | None:
  """The letter of the one choice named: 'C', 'c', '(C)', 'C.', 'C. 45 degrees'."""
  match = _CHOSEN.fullmatch(answer.strip_wrappers(normalize_spelling(given)).strip('*{} '))
  if not match:
    return None
  letter, description = match[1], match[2]
  if description and (_OTHER_CHOICE.search(description) or _CHOICE.fullmatch(description)):
    return None
  return letter.upper()


def _same_decimal(given: str, truth: str) -> bool:
  """Whether two are the same decimal, one with a comma, or the truth rounds an irrational one."""
  given, truth = normalize_spelling(given), normalize_spelling(truth)
  for with_comma, other, pattern in (
    (given, truth, _DECIMAL_COMMA),
    (truth, given, _LONG_DECIMAL_COMMA),
  ):
    if pattern.fullmatch(with_comma) and _DECIMAL.fullmatch(other):
      return Fraction(with_comma.replace(',', '.')) == Fraction(other)
  digits = truth.replace('-', '').replace('.', '').lstrip('0')
  if not _DECIMAL.fullmatch(truth) or len(digits) < _MANY_DIGITS:
    return False
  reading = answer.read(given)
  if reading[0] != 'quantity' or quantity.exact(reading[1]) is not None:
    return False
  half = Fraction(1, 2 * 10 ** len(truth.partition('.')[2]))
  return quantity.is_between(reading[1], Fraction(truth) - half, Fraction(truth) + half)
