r"""The answer in the boxes of a text.

The last box counts, and with it every box before it that is joined to it:

  by nothing but commas and `and`     '\boxed{3} and \boxed{4}' is the answer '3, 4'
  by what begins as an alternative    '\boxed{3}, or maybe \boxed{4}' is '3 or maybe 4'

The second is the list '3 or 4' where there is nothing but `or`, and otherwise equals no answer. Any
other words part two boxes, and so do a full stop, and words that correct or restate: of
'\boxed{3}, corrected: \boxed{4}' and '\boxed{3}, or rather \boxed{4}' only the last counts.

A box that is not closed, or does not open with a brace, is no answer. Neither is one that follows
in the same line, and so is inside it: '\boxed{3 or \boxed{4}'.
"""

import re
from typing import NamedTuple

# Characters, far more than any answer has: a box that is not closed within them is not closed.
_WINDOW = 20_000
_MAX_NESTED = 4
_MAX_JOINED = 50
_MAX_BETWEEN = 100  # characters between two boxes that are joined

_BOX = '\\boxed'
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # an escaped brace does not group
_OPENING = re.compile(r'\s*+\{')
_BROKEN = re.compile(r'\s*+[}\])(\[]')  # where the brace should be
# What LaTeX has between two boxes without saying anything.
_LAYOUT = re.compile(
  r'\\(?:text|textbf|mathrm|mbox|quad|qquad)(?![A-Za-z])|\\[\s,;:!()\[\]\\]|[\s$*_{}&~,;/|()]'
)
_LOGICAL_OR = re.compile(r'\\(?:lor|vee)(?![A-Za-z])')
_WORD = re.compile(r'[^\W\d_]+')
_PARAGRAPH_END = re.compile(r'\n\s*\n')
_MAX_WORDS = 8
_LISTING = frozenset(('and', 'also', 'as', 'well'))
_LEADING = frozenset(('and', 'also', 'but', 'it'))  # before a word of doubt
_DOUBT_WORDS = """or maybe perhaps possibly probably alternatively otherwise else could might may
vs versus ou oder или 或 或者 或是"""
_CORRECTION_WORDS = """rather better precisely correctly correct actually equivalently simply
simplified words"""
_DOUBT, _CORRECTION = frozenset(_DOUBT_WORDS.split()), frozenset(_CORRECTION_WORDS.split())


class Boxed(NamedTuple):
  """What stands in boxes."""

  answer: str  # '' where the last box is not closed
  start: int  # of the first box that counts


class _Box(NamedTuple):
  start: int  # of its command
  inside: int  # of its content
  end: int | None  # of its content; None if it is not closed


def read_boxes(text: str) -> Boxed | None:
  """The answer in a text's last box and those joined to it; None where there is no box."""
  last = _last_box(text, len(text))
  if last is None:
    return None
  if last.end is None:
    return Boxed('', last.start)
  answer, start = _content(text, last), last.start
  contents = {answer}
  for _ in range(_MAX_JOINED):
    box = _last_box(text, start)
    if box is None or box.end is None or box.end > start:
      break
    separator = _separator(text[box.end + 1 : min(start, box.end + _MAX_BETWEEN + 2)])
    if separator is None:
      break
    content, start = _content(text, box), box.start
    if content not in contents:  # an answer that is repeated is one
      contents.add(content)
      answer = f'{content}{separator}{answer}'
  return Boxed(answer, start)


def _separator(between: str) -> str | None:
  """What joins two boxes, by the text between them; None where it parts them."""
  if len(between) > _MAX_BETWEEN or '.' in between:
    return None
  rest = _LAYOUT.sub(' ', _LOGICAL_OR.sub(' or ', between)).strip()
  words = _WORD.findall(rest.lower())
  if not rest:
    has_mark = re.search(r'(?<!\\)[,;/|]', between)
    return ', ' if has_mark or not _PARAGRAPH_END.search(between) else None
  if words and _LISTING.issuperset(rest.lower().split()):
    return ', '
  alternative = next((word for word in words if word not in _LEADING), '')
  if alternative not in _DOUBT or len(words) > _MAX_WORDS or not _CORRECTION.isdisjoint(words):
    return None
  return f' {" ".join(words)} '


def _last_box(text: str, before: int) -> _Box | None:
  """The last outermost box of those that start before a position."""
  last = None
  for _ in range(_MAX_NESTED):
    at = text.rfind(_BOX, 0, before)
    if at < 0:
      break
    before = at
    opening = _OPENING.match(text, at + len(_BOX))
    if _BROKEN.match(text, at + len(_BOX)):
      return _Box(at, at, None)
    if not opening:
      continue  # it is only mentioned
    box = _Box(at, opening.end(), _closing_brace(text, opening.end()))
    if last is not None and not _contains(text, box, last):
      break
    last = box
  return last


def _contains(text: str, box: _Box, later: _Box) -> bool:
  if box.end is None:
    return text.find('\n', box.inside, later.start) < 0
  return later.end is not None and later.end < box.end


def _content(text: str, box: _Box) -> str:
  return text[box.inside : box.end].replace(_BOX, '').strip()


def _closing_brace(text: str, start: int) -> int | None:
  """Position of the brace that closes the one just before `start`."""
  depth = 1
  for match in _BRACE.finditer(text, start, min(len(text), start + _WINDOW)):
    depth += {'{': 1, '}': -1}.get(match[0], 0)
    if depth == 0:
      return match.start()
  return None
