"""Which part of a response is its answer."""

import random

import pytest

from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.answers.extraction import (
  accepted_answers,
  extract,
  extract_text,
  final_answer,
  read_boxes,
)

# Name: (response, answer).
RESPONSES = {
  'box': (r'So $\boxed{42}$.', '42'),
  'last_of_two_boxes': (r'\boxed{1}, no: \boxed{2}', '2'),
  'box_over_later_prose': (r'\boxed{1} so the answer is 2', '1'),
  'braces_inside': (r'\boxed{\frac{1}{2}} and }', r'\frac{1}{2}'),
  'a_set': (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
  'escaped_braces_need_no_partner': (r'\boxed{\left\{ 1 \right.}', r'\left\{ 1 \right.'),
  'unclosed_box_is_no_answer': (r'\boxed{1} then \boxed{2', None),
  'empty_box': (r'\boxed{ }', None),
  'gsm8k': ('6 * 7 = <<6*7=42>>42\n#### 42\n', '42'),
  'gsm8k_over_the_answer_is': ('The answer is 1.\n#### 42', '42'),
  'the_answer_is': ('The answer is 41.\nNo, the answer is: 42. Done in 3 steps.', '42'),
  'the_answer_in_bold': ('The final answer is **3.5**.', '3.5'),
  'the_answer_with_its_unit': ('The answer is 18 dollars per day.', '18'),
  'last_number': ('She has 12 eggs and makes $1,000.50.', '1,000.50'),
  'last_number_with_sign_and_percent': ('from 3 to -20%', '-20%'),
  'a_difference_has_no_sign': ('it is 10-5', '5'),
  'fraction_in_prose': (r'It is $\frac{10}{9}$', r'\frac{10}{9}'),
  'digits_within_a_word_are_no_number': ('AZYUK2A', None),
  'box_within_a_box': (r'\boxed{5 \text{ or } \boxed{6}}', r'5 \text{ or } {6}'),
  'space_before_the_brace': (r'\boxed {5}', '5'),
  'formula_around_the_last_number': (r'We find $x \geq 5$ here.', r'x \geq 5'),
  'formula_in_parentheses': (r'We find \( (9+1) \).', '(9+1)'),
  'percent_after_a_formula': ('$28$ percent', '28%'),
  'money_is_no_formula': ('It costs $5 of the $8 there', '8'),
  'comma_before_cents': ('Soucis : 2,74 $ a..', '2,74'),
  'answer_in_a_sentence': ('Final Answer: The largest $n$ is 34.', '34'),
  'answer_after_a_colon': ('Answer: Evelyn.', 'Evelyn'),
  'code_span': ('Answer: `13`', '13'),
  'code_span_after_gsm8ks_mark': ('#### `13`', '13'),
  'fenced': ('Answer:\n```\n13\n```', '13'),
  'quoted': ('The answer is "13".', '13'),
  'emphasised': ('The answer is __13__.', '13'),
  'emphasised_last_number': ('So we get _13_ of them.', '13'),
  'subscript_is_no_number': (r'We call it $x$, or 7, or a_13', 'or 7'),
  'list_item': ('Answer:\n- 13', '13'),
  'numbered_item': ('The answer is:\n\n1. 13', '13'),
  'two_items': ('The answer is:\n- 13.\n- 14\nDone', '13, 14'),
  'with_its_reason': ('The answer is 13, because 5+8=13', '13'),
  'with_a_remark': ('The answer is 13 (5+8).', '13'),
  'a_point_is_no_remark': ('The answer is (5, 8).', '(5, 8)'),
  'braces_the_wrong_way_round': (r'\boxed}5{', None),
  'bracket_in_place_of_a_brace': (r'\boxed(5)', None),
  'box_that_is_only_mentioned': (r'I put it in a \boxed, and it is 5.', '5'),
  'nothing': ('I do not know.', None),
  'empty': ('', None),
}


def test_the_answer_of_a_response():
  extracted = {name: extract(response) for name, (response, _) in RESPONSES.items()}
  assert extracted == {name: answer for name, (_, answer) in RESPONSES.items()}


def test_for_an_answer_that_is_no_number_the_last_line_counts_where_nothing_marks_one():
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
    '5 + 8 = 13\n#### 13': ('13',),
    '["4", "four"]': ('4', 'four'),
    "['4', 'four']": ('4', 'four'),
    '["The answer is 4.", "four"]': ('4', 'four'),
    '[4, 5]': ('[4, 5]',),  # an interval
    '["4", 4, 0.5]': ('4', '0.5'),
    '[]': ('[]',),
  }
  assert {truth: accepted_answers(truth) for truth in expected} == expected


@pytest.mark.parametrize(
  ('response', 'require_think', 'require_box', 'expected'),
  [
    (r'<think>\boxed{5}</think> Done.', False, False, None),
    (r'a</think>\boxed{5}</think>\boxed{6}', True, False, '6'),
    (r'<think> so \boxed{5}', False, False, None),  # the thought is not closed
    (r'</think> Wait. <think> \boxed{5}', True, False, None),
    (r'\boxed{5} <think> \boxed{6}', False, False, '5'),
    (r'\boxed{5}', True, False, None),
    (r'\boxed{5}', False, True, '5'),
    ('#### 5', False, True, None),
    (r'\boxed{5', False, True, None),
  ],
)
def test_a_thought_is_no_answer_and_what_is_required_must_be_there(
  response, require_think, require_box, expected
):
  assert extract(response, require_think, require_box) == expected


# ---- Several boxes ----


# What stands between \boxed{3} and \boxed{4}: the answer.
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
def test_only_boxes_with_nothing_else_between_them_are_one_answer(between, expected):
  boxed = read_boxes(rf'so \boxed{{3}}{between}\boxed{{4}}.')
  assert boxed is not None and boxed.answer == expected


def test_an_answer_that_is_repeated_is_one():
  boxed = read_boxes(r'\boxed{3}, \boxed{4} or \boxed{3}')
  assert boxed is not None and boxed.answer == '4 or 3'


def test_a_box_that_is_only_mentioned_is_none():
  assert read_boxes(r'as in \boxed above') is None
  assert read_boxes(r'\boxed{4}, as \boxed says') == ('4', 0)


def test_a_box_inside_one_that_is_not_closed_is_no_answer():
  assert read_boxes(r'\boxed{3 or \boxed{4}') == ('', 0)
  assert read_boxes('\\boxed{3 is a leg.\n\\boxed{4}') == ('4', 19)


@pytest.mark.parametrize(
  ('truth', 'expected'),
  [
    ('#### 42', '42'),
    ('6 * 7 = 42\n#### 42\n', '42'),
    (r'The answer is $\boxed{42}$.', '42'),
    (r'\(\boxed{1}\) and \(\boxed{-2}\).', '1, -2'),
    (r'\boxed{1} paper and \boxed{2} bins', r'\boxed{1} paper and \boxed{2} bins'),
    ('####', '####'),
    ('42', '42'),
  ],
)
def test_the_answer_of_a_truth_that_is_a_worked_solution(truth, expected):
  assert final_answer(truth) == expected


TRUTHS = ('5', '1250', r'\frac{5}{8}', '(6,-2,5)', r'\{1, 2\}', r'\sqrt{3}', '3102_4', '4:7')
MARKS = ('{', '}', '(', ')', '[', ']', '|', r'\{', r'\}', '$', r'\boxed{', ' or ', '6')


@pytest.mark.full
def test_no_box_with_a_mark_too_many_is_another_answer():
  """A misplaced bracket, dollar or box leaves an answer as it is, or makes it none or another."""
  generator = random.Random(0)
  for _ in range(400):
    truth, other = generator.sample(TRUTHS, 2)
    at = generator.randrange(len(truth) + 1)
    box = rf'\boxed{{{truth[:at]}{generator.choice(MARKS)}{truth[at:]}}}'
    assert not verifier.is_correct(box, other)
    for hedge in (' or ', ', maybe ', r'\lor', ', '):
      assert not verifier.is_correct(rf'\boxed{{{other}}}{hedge}{box}', truth), box
