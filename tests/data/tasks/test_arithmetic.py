"""Tests of the sums: disjoint splits, and solutions that the checker accepts."""

import collections

import pytest

from exgrpo_jax.data.tasks import arithmetic, catalogue
from exgrpo_jax.data.tasks.embedded import guess_rate

QUESTION = '48+9+3+7'
SOLUTION = r'48+3=51 +9=60 +7=67 \boxed{67}'


@pytest.fixture(scope='module')
def rows():
  return arithmetic.arithmetic_rows()


def sorted_terms(row):
  return tuple(sorted(map(int, row['messages'][0]['content'].split('+'))))


def test_every_split_has_its_size_and_its_range_of_terms(rows):
  sizes = {name: len(split) for name, split in rows.items()}
  assert sizes == {'train': 24_000, 'validation': 2_000, 'test': 2_000, 'ood': 2_000}
  for name, split in rows.items():
    lengths = {len(sorted_terms(row)) - 1 for row in split}
    assert lengths == ({5} if name == 'ood' else {3, 4, 5})
    assert {row['source'] for row in split} == {'arithmetic_ood' if name == 'ood' else 'arithmetic'}
  terms = [
    list(map(int, row['messages'][0]['content'].split('+')))
    for split in rows.values()
    for row in split
  ]
  assert {start for start, *_ in terms} == set(range(10, 100))
  assert {digit for _, *digits in terms for digit in digits} == set(range(1, 10))


def test_only_the_ood_split_has_sums_with_only_high_digits(rows):
  for name, split in rows.items():
    for row in split:
      _, *digits = map(int, row['messages'][0]['content'].split('+'))
      assert (min(digits) >= 6) == (name == 'ood')


def test_no_two_questions_have_the_same_multiset_of_terms(rows):
  counts = collections.Counter(sorted_terms(row) for split in rows.values() for row in split)
  assert counts.most_common(1)[0][1] == 1


def test_the_questions_are_the_same_on_every_call(rows):
  assert arithmetic.arithmetic_rows() == rows


def test_worked_solutions_are_valid_and_end_in_the_answer(rows):
  for split in rows.values():
    for row in split:
      question = row['messages'][0]['content']
      assert int(row['answer']) == sum(sorted_terms(row))
      assert arithmetic.valid_steps(question, row['solution']), row
      assert row['solution'].endswith(rf'\boxed{{{row["answer"]}}}')


def test_worked_solutions_shuffle_the_terms(rows):
  in_order = [
    arithmetic.written_sum(list(map(int, row['messages'][0]['content'].split('+'))))
    for row in rows['train']
  ]
  same = sum(written == row['solution'] for written, row in zip(in_order, rows['train']))
  # A shuffle of 3 to 5 digits keeps the order with a chance between 1/6 and 1/120.
  assert same / len(in_order) < 0.12


@pytest.mark.parametrize('split', ['train', 'validation', 'test', 'ood'])
def test_a_constant_guess_earns_almost_nothing(rows, split):
  assert guess_rate([row['answer'] for row in rows[split]]) < 0.02


def test_guess_rate_is_the_share_of_the_most_common_answer():
  assert guess_rate(['55', '60', '55', '7']) == 0.5


def test_written_sum_adds_the_terms_in_order():
  assert arithmetic.written_sum([48, 3, 9, 7]) == SOLUTION


@pytest.mark.parametrize(
  ('question', 'response'),
  [
    pytest.param(QUESTION, SOLUTION, id='as_written'),
    pytest.param(QUESTION + '\n', f'\n{SOLUTION}\n', id='white_space_around'),
    pytest.param(QUESTION, r'3+9=12 +48=60 +7=67 \boxed{67}', id='another_order'),
    pytest.param('4+4+1', r'4+1=5 +4=9 \boxed{9}', id='repeated_term'),
  ],
)
def test_steps_are_valid(question, response):
  assert arithmetic.valid_steps(question, response)


@pytest.mark.parametrize(
  ('question', 'response'),
  [
    pytest.param(QUESTION, r'48+3=52 +9=61 +7=68 \boxed{68}', id='false_addition'),
    pytest.param(QUESTION, r'48+3=51 51+9=60 +7=67 \boxed{67}', id='total_repeated'),
    pytest.param(QUESTION, r'48+3=51 +9=60 +7=68 \boxed{68}', id='false_later_addition'),
    pytest.param(QUESTION, r'48+3=51 +9=60 \boxed{60}', id='term_left_out'),
    pytest.param(QUESTION, r'48+3=51 +9=60 +7=67 +7=74 \boxed{74}', id='term_used_twice'),
    pytest.param(QUESTION, r'48+3=51 +8=59 +8=67 \boxed{67}', id='other_terms_same_sum'),
    pytest.param(QUESTION, r'48+3=51 +9=60 +7=67 \boxed{68}', id='wrong_number_in_the_box'),
    pytest.param(QUESTION, '48+3=51 +9=60 +7=67', id='no_box'),
    pytest.param(QUESTION, r'\boxed{67}', id='no_steps'),
    pytest.param(QUESTION, r'48+3=51 so +9=60 +7=67 \boxed{67}', id='text_between_steps'),
    pytest.param(QUESTION, r'048+3=51 +9=60 +7=67 \boxed{67}', id='leading_zero'),
    pytest.param(QUESTION, '48+٣=51 +9=60 +7=67 \\boxed{67}', id='digits_of_another_script'),
    pytest.param(QUESTION, rf'48+3=51 +9=60 +7=67 \boxed{{{"6" * 5000}}}', id='endless_number'),
    pytest.param(QUESTION, SOLUTION + ' ' + SOLUTION, id='solution_repeated'),
    pytest.param(QUESTION, r'+3=51 +9=60 +7=67 \boxed{67}', id='no_start'),
    pytest.param(QUESTION, '', id='empty'),
    pytest.param('What is 12 plus 7?', r'12+7=19 \boxed{19}', id='question_is_not_a_sum'),
  ],
)
def test_steps_are_invalid(question, response):
  assert not arithmetic.valid_steps(question, response)


def test_every_source_of_the_task_has_a_checker(rows):
  for source in {row['source'] for split in rows.values() for row in split}:
    assert catalogue.STEP_CHECKERS[source] is arithmetic.valid_steps
