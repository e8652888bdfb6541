"""Questions that are asked again with another answer."""

import dataclasses

import pytest

from exgrpo_jax.data import questions
from exgrpo_jax.errors import InputError
from tests.helpers.paths import REAL_DATA

ROWS = [
  {'question': '1+1', 'answer': '2'},
  {'question': '2+2', 'answer': '4'},
  {'question': '1+1', 'answer': '3'},
]


def test_conflicting_answers_are_refused_with_both_lines_and_values(config, jsonl):
  with pytest.raises(
    InputError,
    match=r'2 rows have no answer that can be checked \(another answer to the same question '
    r"elsewhere: 2\), the first at train\.jsonl:1 \('2'\) and train\.jsonl:3 \('3'\); .*='drop'",
  ):
    questions.load(config, jsonl(*ROWS))
  dropping = dataclasses.replace(config, unverifiable='drop')
  (left,) = questions.load(dropping, jsonl(*ROWS))
  assert left.answer == '4'


def test_answers_conflict_across_the_files_of_a_data_set(config, jsonl, tmp_path):
  for number, row in enumerate(ROWS):
    jsonl(row, name=f'part-{number}.jsonl')
  with pytest.raises(InputError, match=r"part-0\.jsonl:1 \('2'\) and part-2\.jsonl:1 \('3'\)"):
    questions.load(config, f'{tmp_path}/part-*.jsonl')


def test_the_same_answer_may_be_given_again_also_in_other_words(config, jsonl):
  answers = ('1/2', '1/2', ' 1/2', '0.5', r'\frac{1}{2}')
  path = jsonl(*({'question': '1/4+1/4', 'answer': answer} for answer in answers))
  assert [question.answer for question in questions.load(config, path)] == list(answers)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f'the real datasets are not in {REAL_DATA}')
@pytest.mark.parametrize(('name', 'rows'), [('gsm8k_test.jsonl', 1319), ('gpqa.parquet', 198)])
def test_published_sets_have_no_conflict(config, name, rows):
  assert len(questions.load(config, str(REAL_DATA / name))) == rows
