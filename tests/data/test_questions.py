"""Data specs, slices, and the limit on the lengths of prompts."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.data import questions
from exgrpo_jax.data.tasks import catalogue, sums
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from tests.helpers.paths import REAL_DATA

LINES = [{'question': f'What is {i}+1?', 'answer': f'{i + 1}'} for i in range(20)]


@pytest.fixture(scope='module')
def few_sums():
  """Limits the embedded task to 40 questions per split; generating all 30,000 takes long."""
  small = {name: split._replace(questions=40) for name, split in sums.ARITHMETIC_SPLITS.items()}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sums, 'ARITHMETIC_SPLITS', small)
    yield


# ---- Specs and slices ----


@pytest.mark.usefixtures('few_sums')
def test_an_embedded_task_whose_steps_are_checked_against_the_question(config, jsonl):
  dataset = questions.load(config, 'arithmetic:ood[10:15]')
  assert len(dataset) == 5
  expected = sums.arithmetic_rows()['ood'][11]
  assert dataset[1] == questions.Question(
    row=1,
    messages=(Message('user', expected['messages'][0]['content']),),
    answer=expected['answer'],
    kind='math',
    solution=expected['solution'],
    source='arithmetic_ood',
  )
  check = catalogue.step_checker(dataset[0])
  assert check is not None and check(dataset[0].solution) and not check(dataset[1].solution)
  (other,) = questions.load(config, jsonl({'question': '1+1', 'answer': '2'}))
  assert catalogue.step_checker(other) is None


@pytest.mark.usefixtures('few_sums')
@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('arithmetic:dev', r"arithmetic has no split 'dev' \(has: train, validation, test, ood\)"),
    ('arithmetic', "data spec 'arithmetic' must be an embedded task's split"),
    ('', "data spec '' must be"),
    ('data/train.arrow', r"data spec 'data/train\.arrow' must be .*ends in \.jsonl, \.json, \.cs"),
    ('absent/x.jsonl', r'absent/x\.jsonl: there is no such file'),
    ('absent/x.parquet[:5]', r'absent/x\.parquet: there is no such file'),
  ],
)
def test_a_spec_that_names_no_data_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, spec)


def test_a_slice_is_numbered_anew_and_rows_out_of_range_raise_index_error(config, jsonl):
  dataset = questions.load(config, jsonl(*LINES) + '[15:]')
  assert [(q.row, q.answer) for q in dataset] == [(row, str(row + 16)) for row in range(5)]
  assert dataset[np.int64(3)].answer == '19'
  for row in (5, -1):
    with pytest.raises(IndexError, match=f'rows 0 to 4, not {row}'):
      dataset[row]


def test_many_rows_are_read_at_once(config, jsonl, monkeypatch):
  monkeypatch.setattr(questions, '_BATCH', 8)
  loaded = questions.load(config, jsonl(*LINES))
  one_by_one, read = [loaded[row] for row in range(20)], []

  def counted(rows):
    read.append(len(rows))
    return loaded.source.read(rows)

  source = dataclasses.replace(loaded.source, read=counted)
  dataset = questions.Dataset('x', source, loaded.rows)
  assert list(dataset) == one_by_one and read == [8, 8, 4]
  assert dataset[2:17] == one_by_one[2:17] and read == [8, 8, 4, 15]
  assert dataset[18:] == one_by_one[18:] and dataset[7:7] == []
  assert dataset.read([9, 3]) == [one_by_one[9], one_by_one[3]] and read[-1] == 2


def test_selected_questions_are_numbered_anew(config, jsonl):
  selected = questions.load(config, jsonl(*LINES)).select(np.array([3, 5, 11]))
  expected = [(0, '4'), (1, '6'), (2, '12')]
  assert [(question.row, question.answer) for question in selected] == expected
  assert selected.select(np.array([2]))[0].answer == '12' and selected[1:][1].row == 2


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f'the real datasets are not in {REAL_DATA}')
def test_real_data(config):
  dataset = questions.load(config, f'{REAL_DATA}/gsm8k_test.jsonl')
  assert (len(dataset), dataset[0].answer, dataset[0].source) == (1319, '18', 'gsm8k_test')
  assert dataset[0].solution.endswith('#### 18') and '<<' not in dataset[0].solution
  dataset = questions.load(config, f'{REAL_DATA}/math_benchmarks.parquet')
  assert (len(dataset), dataset[0].answer) == (6023, r'\left( 3, \frac{\pi}{2} \right)')
  assert [message.role for message in dataset[0].messages] == ['system', 'user']
  assert (dataset[0].source, dataset[6022].source) == ('math', 'aime25')


# ---- Prompts over the limit ----


@pytest.mark.parametrize(
  ('lengths', 'overlong', 'kept'),
  [([3, 5], 'refuse', [0, 1]), ([6, 5, 9, 1], 'drop', [1, 3])],
)
def test_prompts_of_up_to_the_limit_are_kept(lengths, overlong, kept):
  assert questions.check_prompts('x', np.array(lengths), 5, overlong).tolist() == kept


@pytest.mark.parametrize(
  ('overlong', 'lengths', 'message'),
  [
    ('refuse', [3, 6, 7], r'^x: the prompt of row 1 has 6 tokens, and 2 of 3 .* 5; .*overlong='),
    ('drop', [6, 7], r'no prompt is within the limit of 5 tokens .*shortest'),
  ],
)
def test_prompts_over_the_limit_are_refused(overlong, lengths, message):
  with pytest.raises(InputError, match=message):
    questions.check_prompts('x', np.array(lengths), 5, overlong)
