"""Which part of a response is its answer."""

import pytest

from exgrpo_jax.grading.answers.extraction import accepted_answers, extract, extract_text

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
