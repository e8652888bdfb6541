"""The spread of correctness and the styles of an evaluation: counted by hand here."""

import pytest

from exgrpo_jax import styles
from exgrpo_jax.errors import InputError


def record(correct, **fields):
  return {'correct': correct, 'entropies': [0.1] * len(correct), **fields}


@pytest.fixture
def printed(jsonl, capsys):
  """What the command prints of some records, cells apart by one space."""

  def run(*records):
    styles.main(None, jsonl(*records))  # pyright: ignore[reportArgumentType]
    _, *lines = capsys.readouterr().out.splitlines()
    return [' '.join(line.split()) for line in lines]

  return run


def test_questions_are_counted_by_their_right_responses(printed):
  assert printed(record([True, False]), record([False, True]), record([False, False])) == [
    '3 questions, 2 responses to each',
    'right questions share',
    '0 1 0.333',
    '1 2 0.667',
    '2 0 0.000',
  ]


def test_each_style_has_its_share_and_how_often_it_is_right(printed):
  first = record([True, True, False], styles=['written', 'guess', 'guess'])
  second = record([True, False, False], styles=['written', 'written', 'guess'])
  lines = printed(first | {'entropies': [0.1, 0.8, 0.9]}, second | {'entropies': [0.3, 0.4, 1.0]})
  # Entropies have an interval and a count; of a single response nothing is said.
  assert lines[6:] == [
    'style share right entropy of right of wrong',
    'guess 0.500 0.333 0.900 ± 0.113 (3) - 0.950 ± 0.098 (2)',
    'written 0.500 0.667 0.267 ± 0.173 (3) 0.200 ± 0.196 (2) -',
  ]


def test_entropies_are_apart_by_validity_and_by_the_questions_right_responses(printed):
  rows = [
    record([True, True, True], valid_steps=[True, True, False]) | {'entropies': [0.1, 0.3, 0.7]},
    record([True, False, False], valid_steps=[False] * 3) | {'entropies': [0.5, 0.8, 1.0]},
  ]
  lines = printed(*rows)
  assert lines[6:] == [
    'right right, valid steps right, invalid steps wrong',
    '0 - - -',
    '1 - - 0.900 ± 0.196 (2)',
    '2 - - -',
    '3 0.200 ± 0.196 (2) - -',
    'all 0.200 ± 0.196 (2) 0.600 ± 0.196 (2) 0.900 ± 0.196 (2)',
  ]


def test_the_records_of_a_run_can_be_read(recorded):
  first, *_ = sorted((recorded.workdir / 'evaluation').glob('step_*.jsonl'))
  responses = styles.read(str(first))
  assert responses.correct_QK.shape == responses.entropy_QK.shape == (4, 1)
  assert responses.valid_QK is None and responses.style_QK is None
  assert (responses.entropy_QK > 0).all()


@pytest.mark.parametrize(
  ('lines', 'problem'),
  [
    pytest.param(['no JSON'], 'cannot be read as the records', id='no_json'),
    pytest.param([{'correct': [True]}], "has no 'entropies'", id='of_another_kind'),
    pytest.param([], "has no 'correct' and no 'entropies'", id='empty'),
    pytest.param([record([True]), {}], "cannot be read .*'correct'", id='a_line_without'),
    pytest.param([record([True]), record([True, True])], 'cannot be read', id='unequal'),
    pytest.param([record([])], 'a list in each line', id='no_responses'),
    pytest.param(
      [record([True]) | {'correct': ['yes']}], "'correct' must be true or false", id='text'
    ),
    pytest.param(
      [record([True]) | {'entropies': [1.0, 2.0]}], 'a value for each response', id='too_many'
    ),
  ],
)
def test_what_is_no_evaluation_is_refused(jsonl, lines, problem):
  with pytest.raises(InputError, match=problem):
    styles.read(jsonl(*lines))
