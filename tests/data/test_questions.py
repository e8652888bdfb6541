"""Tests of questions: data specs, their preparation, and the limit on prompt lengths."""

import dataclasses
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds

from exgrpo_jax.data import builders, questions, records
from exgrpo_jax.data.tasks import arithmetic, catalogue
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from tests.helpers.paths import REAL_DATA

needs_real_data = pytest.mark.skipif(
  not REAL_DATA.is_dir(), reason=f'the real datasets are not in {REAL_DATA}'
)

LINES = [
  {'question': f'What is {i}+1?', 'answer': f'{i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}'}
  for i in range(20)
]
GOOD = {'question': 'q', 'answer': 'a'}


@pytest.fixture(scope='module')
def few_sums():
  """Limits the embedded task to 40 questions per split; generating all 30,000 takes long."""
  small = {
    name: split._replace(questions=40) for name, split in arithmetic.ARITHMETIC_SPLITS.items()
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(arithmetic, 'ARITHMETIC_SPLITS', small)
    yield


class TinyQa(tfds.core.GeneratorBasedBuilder):
  """A dataset registered with TFDS under the name tiny_qa."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      disable_shuffling=True,
      features=tfds.features.FeaturesDict(
        {'question': tfds.features.Text(), 'answer': np.int64, 'hint': tfds.features.Text()}
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing to download
    return {'validation': self._generate_examples()}

  def _generate_examples(self):
    for i in range(5):
      yield i, {'question': f'Was ist {i} größer?', 'answer': i, 'hint': 'x' if i else ''}


class BrokenQa(TinyQa):
  """A dataset registered with TFDS that cannot be prepared."""

  def _generate_examples(self):
    raise ImportError('Failed to import TensorFlow.\nPlease install it.')


# ---- TFDS names, tasks, specs ----


def test_a_tfds_name(config):
  dataset = questions.load(config, 'tiny_qa:validation[1:3]')
  assert list(dataset) == [
    questions.Question(
      row=row,
      messages=(Message('user', f'Was ist {number} größer?'),),
      answer=str(number),
      kind='math',
      solution='',
      source='tiny_qa',
      columns={'question': f'Was ist {number} größer?', 'answer': number, 'hint': 'x'},
    )
    for row, number in enumerate([1, 2])
  ]


def test_error_names_a_missing_tfds_feature(config):
  config = dataclasses.replace(config, answer_field='label')
  with pytest.raises(
    InputError,
    match=r"tiny_qa:validation: no field 'label' \(has: 'question', "
    r"'answer', 'hint'\); set config\.data\.answer_field",
  ):
    questions.load(config, 'tiny_qa:validation')


def test_error_names_an_invalid_tfds_row_on_reading_it(config):
  config = dataclasses.replace(config, question_field='hint')
  with pytest.raises(InputError, match="tiny_qa:validation: row 0: field 'hint' is ''"):
    questions.load(config, 'tiny_qa:validation')[0]


@pytest.mark.usefixtures('few_sums')
def test_the_embedded_task(config):
  dataset = questions.load(config, 'arithmetic:ood[10:15]')
  assert len(dataset) == 5
  expected = arithmetic.arithmetic_rows()['ood'][11]
  assert dataset[1] == questions.Question(
    row=1,
    messages=(Message('user', expected['messages'][0]['content']),),
    answer=expected['answer'],
    kind='math',
    solution=expected['solution'],
    source='arithmetic_ood',
  )


@pytest.mark.usefixtures('few_sums')
def test_steps_are_checked_against_the_question_where_its_task_can(config, jsonl):
  first, second = questions.load(config, 'arithmetic:ood[:2]')
  check = catalogue.step_checker(first)
  assert check is not None and check(first.solution) and not check(second.solution)
  (other,) = questions.load(config, jsonl({'question': '1+1', 'answer': '2'}))
  assert catalogue.step_checker(other) is None


@pytest.mark.usefixtures('few_sums')
@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    pytest.param(
      'arithmetic:dev',
      r"arithmetic has no split 'dev' \(has: train, validation, test, "
      r'ood\)',
      id='unknown_split_of_a_task',
    ),
    pytest.param(
      'tiny_qa:train',
      r"tiny_qa has no split 'train' \(has: validation\)",
      id='unknown_split_of_tfds',
    ),
    pytest.param(
      'no_such_data:train',
      r"'no_such_data' is neither an embedded task \(arithmetic, chains\) nor a dataset that TFDS",
      id='unknown_name',
    ),
    pytest.param(
      'no such name:train',
      r"TFDS could not prepare 'no such name' as array_record \(.*failed",
      id='invalid_name',
    ),
    pytest.param(
      'broken_qa:validation',
      r"could not prepare 'broken_qa' as array_record \(ImportError: "
      r'Failed to import TensorFlow\.\)\. Its builder',
      id='failing_builder',
    ),
    pytest.param(
      'arithmetic', "data spec 'arithmetic' must be an embedded task's split", id='no_split'
    ),
    pytest.param('', "data spec '' must be", id='empty'),
    pytest.param(
      'data/train.arrow',
      r"data spec 'data/train\.arrow' must be .*a file that ends in \.jsonl, \.json, \.csv, ",
      id='unknown_kind_of_file',
    ),
    pytest.param('absent/x.jsonl', r'absent/x\.jsonl: there is no such file', id='missing_file'),
    pytest.param(
      'absent/x.parquet[:5]',
      r'absent/x\.parquet: there is no such file',
      id='missing_file_with_a_slice',
    ),
  ],
)
def test_a_spec_that_names_no_data_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, spec)


@pytest.mark.parametrize(
  ('slicing', 'rows'),
  [
    ('[:3]', range(3)),
    ('[15:]', range(15, 20)),
    ('[5:8]', range(5, 8)),
    ('[:10%]', range(2)),
    ('[-2:]', range(18, 20)),
    ('', range(20)),
  ],
)
def test_slices_have_tfds_semantics(config, jsonl, slicing, rows):
  dataset = questions.load(config, jsonl(*LINES) + slicing)
  assert [question.answer for question in dataset] == [str(row + 1) for row in rows]
  assert [question.row for question in dataset] == list(range(len(rows)))


@pytest.mark.parametrize(
  ('slicing', 'message'),
  [
    ('[:21]', r'the slice \[:21\] must follow TFDS syntax, .* within the 20 rows'),
    ('[]', r'the slice \[\] must follow TFDS syntax'),
    ('[x:]', 'must follow TFDS syntax'),
    ('[3]', 'must follow TFDS syntax'),
    ('[:200%]', 'must follow TFDS syntax'),
    ('[5:5]', 'selects none of the 20 rows'),
    ('[9:3]', 'selects none of the 20 rows'),
    ('[20:]', 'selects none of the 20 rows'),
  ],
)
def test_an_invalid_slice_is_refused(config, jsonl, slicing, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(*LINES) + slicing)


def test_rows_out_of_range_raise_index_error(config, jsonl):
  dataset = questions.load(config, jsonl(*LINES) + '[:4]')
  assert dataset[np.int64(3)].answer == '4'
  for row in (4, -1):
    with pytest.raises(IndexError, match=f'rows 0 to 3, not {row}'):
      dataset[row]


def test_many_rows_are_read_at_once(config, jsonl, monkeypatch):
  monkeypatch.setattr(questions, '_BATCH', 8)
  loaded = questions.load(config, jsonl(*LINES))
  one_by_one, read = [loaded[row] for row in range(20)], []

  def counted(rows):
    read.append(len(rows))
    return loaded.source.read(rows)

  dataset = questions.Dataset('x', dataclasses.replace(loaded.source, read=counted))
  assert list(dataset) == one_by_one and read == [8, 8, 4]
  assert dataset[2:17] == one_by_one[2:17] and read == [8, 8, 4, 15]
  assert dataset[18:] == one_by_one[18:] and dataset[7:7] == []
  assert dataset.read([9, 3]) == [one_by_one[9], one_by_one[3]] and read[-1] == 2


def test_selected_questions_are_numbered_anew(config, jsonl):
  selected = questions.load(config, jsonl(*LINES)).select(np.array([3, 5, 11]))
  expected = [(0, '4'), (1, '6'), (2, '12')]
  assert [(question.row, question.answer) for question in selected] == expected
  again = selected.select(np.array([2]))
  assert [(question.row, question.answer) for question in again] == [(0, '12')]
  assert selected[1].answer == '6' and selected[1:][1].row == 2


# ---- Preparing ----


def prepared_folders(config):
  return sorted(pathlib.Path(config.cache_dir).glob('question_file/*/1.3.0'))


def test_a_file_is_prepared_once_and_again_if_it_or_its_fields_change(config, jsonl):
  path = jsonl(*LINES)
  questions.load(config, path)
  first = prepared_folders(config)
  written = first[0].stat().st_mtime_ns
  questions.load(config, path + '[:2]')
  assert prepared_folders(config) == first and first[0].stat().st_mtime_ns == written
  assert questions.load(config, jsonl(GOOD))[0].answer == 'a'
  assert len(prepared_folders(config)) == 2
  jsonl(GOOD, name='renamed.jsonl')
  assert questions.load(config, path.replace('train', 'renamed'))[0].source == 'renamed'
  swapped = dataclasses.replace(config, question_field='answer', answer_field='question')
  assert questions.load(swapped, path)[0].answer == 'q'
  assert len(prepared_folders(config)) == 4


@pytest.mark.usefixtures('few_sums')
def test_nothing_is_left_in_the_temporary_folder(config, jsonl, tmp_path, monkeypatch):
  (tmp_path / 'temporary').mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  for spec in (jsonl(*LINES), 'tiny_qa:validation', 'arithmetic:ood'):
    questions.load(config, spec)
  assert not list((tmp_path / 'temporary').iterdir())


def test_neither_an_error_nor_a_kill_leaves_data_that_looks_prepared(config, jsonl):
  path = jsonl(*LINES)
  script = f"""
import os
from exgrpo_jax.data import questions, records
made = []
record = records.record
def killed_at_row_10(*args):
  made.append(args)
  return record(*args) if len(made) <= 30 else os._exit(9)
records.record = killed_at_row_10  # the first 20 calls look for conflicts
questions.load(questions.{config!r}, {path!r})
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 9
  assert list(pathlib.Path(config.cache_dir).glob('question_file/*/incomplete.*'))
  assert not prepared_folders(config)
  assert len(questions.load(config, path)) == 20
  with pytest.raises(InputError):
    questions.load(config, jsonl(*LINES, '{'))
  assert len(prepared_folders(config)) == 1


def test_two_threads_can_prepare_the_same_file_at_once(config, jsonl, monkeypatch):
  path, lengths, barrier = jsonl(*LINES), [], threading.Barrier(2, timeout=30)
  of_file = records.of_file

  def rows_then_wait(*args):
    layout, rows = of_file(*args)
    yield layout
    yield then_wait(rows)

  def then_wait(rows):
    yield from rows
    barrier.wait()  # neither thread renames its folder before the other has begun to write

  monkeypatch.setattr(records, 'of_file', rows_then_wait)
  threads = [
    threading.Thread(target=lambda: lengths.append(len(questions.load(config, path))))
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert lengths == [20, 20]
  assert len(prepared_folders(config)) == 1


@pytest.mark.parametrize('spec', ['train.jsonl', 'arithmetic:train'])
@pytest.mark.usefixtures('few_sums')
def test_a_cache_that_cannot_be_written_to_is_refused(config, jsonl, tmp_path, spec):
  path = jsonl(*LINES)
  (tmp_path / 'taken').touch()  # in place of a folder, for root may write anywhere
  config = dataclasses.replace(config, cache_dir=str(tmp_path / 'taken'))
  spec = path if spec == 'train.jsonl' else spec
  with pytest.raises(
    InputError,
    match=r'its questions cannot be stored in .*/taken/.*\(NotADirectoryError: .*'
    r'config\.data\.cache_dir must name a folder that can be written to, with space',
  ):
    questions.load(config, spec)


def test_a_full_disk_is_refused(config, jsonl):
  path = jsonl({'question': '1+' * 100_000, 'answer': '1'})
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    with pytest.raises(InputError, match=r'its questions cannot be stored in .*File too large'):
      questions.load(config, path)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert not prepared_folders(config)


def test_a_file_that_cannot_be_read_is_refused(config, tmp_path):
  (tmp_path / 'x.jsonl').symlink_to('/proc/self/mem')
  with pytest.raises(InputError, match=r'x\.jsonl: the file cannot be read \(Input/output error\)'):
    questions.load(config, f'{tmp_path}/x.jsonl')


def test_a_file_that_changes_while_it_is_read_is_refused(config, jsonl, monkeypatch):
  path, prepare = jsonl(*LINES), builders._prepare

  def changed_before(make):
    jsonl(*LINES, GOOD)
    return prepare(make)

  monkeypatch.setattr(builders, '_prepare', changed_before)
  with pytest.raises(InputError, match=r'train\.jsonl: the file changed while it was read; start'):
    questions.load(config, path)
  monkeypatch.undo()
  assert len(questions.load(config, path)) == 21


def test_tensorflow_is_not_imported(config, jsonl):
  path = jsonl(*LINES)
  script = f"""
import sys
from exgrpo_jax.data import questions
assert questions.load(questions.{config!r}, {path!r})[0].answer == '1'
assert 'tensorflow' not in sys.modules
"""
  subprocess.run([sys.executable, '-c', script], check=True)


# ---- Real data ----


@needs_real_data
def test_gsm8k(config):
  dataset = questions.load(config, f'{REAL_DATA}/gsm8k_test.jsonl')
  assert len(dataset) == 1319
  assert dataset[0].answer == '18'
  assert dataset[0].source == 'gsm8k_test'
  assert dataset[0].solution.endswith('#### 18') and '<<' not in dataset[0].solution


@needs_real_data
def test_the_benchmarks_of_the_paper(config):
  dataset = questions.load(config, f'{REAL_DATA}/math_benchmarks.parquet')
  assert len(dataset) == 6023
  assert dataset[0].answer == r'\left( 3, \frac{\pi}{2} \right)'
  assert [message.role for message in dataset[0].messages] == ['system', 'user']
  assert (dataset[0].source, dataset[6022].source) == ('math', 'aime25')


# ---- Prompts over the limit ----


def test_prompts_of_exactly_the_limit_are_kept():
  assert questions.check_prompts('x', np.array([3, 5]), 5, 'refuse').tolist() == [0, 1]


def test_the_error_for_an_overlong_prompt_says_how_to_fix_it():
  with pytest.raises(
    InputError,
    match=r'^arithmetic:train: the prompt of row 1 has 6 tokens, '
    r"and 2 of 3 prompts exceed the limit of 5; .*config\.data\.overlong='drop'",
  ):
    questions.check_prompts('arithmetic:train', np.array([3, 6, 7]), 5, 'refuse')


def test_overlong_prompts_are_dropped():
  assert questions.check_prompts('x', np.array([6, 5, 9, 1]), 5, 'drop').tolist() == [1, 3]


def test_dropping_every_prompt_is_refused():
  with pytest.raises(InputError, match=r'all of its 2 prompts exceed the limit of 5 .*shortest'):
    questions.check_prompts('x', np.array([6, 7]), 5, 'drop')
