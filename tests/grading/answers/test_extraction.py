"""Extraction of answers from responses and ground truths."""

import random

import pytest

from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.answers.extraction import (
  accepted_answers,
  extract,
  extract_text,
  read_boxes,
)
from tests.helpers import cases


@pytest.mark.parametrize(
  'case', cases.rows('grading', 'extraction.jsonl'), ids=lambda c: c['about']
)
def test_the_answer_of_a_response(case):
  assert extract(case['response']) == case['answer']


def test_extract_text_falls_back_to_the_last_line():
  expected = {
    'of 3 words:\n\nolleh \n': 'olleh',
    '[3, 5]': '[3, 5]',
    'The answer is olleh.\nDone.': 'olleh',
    r'\boxed{olleh}\nDone.': 'olleh',
    r'olleh \boxed{oll': None,  # not closed
    'a</think>b': 'b',
    ' ': None,
  }
  assert {response: extract_text(response) for response in expected} == expected


def test_the_answers_of_a_ground_truth():
  expected = {
    'The answer is 56.': ('56',),
    'She has 56 apples left.': ('56',),
    'The 3 sides are 4 each.': ('The 3 sides are 4 each.',),  # two numbers
    'Evelyn is the tallest.': ('Evelyn is the tallest.',),
    'x + 3 = 5': ('x + 3 = 5',),
    '5 + 8 = 13\n#### 13\n': ('13',),
    '["4", "four"]': ('4', 'four'),
    "['4', 'four']": ('4', 'four'),
    '["The answer is 4.", "four"]': ('4', 'four'),
    '[4, 5]': ('[4, 5]',),  # an interval
    '["4", 4, 0.5]': ('4', '0.5'),
    '[]': ('[]',),
    '#### 42': ('42',),
    r'The answer is $\boxed{42}$.': ('42',),
    r'\(\boxed{1}\) and \(\boxed{-2}\).': ('1, -2',),
    r'\boxed{1} paper and \boxed{2} bins': (r'\boxed{1} paper and \boxed{2} bins',),
    '####': ('####',),
    '42': ('42',),
  }
  assert {truth: accepted_answers(truth) for truth in expected} == expected


@pytest.mark.parametrize(
  ('response', 'require', 'expected'),
  [
    (r'<think>\boxed{5}</think> Done.', (), None),
    (r'a</think>\boxed{5}</think>\boxed{6}', ('think',), '6'),
    (r'<think> so \boxed{5}', (), None),  # the thought is not closed
    (r'</think> Wait. <think> \boxed{5}', ('think',), None),
    (r'\boxed{5} <think> \boxed{6}', (), '5'),
    (r'\boxed{5}', ('think',), None),
    (r'\boxed{5}', ('box',), '5'),
    ('#### 5', ('box',), None),
    (r'\boxed{5', ('box',), None),
  ],
)
def test_thoughts_are_not_answers_and_required_parts_must_exist(response, require, expected):
  assert extract(response, require) == expected


# ---- Several boxes ----

# Text between \boxed{3} and \boxed{4} -> the answer.
BETWEEN = {
  ' or ': '3 or 4',
  r'$ \text{or} $': '3 or 4',
  '\n\nor\n\n': '3 or 4',
  r' \lor ': '3 or 4',
  ', or maybe ': '3 or maybe 4',
  ', but it could also be ': '3 but it could also be 4',
  ' or $x = $': '3 or x 4',
  ' and/or ': '3 and or 4',
  ' and ': '3, 4',
  ', ': '3, 4',
  '': '3, 4',
  '\n\n': '4',
  ', corrected: ': '4',
  ', or rather ': '4',
  ' = ': '4',
  '. Or maybe ': '4',
  ' and the answer is ': '4',
  ' of them, whether odd or even, which makes ': '4',
}


@pytest.mark.parametrize(('between', 'expected'), BETWEEN.items())
def test_boxes_are_joined_only_by_commas_and_alternatives(between, expected):
  boxed = read_boxes(rf'so \boxed{{3}}{between}\boxed{{4}}.')
  assert boxed is not None and boxed.answer == expected


def test_a_repeated_answer_is_used_once():
  boxed = read_boxes(r'\boxed{3}, \boxed{4} or \boxed{3}')
  assert boxed is not None and boxed.answer == '4 or 3'


def test_a_box_that_is_only_mentioned_is_ignored():
  assert read_boxes(r'as in \boxed above') is None
  assert read_boxes(r'\boxed{4}, as \boxed says') == ('4', 0)


def test_a_box_inside_an_unclosed_box_is_not_an_answer():
  assert read_boxes(r'\boxed{3 or \boxed{4}') == ('', 0)
  assert read_boxes('\\boxed{3 is a leg.\n\\boxed{4}') == ('4', 19)


TRUTHS = ('5', '1250', r'\frac{5}{8}', '(6,-2,5)', r'\{1, 2\}', r'\sqrt{3}', '3102_4', '4:7')
MARKS = ('{', '}', '(', ')', '[', ']', '|', r'\{', r'\}', '$', r'\boxed{', ' or ', '6')


@pytest.mark.full
def test_an_extra_mark_never_makes_an_answer_match():
  """A box with a misplaced bracket, dollar or box never matches a different truth."""
  generator = random.Random(0)
  for _ in range(400):
    truth, other = generator.sample(TRUTHS, 2)
    at = generator.randrange(len(truth) + 1)
    box = rf'\boxed{{{truth[:at]}{generator.choice(MARKS)}{truth[at:]}}}'
    assert not verifier.is_correct(box, other)
    for hedge in (' or ', ', maybe ', r'\lor', ', '):
      assert not verifier.is_correct(rf'\boxed{{{other}}}{hedge}{box}', truth), box
