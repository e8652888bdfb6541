"""Extract the answer from a response: from the last box after the reasoning, or from prose.

A hedged answer keeps its hedge, so that it matches neither alternative: '3 or 4' in prose gives
'or 4'. The section on boxes below covers answers in several boxes.

Every search is linear in the length of the response or limited to a window, because the model that
writes the response is rewarded for whatever passes here.
"""

import ast
import collections
import itertools
import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from exgrpo_jax.grading.answers.units import MULTIPLIERS, OPERATION_WORDS, measure, normalize_unit

_WINDOW = 20_000  # characters at the end of the prose to search for an answer
_MAX_SENTENCE = 300  # characters of a ground truth that is read as a sentence
_MAX_ITEMS = 50
_HEDGE_WINDOW = 80  # characters before an answer in which 'or' makes the answer a hedge

# Possessive quantifiers (++) forbid backtracking, which keeps matching linear.
_DECIMAL = (
  r'(?:(?:[0-9]{1,3}(?:(?:,|,\\!|\{,\})[0-9]{3}){1,9}+(?![0-9])|[0-9]+,[0-9]{2}(?![0-9,])'
  r'|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)'
)
_SIGNED = rf'[+-]?{_DECIMAL}'
_NUMBER = re.compile(
  rf'(?<![^\W_])(?<!\.)(?<![\w}})]_)[+-]?(?:\\[dtc]?frac\{{{_SIGNED}\}}\{{{_SIGNED}\}}'
  rf'|{_DECIMAL}(?:e[+-]?[0-9]{{1,3}}(?![0-9]))?(?:/{_DECIMAL})?)',
  re.IGNORECASE,
)
_PERCENT_AFTER = re.compile(
  r'(?:\\[\])]|\$\$?+)?+[\s$]{0,3}(?:\\?%|percent(?:age)?\b|pct\b)', re.IGNORECASE
)
_NUMBER_OF_THINGS = re.compile(rf'(-?\\?\$?{_DECIMAL})\s+([A-Za-z]{{2,}}[A-Za-z ]*)')
_ANSWER_IS = re.compile(
  r'(?:answer|correct (?:option|choice))\*{0,2}\s{0,9}(?:is\b(?:[\s,]{1,3}(?:therefore|thus'
  r'|simply|exactly|indeed|clearly|equal to|given by|approximately)\b,?){0,3}|(:))',
  re.IGNORECASE,
)
# A formula's delimiter may stand on its own line. A final exclamation mark is not a factorial.
_SENTENCE = re.compile(
  r'(?:[:\s*]|(?:\\[\[(]|\$\$)[^\S\n]*+\n)*+([^\n]*?)\**(?:\.(?:\s|$)|!?(?:\n|$))'
)
_LETTERED = re.compile(r'\(?[A-J][).:]')  # a chosen option with its text
_FENCE = re.compile(r'^[ \t]*```[^\n`]*$', re.MULTILINE)
_LIST_ITEM = re.compile(r'(?:[-+•]|[0-9]{1,2}[.)])[ \t]+(.*)')
# Possessive quantifiers and the lookbehind keep matching linear.
_REASON = re.compile(
  r'(?<![\s,;(–—-])(?:[\s,;(–—-]++(?:because|since|due to|given that|which is|which equals)\b'
  r'|,\s*+(?:as (?!well|is)|which\b)).*',
  re.IGNORECASE,
)
_ALTERNATIVE = re.compile(r'\b(?:or|else|otherwise|not)\b', re.IGNORECASE)
_REMARK = re.compile(rf'({_SIGNED}(?:/{_DECIMAL})?%?)\s++\([0-9\s+*/=×÷−.,^$-]+\)')  # '13 (5+8)'
_QUOTES = (('`', '`'), ('**', '**'), ('__', '__'), ('_', '_'), ('*', '*'), ('"', '"'))
_QUOTES += (("'", "'"), ('“', '”'), ('‘', '’'), ('«', '»'), ('„', '“'))
# A ground truth in a sentence: words and a verb, then a number or formula, then words.
_VERB = 'is|are|was|were|has|have|had|equals?|costs?|takes?|needs?|gets?|makes?|earns?|will be'
_PLAIN = r"(?: [A-Za-z'’-]+)*?"
_TRUE_SENTENCE = re.compile(
  rf'[A-Z][a-z]*{_PLAIN} (?:{_VERB}){_PLAIN} '
  rf'(?:(\\?\$?{_SIGNED}%?)((?: [A-Za-z/]+)*)|\$([^$]+)\$)\.?'
)
# Words next to a number that change its meaning.
_CHANGING_WORDS = """not no never least most than half twice thrice when if for and in by negative
under over divisible fewer greater without base"""
_CHANGING = OPERATION_WORDS.union(_CHANGING_WORDS.split())
_DOLLARS = re.compile(r'(?<!\\)\$\$?')
# Text before the second of two answers, as in '3 or $4$' and 'or the answer is 4', or before a
# number that is denied, as in "it isn't 4".
_DOUBT_BEFORE = re.compile(
  r'(?:(?<![A-Za-z])or(?:[\s,]++(?:else|maybe|perhaps|possibly|even|it|is|the|my|final|equally))*+'
  r"|(?P<denial>\bnot|\bnever|\bcannot|n['’]t|≠|\\neq?|!=)(?:\s++(?:be|equal|to))*+)"
  r'(?:[\s,$*]|\\[$(\[])*+$',
  re.IGNORECASE,
)
# Text before and after the last number that makes the number a part of something else. Otherwise,
# '1 - 1 + 8 =', which may only repeat the question, could be right by luck.
_PART_BEFORE = re.compile(
  r'(?:[\^√]\s?|\^\{|\\(?:[dt]?frac\{[^{}]*\}|sqrt|binom\{[^{}]*\})\{'  # '2^', '\sqrt{'
  r'|[a-z](?<!\\left)\((?:[^()\s]*, ?)?'  # 'f(', 'C(7, '
  r'|[\w)}]\s?(?:[+/×÷·]|\\(?:cdot|times|div|[lg]eq?)(?![a-z]))\s?|\w(?:\*| \* )'  # '7 + ', 'x/'
  r'|(?:[0-9]\)?|(?<![\w-])(?-i:[a-z])) ?(?:[-−] ?|–)'  # '10 - ', but not 'Plan B - '
  r'|(?<![\w</])[a-z)] ?[<>≤≥]=? ?'  # 'x > '
  r'|\b(?:(?:half|root|square|cube|multiple) of|(?:divided|divisible|multiplied) by'
  r'|twice|minus|plus|times|negative|(?<!no more )(?<!no less )than|base)\s)[($]*(?:\\[$(])?$',
  re.IGNORECASE,
)
_PART_AFTER = re.compile(
  r'\s?(?:\^(?!\{?\\circ)|[√π]|\\(?:pi|sqrt|cdot|times)(?![a-z]))'
  r'|(?:[yznikKMB]|x(?! (?:as|more|faster)\b))(?![A-Za-z])'  # '5x', but not '5x as many'
  r'|\s?[+*/×÷·]\s?(?:(?!h)[a-z](?![a-z])|[(\\√π])'  # '/n', but not '/h' or '/hour'
  r'|\s(?:squared|cubed|factorial|halves|thirds|fourths|fifths|or (?:more|less))\b'
  r'|[\s$*)\\\]]*(?:\?|=[\s.?$]*\Z'  # 'Is it 5?', '5 ='
  r'|\s(?:is|was) (?:wrong|incorrect|impossible|not (?:the|correct|right)\b))'
)
# '3 apples and 4 oranges', but not a calculation: '3 apples and 4 pears are 3+4 = 7'.
_LISTS_TWO = re.compile(r'[$({\\+-]*[0-9][^=]*(?:[,;]|\b(?:and|or)) \\?\$?[0-9][^=]*\Z')
_MULTIPLIED = re.compile(r'(?:\s(?:hundred|thousand|million|billion|trillion)\b)+')
_PROSE = re.compile(r'(?<![\\A-Za-z{])[A-Za-z]{4,}|\n\s*\n')


def solution(response: str, require: Collection[str] = ()) -> str | None:
  """Return the text after a response's reasoning, or None if a required part is missing.

  The reasoning is any text before the last '</think>' or after an unclosed '<think>'. If `require`
  contains 'think', the response must contain '</think>'. If `require` contains 'box', there must be
  a box after the reasoning.
  """
  _, closing_tag, rest = response.rpartition('</think>')
  if 'think' in require and not closing_tag:
    return None
  rest = rest.partition('<think>')[0]
  return None if 'box' in require and read_boxes(rest) is None else rest


def extract(response: str, require: Collection[str] = ()) -> str | None:
  r"""Return a response's answer as written, or None; for `require`, see `solution`.

  The answer is the last box and the boxes joined to it (read_boxes). An unclosed box, as in a
  truncated response, is not an answer. Without a box, the answer is the first of these that exists:
  the text after the last '####'; the text after the last 'answer is'; the last number, or the
  formula that contains it.
  """
  rest = solution(response, require)
  return None if rest is None else _answer(rest, _last_number)


def extract_text(response: str) -> str | None:
  """Extract a nonnumeric answer, falling back on the last line instead of the last number."""
  return _answer(solution(response) or '', lambda text: text.strip().rpartition('\n')[2])


def final_answer(truth: str) -> str:
  """Extract the answer from a truth that may be a worked solution: '#### 42' gives '42'.

  If the truth contains '####', the answer is the text after the last '####' or, if that text
  contains a box, the boxed answer. Otherwise, it is the boxed answer or, without a box, the answer
  stated in a sentence. Other truths are returned unchanged.
  """
  _, marker, tail = truth.rpartition('####')
  if marker and tail.strip():
    truth = tail.strip().partition('\n')[0]
  boxed = read_boxes(truth)
  if boxed is None:
    return truth if marker else _answer_in_sentence(truth.strip()) or truth
  return truth if '\\boxed' in truth[: boxed.start] else boxed.answer or truth


def accepted_answers(truth: str) -> tuple[str, ...]:
  """Return a ground truth's accepted answers: several for '["4", "four"]', otherwise one."""
  text = truth.strip()
  if text.startswith('[') and text.endswith(']') and ('"' in text or "'" in text):
    # Double the backslash of '\frac', because the readers take '\f' for a form feed.
    source = re.sub(r'(?<!\\)\\(?=[A-Za-z]{2})', r'\\\\', text)
    for read in (json.loads, ast.literal_eval):
      try:
        answers = read(source)
      except (ValueError, SyntaxError, RecursionError, MemoryError):
        continue
      if answers and all(isinstance(answer, (str, int, float)) for answer in answers):
        return tuple(dict.fromkeys(final_answer(str(answer)) for answer in answers))
  return (final_answer(truth),)


def _answer_in_sentence(truth: str) -> str | None:
  """Extract 56 from 'The answer is 56.' or 'She has 56 apples left.'; return None when in doubt."""
  if _ANSWER_IS.search(truth):
    return _stated_answer(truth)
  match = _TRUE_SENTENCE.fullmatch(truth) if len(truth) <= _MAX_SENTENCE else None
  if not match:
    return None
  if match[3]:
    return match[3]
  words = truth[: match.start(1)].lower().split()[2:]  # 'in' and the like may begin a sentence
  return None if _CHANGING & set(words) else _number_of_things(match[1], match[2])


def _number_of_things(number: str, words: str) -> str | None:
  """Return a number with its multiplier or unit: '5 dozen' for '5' and 'dozen eggs'.

  Returns None if the words change the number's meaning, as 'squared' does.
  """
  word_list = words.split()
  if _CHANGING & set(map(str.lower, word_list)) - {'in', 'of', 'for', 'by'}:
    return None
  parts = list(itertools.takewhile(lambda word: word.lower() in MULTIPLIERS, word_list))
  unit = ' '.join(word_list[len(parts) :])
  if unit and 'per' not in word_list and measure(normalize_unit(unit)):
    parts.append(unit)
  return ' '.join((number, *parts))


def _answer(text: str, fallback: Callable[[str], str | None]) -> str | None:
  """Return the boxed answer, else the marked answer in prose, else the result of `fallback`."""
  if boxed := read_boxes(text):
    return boxed.answer.strip() or None
  text = _FENCE.sub('', text[-_WINDOW:])
  before, marker, tail = text.rpartition('####')
  if marker:
    answer = _strip_decoration(tail.strip().partition('\n')[0])
    if '####' in before:
      answer = _with_hedge(before.rpartition('####')[2], answer)
  else:
    answer = _stated_answer(text) or fallback(text) or ''
  return answer.strip() or None


# Prose.


def _stated_answer(text: str) -> str | None:
  """Return the text after the last 'answer is' or 'answer:', if it is an answer."""
  statement = _last_match(_ANSWER_IS, text)
  if not statement:
    return None
  match = _SENTENCE.match(text, statement.end())
  assert match is not None  # every part of the pattern may be empty
  sentence = match[1].strip()
  if '\n' in text[statement.end() : match.start(1)]:
    sentence = _join_list_items(text[match.start(1) :]) or sentence
  reason = _REASON.search(sentence)
  if reason and not _ALTERNATIVE.search(reason[0]):
    sentence = sentence[: reason.start()]
  sentence = _strip_decoration(sentence)
  has_colon = bool(statement[1])
  is_prose = _PROSE.search(sentence) and not _LETTERED.match(sentence)
  if has_colon and is_prose and not _LISTS_TWO.match(sentence) and _NUMBER.search(sentence):
    return None  # 'Answer: the largest n is 34' is prose, so its last number counts
  quantity = _NUMBER_OF_THINGS.fullmatch(sentence)  # '18 dollars per day'
  answer = _number_of_things(quantity[1], quantity[2]) if quantity else None
  return _with_hedge(text[: statement.start()], answer or sentence)


def _join_list_items(text: str) -> str:
  """Join the items of the list at the start of a text: '- 3' and '- 4' give '3, 4'."""
  items: list[str] = []
  for line in filter(str.strip, text.splitlines()):
    item = _LIST_ITEM.fullmatch(line.strip())
    if not item or len(items) == _MAX_ITEMS:
      break
    sentence = _SENTENCE.match(item[1])
    assert sentence is not None  # every part of the pattern may be empty
    items.append(sentence[1])
  return ', '.join(items)


def _strip_decoration(answer: str) -> str:
  """Strip quotes, emphasis and a trailing remark from an answer."""
  answer = answer.strip()
  if remark := _REMARK.fullmatch(answer.removesuffix('.')):
    return remark[1]
  text = answer.removesuffix('.')
  for opening, closing in _QUOTES:
    if text.startswith(opening) and text.endswith(closing):
      content = text[len(opening) : -len(closing)]
      return _strip_decoration(content) if content and opening not in content else answer
  return answer


def _last_number(text: str) -> str | None:
  """Return the last number, with any percent sign, or the formula that contains it."""
  number = _last_match(_NUMBER, text)
  if number is None:
    return None
  start, end = _formula(text, *number.span()) or number.span()
  # '$5 of the $8' is money, not a formula.
  if _PROSE.search(text, start, end) or '\\$' in text[start:end]:
    start, end = number.span()
  if multiplier := _MULTIPLIED.match(text, end):
    end = multiplier.end()
  is_part = start == number.start() and _PART_BEFORE.search(
    text[max(0, start - _HEDGE_WINDOW) : start]
  )
  if is_part or _PART_AFTER.match(text, end):
    return None
  answer = text[start:end] + ('%' if _PERCENT_AFTER.match(text, end) else '')
  return _with_hedge(text[:start], answer)


def _with_hedge(prefix: str, answer: str) -> str:
  """Prepend 'or' or 'not' to an answer if the text before it ends with 'or' or a negation."""
  doubt = _DOUBT_BEFORE.search(prefix[-_HEDGE_WINDOW:])
  return f'{"not" if doubt["denial"] else "or"} {answer}' if doubt else answer


def _formula(text: str, start: int, end: int) -> tuple[int, int] | None:
  """Return the bounds of the formula around a span, excluding delimiters; None if there is none."""
  for opening, closing in (('\\[', '\\]'), ('\\(', '\\)')):
    before, after = text.rfind(opening, 0, start), text.find(closing, end)
    if before >= 0 and after >= 0 and text.find(closing, before, start) < 0:
      return before + 2, after
  dollars = list(_DOLLARS.finditer(text))
  for left, right in zip(dollars[::2], dollars[1::2], strict=False):
    if left.end() <= start and end <= right.start():
      return left.end(), right.start()
  return None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
  matches = collections.deque(pattern.finditer(text), maxlen=1)
  return matches[0] if matches else None


# ---- Boxes ----

# The answer is the last box, together with every preceding box that is joined to it by:
#
#   only commas and `and`            '\boxed{3} and \boxed{4}' gives '3, 4'
#   words that begin an alternative  '\boxed{3}, or maybe \boxed{4}' gives '3 or maybe 4'
#
# In the second case, a plain `or` gives the list '3 or 4'; longer phrases match no answer.
# Any other words separate two boxes, and so do a period and words that correct or restate: in
# '\boxed{3}, corrected: \boxed{4}' and '\boxed{3}, or rather \boxed{4}', only the last box is used.
#
# A box that isn't closed, or doesn't open with a brace, is not an answer. Neither is a later box on
# the same line, because it is inside the first box: '\boxed{3 or \boxed{4}'.

# Characters in a box, far more than any answer needs. A longer box counts as unclosed.
_BOX_WINDOW = 20_000
_MAX_NESTED = 4
_MAX_JOINED = 50
_MAX_BETWEEN = 100  # characters between two joined boxes

_BOX = '\\boxed'
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # an escaped brace does not group
_OPENING = re.compile(r'\s*+\{')
_BROKEN = re.compile(r'\s*+[}\])(\[]')  # follows \boxed instead of a brace
# LaTeX between two boxes that only affects the layout.
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
  """A boxed answer and its position."""

  answer: str  # '' if the last box is not closed
  start: int  # position of the first box in the answer


class _Box(NamedTuple):
  start: int  # position of its command
  inside: int  # start of its content
  end: int | None  # end of its content; None if the box is not closed


def read_boxes(text: str) -> Boxed | None:
  """Return the answer in a text's last box and the boxes joined to it; None if there is no box."""
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
    if content not in contents:  # a repeated answer counts once
      contents.add(content)
      answer = f'{content}{separator}{answer}'
  return Boxed(answer, start)


def _separator(text: str) -> str | None:
  """Return a separator if the text between two boxes joins their answers, else None."""
  if len(text) > _MAX_BETWEEN or '.' in text:
    return None
  rest = _LAYOUT.sub(' ', _LOGICAL_OR.sub(' or ', text)).strip()
  words = _WORD.findall(rest.lower())
  if not rest:
    has_mark = re.search(r'(?<!\\)[,;/|]', text)
    return ', ' if has_mark or not _PARAGRAPH_END.search(text) else None
  if words and _LISTING.issuperset(rest.lower().split()):
    return ', '
  alternative = next((word for word in words if word not in _LEADING), '')
  if alternative not in _DOUBT or len(words) > _MAX_WORDS or not _CORRECTION.isdisjoint(words):
    return None
  return f' {" ".join(words)} '


def _last_box(text: str, end: int) -> _Box | None:
  """Return the last outermost box that starts before a position."""
  last = None
  for _ in range(_MAX_NESTED):
    at = text.rfind(_BOX, 0, end)
    if at < 0:
      break
    end = at
    opening = _OPENING.match(text, at + len(_BOX))
    if _BROKEN.match(text, at + len(_BOX)):
      return _Box(at, at, None)
    if not opening:
      continue  # `\boxed` is only mentioned
    box = _Box(at, opening.end(), _closing_brace(text, opening.end()))
    if last is not None and not _contains(text, box, last):
      break
    last = box
  return last


def _contains(text: str, box: _Box, later_box: _Box) -> bool:
  if box.end is None:
    return text.find('\n', box.inside, later_box.start) < 0
  return later_box.end is not None and later_box.end < box.end


def _content(text: str, box: _Box) -> str:
  return text[box.inside : box.end].replace(_BOX, '').strip()


def _closing_brace(text: str, start: int) -> int | None:
  """Return the position of the brace that closes the group opened before `start`, or None."""
  depth = 1
  for match in _BRACE.finditer(text, start, min(len(text), start + _BOX_WINDOW)):
    depth += {'{': 1, '}': -1}.get(match[0], 0)
    if depth == 0:
      return match.start()
  return None
