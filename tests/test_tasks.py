"""The embedded tasks: splits that share nothing, solutions that the checker accepts."""

import collections

import pytest

from exgrpo_jax import tasks

QUESTION = '12+7+31+5'
SOLUTION = r'7+31=38 38+12=50 50+5=55 \boxed{55}'


@pytest.fixture(scope='module')
def rows():
  return tasks.arithmetic_rows()


def terms_of(row):
  return tuple(sorted(map(int, row['messages'][0]['content'].split('+'))))


def test_every_split_has_its_size_and_its_terms(rows):
  sizes = {name: len(split) for name, split in rows.items()}
  assert sizes == {'train': 24_000, 'validation': 2_000, 'test': 2_000, 'ood': 2_000}
  for name, split in rows.items():
    lengths = {len(terms_of(row)) for row in split}
    assert lengths == ({7, 8} if name == 'ood' else {4, 5, 6})
    assert {row['source'] for row in split} == {
      'arithmetic_ood' if name == 'ood' else 'arithmetic'}
  terms = [term for split in rows.values() for row in split for term in terms_of(row)]
  assert (min(terms), max(terms)) == (1, 49)


def test_no_multiset_of_terms_comes_twice_anywhere(rows):
  counts = collections.Counter(terms_of(row) for split in rows.values() for row in split)
  assert counts.most_common(1)[0][1] == 1


def test_the_questions_are_the_same_on_every_call(rows):
  assert tasks.arithmetic_rows() == rows


def test_written_solutions_are_valid_and_end_in_the_answer(rows):
  for split in rows.values():
    for row in split:
      question = row['messages'][0]['content']
      assert int(row['answer']) == sum(terms_of(row))
      assert tasks.valid_steps(question, row['solution']), row
      assert row['solution'].endswith(rf'\boxed{{{row["answer"]}}}')


def test_written_solutions_take_the_terms_in_another_order_than_the_question(rows):
  in_order = [tasks.written_sum(list(map(int, row['messages'][0]['content'].split('+'))))
              for row in rows['train']]
  same = sum(written == row['solution'] for written, row in zip(in_order, rows['train']))
  assert same / len(in_order) < .05  # of 4 to 6 terms a random order is theirs 1 in 24 to 720


@pytest.mark.parametrize('split', ['train', 'validation', 'test', 'ood'])
def test_a_constant_guess_earns_next_to_nothing(rows, split):
  assert tasks.guess_rate([row['answer'] for row in rows[split]]) < .02


def test_guess_rate_is_the_share_of_the_commonest_answer():
  assert tasks.guess_rate(['55', '60', '55', '7']) == .5


def test_written_sum_chains_the_terms_in_their_order():
  assert tasks.written_sum([7, 31, 12, 5]) == SOLUTION


@pytest.mark.parametrize('question, response', [
  pytest.param(QUESTION, SOLUTION, id='as_written'),
  pytest.param(QUESTION + '\n', f'\n{SOLUTION}\n', id='white_space_around'),
  pytest.param(QUESTION, r'12+7=19 19+31=50 50+5=55 \boxed{55}', id='another_order'),
  pytest.param('4+4+1', r'4+1=5 5+4=9 \boxed{9}', id='a_term_that_stands_twice'),
])
def test_steps_are_valid(question, response):
  assert tasks.valid_steps(question, response)


@pytest.mark.parametrize('question, response', [
  pytest.param(QUESTION, r'7+31=39 39+12=51 51+5=56 \boxed{56}', id='false_addition'),
  pytest.param(QUESTION, r'7+31=38 12+38=50 50+5=55 \boxed{55}', id='total_not_on_the_left'),
  pytest.param(QUESTION, r'7+31=38 40+12=52 52+5=57 \boxed{57}', id='broken_chain'),
  pytest.param(QUESTION, r'7+31=38 38+12=50 \boxed{50}', id='a_term_left_out'),
  pytest.param(QUESTION, r'7+31=38 38+12=50 50+5=55 55+5=60 \boxed{60}', id='a_term_used_twice'),
  pytest.param(QUESTION, r'7+31=38 38+17=55 55+0=55 \boxed{55}', id='other_terms_same_sum'),
  pytest.param(QUESTION, r'7+31=38 38+12=50 50+5=55 \boxed{56}', id='another_number_in_the_box'),
  pytest.param(QUESTION, '7+31=38 38+12=50 50+5=55', id='no_box'),
  pytest.param(QUESTION, r'\boxed{55}', id='no_steps'),
  pytest.param(QUESTION, r'7+31=38 so 38+12=50 50+5=55 \boxed{55}', id='words_between'),
  pytest.param(QUESTION, r'07+31=38 38+12=50 50+5=55 \boxed{55}', id='leading_zero'),
  pytest.param(QUESTION, '٧+31=38 38+12=50 50+5=55 \\boxed{55}', id='digits_of_another_script'),
  pytest.param(QUESTION, rf'7+31=38 38+12=50 50+5=55 \boxed{{{"5" * 5000}}}', id='endless_number'),
  pytest.param(QUESTION, SOLUTION + ' ' + SOLUTION, id='twice_over'),
  pytest.param(QUESTION, '', id='empty'),
  pytest.param('What is 12 plus 7?', r'12+7=19 \boxed{19}', id='the_question_is_no_sum'),
])
def test_steps_are_invalid(question, response):
  assert not tasks.valid_steps(question, response)


def test_every_source_of_the_task_has_its_checker(rows):
  sources = {row['source'] for split in rows.values() for row in split}
  assert sources == set(tasks.STEP_CHECKERS)
