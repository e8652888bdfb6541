"""A summary of how the verifier reads a dataset's ground truths, including odd ones."""

import re
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.data.questions import Dataset
from exgrpo_jax.datatypes import Question
from exgrpo_jax.grading.answers.answer import MAX_LENGTH, read
from exgrpo_jax.grading.answers.description import describe
from exgrpo_jax.grading.answers.extraction import final_answer

_MAX_ROWS = 2000  # rows to read, evenly spaced; reading them takes about a second
_ODD = 5  # odd truths to list
_LONG = 200  # characters
_SENTENCE = 5  # words of two letters or more
# A kind is odd if its share is below _RARE and another kind's share is at least _COMMON.
_RARE, _COMMON = 0.01, 0.9
_MAX_QUOTE = 60  # characters
_COMMAND = re.compile(r'\\[A-Za-z]+')
_WORD = re.compile(r'[^\W\d_]{2,}')
_LETTERS = re.compile(r"[^\W\d_][^\W\d_ ,.'()-]*(?:[ ,.'-]+[^\W\d_]+)*[.]?")
# First word of a description -> the kind.
_QUANTITIES = {'integer': 'integers', 'fraction': 'fractions', 'expression': 'expressions'}
_KINDS = {  # head of a reading -> the kind; other heads are used as they are
  'text': 'not understood, compared as text',
  'letters': 'words or letters',
  'list': 'lists',
  'group': 'tuples and intervals',
  'matrix': 'matrices',
  'ratio': 'ratios',
  'numeral': 'numerals in a base',
  **dict.fromkeys(('labelled', 'assigned', 'equation', 'chain'), 'equations and inequalities'),
  **dict.fromkeys(('set', 'braces', 'union', 'intersection'), 'sets'),
  'dashed': 'dates and scores',
  'time': 'times',
}


def summary(data: Dataset) -> list[str]:
  """Return a table of the kinds, with counts and examples, followed by up to five odd truths."""
  rows = np.unique(np.linspace(0, len(data) - 1, min(_MAX_ROWS, len(data))).round().astype(int))
  questions = data.read(rows.tolist())
  return [f'{len(questions):,} of {len(data):,} read', *_table(questions)]


def kind_of(truth: str, question_kind: str = 'math') -> str:
  """Return the kind of a ground truth as the verifier reads it, such as 'integers'.

  `question_kind` is the question's `kind`, i.e. how its answers are compared.
  """
  text = final_answer(truth).strip()
  if not text:
    return 'empty'
  if question_kind == 'choice':
    return 'letters' if re.fullmatch(r'\W*[A-Za-z]\W*', text) else 'other than a letter'
  if question_kind != 'math':
    return question_kind
  words = _COMMAND.sub(' ', text)
  if len(_WORD.findall(words)) >= _SENTENCE:
    return 'sentences'
  if len(text) > MAX_LENGTH:
    return 'compared as text, because they are too long'
  reading = read(text)
  head = str(reading[0])
  if head in ('quantity', 'list', 'text') and _LETTERS.fullmatch(words.strip(' {}()$')):
    return 'words or letters'
  if head == 'quantity':
    description = describe(reading)
    if description.endswith(' percent'):
      return 'percentages'
    return _QUANTITIES.get(description.split()[0], 'other numbers')
  return _KINDS.get(head, head)


def _table(questions: Sequence[Question]) -> list[str]:
  kinds = [kind_of(question.answer, question.kind) for question in questions]
  counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
  width = max(map(len, counts))
  lines = [
    f'  {kind:<{width}}  {count:>5,} ({count / len(kinds):.1%}), such as '
    f'{_quote(questions[kinds.index(kind)].answer)}'
    for kind, count in sorted(counts.items(), key=lambda item: -item[1])
  ]
  is_common = max(counts.values()) >= _COMMON * len(kinds)
  rare = {kind for kind in counts if is_common and counts[kind] < _RARE * len(kinds)}
  odd = []
  for question, kind in zip(questions, kinds):
    size = len(final_answer(question.answer))
    if size > _LONG:
      odd.append((question, f'{size:,} characters'))
    elif kind in ('empty', 'sentences', 'other than a letter'):
      odd.append((question, 'a sentence' if kind == 'sentences' else kind))
    elif kind in rare:
      odd.append((question, f'one of the few {kind}'))
  lines += [f'  odd: row {q.row}, {why}: {_quote(q.answer)}' for q, why in odd[:_ODD]]
  return lines + [f'  and {len(odd) - _ODD:,} more odd ones'] * (len(odd) > _ODD)


def _quote(truth: str) -> str:
  text = ' '.join(final_answer(truth).split())
  return text if len(text) <= _MAX_QUOTE else f'{text[:_MAX_QUOTE]}…'
