"""Tests of the sums: disjoint splits, and solutions that the checker accepts."""

import collections

import pytest

from exgrpo_jax.data.tasks import catalogue, sums

QUESTION = '48+9+3+7'
SOLUTION = r'48+3=51 +9=60 +7=67 \boxed{67}'


@pytest.fixture(scope='module')
def rows():
  return sums.arithmetic_rows()


def terms(row):
  return list(map(int, row['messages'][0]['content'].split('+')))


def test_every_split_has_its_size_and_its_range_of_terms(rows):
  sizes = {name: len(split) for name, split in rows.items()}
  assert sizes == {'train': 24_000, 'validation': 2_000, 'test': 2_000, 'ood': 2_000}
  for name, split in rows.items():
    is_high = name == 'ood'
    assert {row['source'] for row in split} == {'arithmetic_ood' if is_high else 'arithmetic'}
    assert {len(terms(row)) - 1 for row in split} == ({5} if is_high else {3, 4, 5})
    assert all((min(terms(row)[1:]) >= 6) == is_high for row in split)
  asked = [terms(row) for split in rows.values() for row in split]
  assert {start for start, *_ in asked} == set(range(10, 100))
  assert {digit for _, *digits in asked for digit in digits} == set(range(1, 10))
  assert len({tuple(sorted(found)) for found in asked}) == len(asked)


@pytest.mark.full
def test_the_questions_are_the_same_on_every_call(rows):
  assert sums.arithmetic_rows() == rows


def test_worked_solutions_are_valid_and_end_in_the_answer(rows):
  for split in rows.values():
    for row in split:
      question = row['messages'][0]['content']
      assert int(row['answer']) == sum(terms(row))
      assert sums.valid_steps(question, row['solution']), row
      assert row['solution'].endswith(rf'\boxed{{{row["answer"]}}}')


def test_worked_solutions_shuffle_the_terms(rows):
  in_order = [sums.written_sum(terms(row)) for row in rows['train']]
  same = sum(written == row['solution'] for written, row in zip(in_order, rows['train']))
  # A shuffle of 3 to 5 digits keeps the order with a probability between 1/6 and 1/120.
  assert same / len(in_order) < 0.12


@pytest.mark.parametrize('split', ['train', 'validation', 'test', 'ood'])
def test_a_constant_guess_earns_almost_nothing(rows, split):
  ((_, most),) = collections.Counter(row['answer'] for row in rows[split]).most_common(1)
  assert most < 0.02 * len(rows[split])


@pytest.mark.parametrize(
  ('response', 'question'),
  [
    (sums.written_sum([48, 3, 9, 7]), QUESTION),
    (f'\n{SOLUTION}\n', QUESTION + '\n'),
    (r'3+9=12 +48=60 +7=67 \boxed{67}', QUESTION),
    (r'4+1=5 +4=9 \boxed{9}', '4+4+1'),
  ],
)
def test_steps_are_valid(question, response):
  assert sums.valid_steps(question, response)


@pytest.mark.parametrize(
  'response',
  [
    pytest.param(r'48+3=52 +9=61 +7=68 \boxed{68}', id='false_addition'),
    pytest.param(r'48+3=51 51+9=60 +7=67 \boxed{67}', id='total_repeated'),
    pytest.param(r'48+3=51 +9=60 \boxed{60}', id='term_left_out'),
    pytest.param(r'48+3=51 +9=60 +7=67 +7=74 \boxed{74}', id='term_used_twice'),
    pytest.param(r'48+3=51 +8=59 +8=67 \boxed{67}', id='other_terms_same_sum'),
    pytest.param(r'48+3=51 +9=60 +7=67 \boxed{68}', id='wrong_number_in_the_box'),
    pytest.param('48+3=51 +9=60 +7=67', id='no_box'),
    pytest.param(r'\boxed{67}', id='no_steps'),
    pytest.param(r'48+3=51 so +9=60 +7=67 \boxed{67}', id='text_between_steps'),
    pytest.param(r'048+3=51 +9=60 +7=67 \boxed{67}', id='leading_zero'),
    pytest.param('48+٣=51 +9=60 +7=67 \\boxed{67}', id='digits_of_another_script'),
    pytest.param(rf'48+3=51 +9=60 +7=67 \boxed{{{"6" * 5000}}}', id='endless_number'),
    pytest.param(SOLUTION + ' ' + SOLUTION, id='solution_repeated'),
    pytest.param(r'+3=51 +9=60 +7=67 \boxed{67}', id='no_start'),
    pytest.param('', id='empty'),
  ],
)
def test_steps_are_invalid(response):
  assert not sums.valid_steps(QUESTION, response)


def test_questions_that_are_not_sums_have_no_valid_steps():
  assert not sums.valid_steps('What is 12 plus 7?', r'12+7=19 \boxed{19}')


def test_every_source_of_the_task_has_a_checker(rows):
  for source in {row['source'] for split in rows.values() for row in split}:
    assert catalogue.STEP_CHECKERS[source] is sums.valid_steps
