r"""A response's answer, as written: what follows the thought, inside the last box.

Every search is linear in the length of the response or bounded by a window, for a
response comes from a model that is rewarded for what passes here.
"""

import collections
import re

# Far more than any answer: a box that is not closed within it is not closed, and prose
# before it is no longer the end of the response.
_WINDOW = 20_000
_NESTED_BOXES = 4

# Possessive quantifiers (++) forbid backtracking, which keeps matching linear.
_DECIMAL = (
  r'(?:(?:[0-9]{1,3}(?:(?:,|,\\!|\{,\})[0-9]{3}){1,9}+(?![0-9])|[0-9]+,[0-9]{2}(?![0-9,])'
  r'|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)'
)
_SIGNED = rf'[+-]?{_DECIMAL}'
_NUMBER = re.compile(
  rf'(?<![\w.])[+-]?(?:\\[dtc]?frac\{{{_SIGNED}\}}\{{{_SIGNED}\}}'
  rf'|{_DECIMAL}(?:e[+-]?[0-9]{{1,3}}(?![0-9]))?(?:/{_DECIMAL})?)',
  re.IGNORECASE,
)
_PERCENT = re.compile(r'[\s$]{0,3}(?:\\?%|percent(?:age)?\b|pct\b)', re.IGNORECASE)
_COUNTED = re.compile(rf'(-?\\?\$?{_DECIMAL})\s+[A-Za-z]{{2,}}[A-Za-z ]*')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # an escaped brace is not a brace
_OPENING = re.compile(r'\s*+\{')
_ANSWER_IS = re.compile(r'answer\s{0,9}(?:is\b|(:))', re.IGNORECASE)
_SENTENCE = re.compile(r'[:\s*]*+([^\n]*?)\**(?:\.(?:\s|$)|\n|$)')
_DELIMITER = re.compile(r'(?:\\[\])]|\$\$?)?')
_DOLLARS = re.compile(r'(?<!\\)\$\$?')
_PROSE = re.compile(r'(?<![\\A-Za-z{])[A-Za-z]{4,}|\n\s*\n')


def extract(response: str, require_think: bool, require_box: bool) -> str | None:
  r"""The answer a response gives, as written, or None.

  What stands before the last '</think>' is thought, not answer, and so is what
  follows a '<think>' that is never closed. Of several boxes the last counts; one
  that is not closed, as where a response was cut, is no answer. Without any box:
  what follows the last '####', else what follows the last 'answer is', else the
  last number, with the whole formula it stands in.
  """
  _, closed, text = response.rpartition('</think>')
  if require_think and not closed:
    return None
  text = text.partition('<think>')[0]
  box = _last_box(text)
  if box is not None:
    answer = _boxed(text, box)
  elif require_box:
    answer = None
  else:
    answer = _from_prose(text[-_WINDOW:])
  return (answer or '').strip() or None


def _last_box(text: str) -> tuple[int, int | None] | None:
  """Start of the content of the last outermost box, and its end or None where unclosed."""
  box, before = None, len(text)
  for _ in range(_NESTED_BOXES):
    at = text.rfind('\\boxed', 0, before)
    opening = _OPENING.match(text, at + len('\\boxed')) if at >= 0 else None
    if not opening:
      break
    end = _until_closed(text, opening.end())
    if box is not None and (end is None or box[1] is None or end < box[1]):
      break
    box, before = (opening.end(), end), at
  return box


def _boxed(text: str, box: tuple[int, int | None]) -> str | None:
  start, end = box
  return None if end is None else text[start:end].replace('\\boxed', '')


def _until_closed(text: str, start: int) -> int | None:
  """Where the brace that closes the one before `start` stands."""
  depth = 1
  for match in _BRACE.finditer(text, start, min(len(text), start + _WINDOW)):
    depth += {'{': 1, '}': -1}.get(match[0], 0)
    if depth == 0:
      return match.start()
  return None


def _from_prose(text: str) -> str | None:
  _, marked, tail = text.rpartition('####')
  if marked:
    return tail.strip().partition('\n')[0]
  said = _last(_ANSWER_IS, text)
  if said:
    sentence = _SENTENCE.match(text, said.end())[1].strip()
    told = said[1] and _PROSE.search(sentence) and _NUMBER.search(sentence)
    if sentence and not told:  # 'Answer: the largest n is 34' is told in prose
      counted = _COUNTED.fullmatch(sentence)  # '18 dollars per day'
      return counted[1] if counted else sentence
  return _last_number(text)


def _last_number(text: str) -> str | None:
  """The last number, with its percent sign, or the formula that holds it."""
  number = _last(_NUMBER, text)
  if number is None:
    return None
  start, end = _formula(text, *number.span()) or number.span()
  # '$5 of the $8' is money, not a formula.
  if _PROSE.search(text, start, end) or '\\$' in text[start:end]:
    start, end = number.span()
  return text[start:end] + ('%' if _PERCENT.match(text, _DELIMITER.match(text, end).end()) else '')


def _formula(text: str, start: int, end: int) -> tuple[int, int] | None:
  """Where the content of the math delimiters around a place starts and ends."""
  for opening, closing in (('\\[', '\\]'), ('\\(', '\\)')):
    before, after = text.rfind(opening, 0, start), text.find(closing, end)
    if before >= 0 and after >= 0 and text.find(closing, before, start) < 0:
      return before + 2, after
  dollars = list(_DOLLARS.finditer(text))
  for left, right in zip(dollars[::2], dollars[1::2], strict=False):
    if left.end() <= start and end <= right.start():
      return left.end(), right.start()
  return None


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
  matches = collections.deque(pattern.finditer(text), maxlen=1)
  return matches[0] if matches else None
