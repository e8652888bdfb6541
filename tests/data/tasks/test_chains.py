"""Tests of the chains: rows by an independent computation, the mixture of styles, the checker."""

import collections
import math
import re

import pytest

from exgrpo_jax.data.tasks import catalogue, chains

QUESTION = '48+3-9+7'
WRITTEN = r'48+3=51 -9=42 +7=49 \boxed{49}'
SKIPPED = r'48+3-9=42 +7=49 \boxed{49}'


@pytest.fixture(scope='module')
def rows():
  return chains.chain_rows()


def question(row):
  return row['messages'][0]['content']


def terms(text):
  """'48+3-9' -> [3, -9]."""
  return [int(term) for term in re.findall(r'[+-]\d+', text)]


def totals(text):
  """'48+3-9' -> [48, 51, 42]: the start and the running totals."""
  reached = [int(re.split(r'[+-]', text)[0])]
  for term in terms(text):
    reached.append(reached[-1] + term)
  return reached


def is_right(row):
  return row['solution'].endswith(rf'\boxed{{{row["answer"]}}}')


@pytest.fixture(scope='module')
def styles(rows):
  """(terms, style) -> whether each solution of the split 'pretraining' is right."""
  found = collections.defaultdict(list)
  for row in rows['pretraining']:
    text = question(row)
    found[len(terms(text)), chains.style(text, row['solution'])].append(is_right(row))
  return found


@pytest.mark.full
def test_answers_are_right_and_all_totals_have_two_digits(rows):
  for row in (row for split in rows.values() for row in split):
    reached = totals(question(row))
    assert int(row['answer']) == reached[-1] == eval(question(row))
    assert min(reached) >= 10 and max(reached) <= 99
    digits = [abs(term) for term in terms(question(row))]
    assert len(set(digits)) == len(digits) and set(digits) <= set(range(1, 10))


def test_every_split_has_its_size_lengths_and_operators(rows):
  wanted = {  # questions, numbers of terms
    'pretraining': (20_000, range(3, 10)),
    'train': (4_000, range(3, 8)),
    'validation': (1_000, range(3, 8)),
    'test': (1_000, range(3, 8)),
    'ood': (1_000, range(4, 8)),
  }
  for terms_of in (6, 7, 8, 9):
    wanted[f'train_{terms_of}'] = (2_000, range(terms_of, terms_of + 1))
    wanted[f'test_{terms_of}'] = (500, range(terms_of, terms_of + 1))
  assert {name: len(split) for name, split in rows.items()} == {
    name: size for name, (size, _) in wanted.items()
  }
  for name, split in rows.items():
    lengths = collections.Counter(len(terms(question(row))) for row in split)
    assert set(lengths) == set(wanted[name][1])
    assert min(lengths.values()) > 0.75 * len(split) / len(lengths)
    for row in split:
      assert (len(set(re.findall(r'[+-]', question(row)))) == 1) == (name == 'ood')


def test_no_two_questions_have_the_same_start_and_terms(rows):
  found = collections.Counter(
    (totals(question(row))[0], *sorted(terms(question(row))))
    for split in rows.values()
    for row in split
  )
  assert found.most_common(1)[0][1] == 1


def test_the_rows_are_the_same_on_every_call(rows, monkeypatch):
  few = {name: split._replace(questions=5) for name, split in chains.SPLITS.items()}
  monkeypatch.setattr(chains, 'SPLITS', few)
  assert chains.chain_rows()['pretraining'] == rows['pretraining'][:5]


@pytest.mark.parametrize('split', chains.SPLITS)
def test_a_constant_guess_earns_almost_nothing(rows, split):
  """90 answers are equally frequent. By chance, the most common has about 12 of 500 questions."""
  ((_, most),) = collections.Counter(row['answer'] for row in rows[split]).most_common(1)
  assert most < 0.03 * len(rows[split])


def test_the_longer_the_chain_the_fewer_solutions_are_written_out(styles):
  """Shares of at least 2,500 rows, with a standard error of at most 0.01."""
  for count, written in zip(range(3, 10), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)):
    of = {style: len(styles[count, style]) for style in chains.STYLES}
    assert of['other'] == 0
    assert of['written'] / sum(of.values()) == pytest.approx(written, abs=0.03)
  skipped, guess = (
    sum(len(rights) for (_, style), rights in styles.items() if style == wanted)
    for wanted in ('skipped', 'guess')
  )
  assert skipped / (skipped + guess) == pytest.approx(0.6, abs=0.02)


def test_styles_are_as_reliable_as_documented(styles):
  """A solution is right if no step slips, and sometimes if slips cancel each other out.

  At most a tenth of two-slip solutions cancel, because each slip is one of 20 numbers.
  """
  written_rates = (0.02, 0.02, 0.02, 0.05, 0.2, 0.4, 0.5, 0.5, 0.5)
  for count in range(3, 10):
    for style, no_slip in (
      ('written', math.prod(1 - rate for rate in written_rates[:count])),
      ('skipped', 0.7 ** (count // 2)),
    ):
      rights = styles[count, style]
      error = (no_slip * (1 - no_slip) / len(rights)) ** 0.5
      assert -3 * error < sum(rights) / len(rights) - no_slip < 0.1 * (1 - no_slip) + 3 * error
  guesses = [right for (_, style), rights in styles.items() if style == 'guess' for right in rights]
  assert sum(guesses) / len(guesses) == pytest.approx(0.03, abs=0.01)


def test_wrong_guesses_are_near_the_truth(rows):
  """A guess is at most 12 away, and a negative guess loses its sign."""
  errors = set()
  for row in rows['pretraining']:
    if chains.style(question(row), row['solution']) == 'guess':
      errors.add(int(row['solution'][len(r'\boxed{') : -1]) - int(row['answer']))
  assert errors == set(range(-12, 13))


@pytest.mark.full
def test_right_written_solutions_have_valid_steps_unless_slips_cancel(rows):
  found = collections.Counter()
  for row in rows['pretraining']:
    text, solution = question(row), row['solution']
    written = chains.style(text, solution) == 'written'
    found[written, is_right(row), chains.valid_steps(text, solution)] += 1
  assert found[True, False, True] == found[False, True, True] == found[False, False, True] == 0
  assert found[True, True, False] < 0.1 * found[True, True, True]


@pytest.mark.parametrize(
  ('response', 'style', 'valid'),
  [
    pytest.param(WRITTEN, 'written', True, id='written'),
    pytest.param(f'\n{WRITTEN}\n', 'written', True, id='white_space_around'),
    pytest.param(SKIPPED, 'skipped', False, id='skipped_and_right'),
    pytest.param(r'48+3-9=41 +7=48 \boxed{48}', 'skipped', False, id='skipped_and_wrong'),
    pytest.param(r'48+3-9+7=49 \boxed{49}', 'skipped', False, id='all_in_one_step'),
    pytest.param(r'\boxed{49}', 'guess', False, id='lucky_guess'),
    pytest.param(r'\boxed{47}', 'guess', False, id='guess'),
    pytest.param(r'48+3=52 -9=43 +7=50 \boxed{50}', 'written', False, id='false_step'),
    pytest.param(r'48+3=52 -9=42 +7=49 \boxed{49}', 'written', False, id='two_errors_that_cancel'),
    pytest.param(r'48+3=51 -9=42 +7=49 \boxed{50}', 'written', False, id='other_box'),
    pytest.param(r'48+3=51 -9=42 +7=49', 'other', False, id='no_box'),
    pytest.param(r'48+3=51 -9=42 \boxed{42}', 'other', False, id='term_left_out'),
    pytest.param(r'48+3=51 -9=42 +7=49 +7=56 \boxed{56}', 'other', False, id='term_used_twice'),
    pytest.param(r'48-9=39 +3=42 +7=49 \boxed{49}', 'other', False, id='another_order'),
    pytest.param(r'49+3=52 -9=43 +7=50 \boxed{50}', 'other', False, id='another_start'),
    pytest.param(r'+3=51 -9=42 +7=49 \boxed{49}', 'other', False, id='no_start'),
    pytest.param(r'48+3=51 51-9=42 +7=49 \boxed{49}', 'other', False, id='total_repeated'),
    pytest.param(r'48+3=51 so -9=42 +7=49 \boxed{49}', 'other', False, id='text_between_steps'),
    pytest.param(r'48+03=51 -9=42 +7=49 \boxed{49}', 'other', False, id='leading_zero'),
    pytest.param('48+٣=51 -9=42 +7=49 \\boxed{49}', 'other', False, id='digits_of_another_script'),
    pytest.param(rf'\boxed{{{"6" * 5000}}}', 'other', False, id='endless_number'),
    pytest.param(f'{WRITTEN} {WRITTEN}', 'other', False, id='solution_repeated'),
    pytest.param('', 'other', False, id='empty'),
  ],
)
def test_a_response_has_a_style_by_its_form_and_valid_steps_by_its_numbers(response, style, valid):
  assert chains.style(QUESTION, response) == style
  assert chains.valid_steps(QUESTION, response) == valid


def test_questions_that_are_not_chains_have_no_valid_steps():
  assert chains.style('What is 12 plus 7?', WRITTEN) == 'other'
  assert not chains.valid_steps('What is 12 plus 7?', WRITTEN)


def test_every_source_of_the_task_has_a_checker_and_styles(rows):
  for source in {row['source'] for split in rows.values() for row in split}:
    assert catalogue.STEP_CHECKERS[source] is chains.valid_steps
    assert catalogue.STYLES[source] is chains.style
