"""Questions: every kind of source, every way it can be wrong, and the order of the stream."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from exgrpo_jax import questions, tasks
from exgrpo_jax.errors import InputError
from exgrpo_jax.types import Cursor, Message

REAL_DATA = pathlib.Path(__file__).parents[2] / 'shared' / 'data'
needs_real_data = pytest.mark.skipif(
  not REAL_DATA.is_dir(), reason=f'the real data sets are not in {REAL_DATA}')

LINES = [{'question': f'What is {i}+1?',
          'answer': f'{i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}'} for i in range(20)]


@pytest.fixture
def config(tmp_path):
  return questions.Config(train='', evaluation=(), question_field='', answer_field='',
                          solution_field='', overlong='refuse', cache_dir=str(tmp_path / 'cache'))


@pytest.fixture
def jsonl(tmp_path):
  def write(*lines, name='train.jsonl'):
    path = tmp_path / name
    path.write_text('\n'.join(
      line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)
  return write


VERL = {'data_source': 'math', 'prompt': [{'role': 'system', 'content': 'Think.'},
                                          {'role': 'user', 'content': 'What is 1+1?'}],
        'reward_model': {'ground_truth': '2', 'style': 'rule'}, 'extra_info': {'index': 0}}


@pytest.fixture
def parquet(tmp_path):
  def write(*rows):
    path = tmp_path / 'bench.parquet'
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)
  return write


@pytest.fixture(scope='module')
def few_sums():
  """The embedded task with 40 questions a split, so that tests need not wait for 30,000."""
  small = {name: split._replace(questions=40) for name, split in tasks.ARITHMETIC_SPLITS.items()}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tasks, 'ARITHMETIC_SPLITS', small)
    yield


class TinyQa(tfds.core.GeneratorBasedBuilder):
  """A dataset that TFDS knows by name: tiny_qa."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(builder=self, disable_shuffling=True,
                                 features=tfds.features.FeaturesDict({
      'question': tfds.features.Text(), 'answer': np.int64, 'hint': tfds.features.Text()}))

  def _split_generators(self, dl_manager):
    return {'validation': self._generate_examples()}

  def _generate_examples(self):
    for i in range(5):
      yield i, {'question': f'Was ist {i} größer?', 'answer': i, 'hint': 'x' if i else ''}


class BrokenQa(TinyQa):
  """A dataset that TFDS knows, and that it cannot prepare here."""

  def _generate_examples(self):
    raise ImportError('Failed to import TensorFlow.\nPlease install it.')


# ---- jsonl ----


def test_gsm8k_fields_by_default(config, jsonl):
  path = jsonl(*LINES)
  dataset = questions.load(config, path)
  assert len(dataset) == 20
  assert dataset[3] == questions.Question(
    row=3, messages=(Message('user', 'What is 3+1?'),), answer='4',
    solution='3+1 = 4.\n#### 4', source='train')
  assert [question.row for question in dataset] == list(range(20))


def test_fields_may_be_named(config, jsonl):
  config = dataclasses.replace(
    config, question_field='problem', answer_field='truth', solution_field='proof')
  dataset = questions.load(config, jsonl(
    {'problem': '1+1', 'truth': '2', 'proof': 'by counting', 'question': 'no', 'answer': 'no'},
    {'problem': '2+2', 'truth': 4.50, 'proof': None}, {'problem': '3+3', 'truth': 6}))
  assert [(q.answer, q.solution) for q in dataset] == [
    ('2', 'by counting'), ('4.5', ''), ('6', '')]
  assert dataset[0].messages == (Message('user', '1+1'),)


@pytest.mark.parametrize('answer, truth, solution', [
  pytest.param('72', '72', '', id='bare'),
  pytest.param('two\n#### 1,234', '1,234', 'two\n#### 1,234', id='commas_are_kept'),
  pytest.param('#### 1\n#### 2\n', '2', '#### 1\n#### 2\n', id='the_last_one_counts'),
  pytest.param('48/2 = $<<48/2=24>>24\n#### 24', '24', '48/2 = $24\n#### 24', id='calculator'),
  pytest.param('$\\frac{1}{2}$', '$\\frac{1}{2}$', '', id='latex'),
])
def test_answers_of_gsm8k(config, jsonl, answer, truth, solution):
  question = questions.load(config, jsonl({'question': 'q', 'answer': answer}))[0]
  assert (question.answer, question.solution) == (truth, solution)


def test_numbers_stay_as_they_are_written(config, jsonl):
  dataset = questions.load(config, jsonl('{"question": "q", "answer": 0.50}'))
  assert dataset[0].answer == '0.50'


def test_blank_lines_are_no_rows_but_count_as_lines(config, jsonl):
  assert len(questions.load(config, jsonl(LINES[0], '', '  ', LINES[1], ''))) == 2
  with pytest.raises(InputError, match=r'train.jsonl:3: not valid JSON'):
    questions.load(config, jsonl(LINES[0], '', '{'))


GOOD = {'question': 'q', 'answer': 'a'}


@pytest.mark.parametrize('line, message', [
  pytest.param('{"question": "q", "answ', r'train\.jsonl:2: not valid JSON', id='cut_off'),
  pytest.param('["q", "a"]', r"train\.jsonl:2: \['q', 'a'\] is not an object", id='no_object'),
  pytest.param({'question': 'q', 'solution': 'a'},
               r"train\.jsonl:2: no field 'answer' \(has: 'question', 'solution'\); "
               r'set config\.data\.answer_field\.', id='missing_answer'),
  pytest.param({'prompt': 'q', 'answer': 'a'},
               r"no field 'question' \(has: 'prompt', 'answer'\); set config\.data\.question_field",
               id='missing_question'),
  pytest.param({'question': 'q', 'answer': None}, "train.jsonl:2: field 'answer' is null; it must",
               id='null'),
  pytest.param({'question': 'q', 'answer': ['a']}, r"field 'answer' is \['a'\]; it must",
               id='list'),
  pytest.param({'question': 'q', 'answer': True}, "field 'answer' is True; it must", id='truth'),
  pytest.param({'question': ' ', 'answer': 'a'}, "field 'question' is ' '; it must", id='blank'),
  pytest.param({'question': 'q', 'answer': 'so\n#### \n'}, "nothing follows the last '#### '",
               id='nothing_behind_the_mark'),
  pytest.param('{"question": "\\ud800", "answer": "a"}', "field 'question' is not valid Unicode",
               id='half_a_character'),
])
def test_a_bad_line_is_named(config, jsonl, line, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(GOOD, line))


def test_a_line_that_is_not_utf8_is_named(config, tmp_path):
  (tmp_path / 'latin.jsonl').write_bytes('{"question": "é", "answer": "a"}'.encode('latin-1'))
  with pytest.raises(InputError, match='latin.jsonl:1: not valid JSON .*UTF-8'):
    questions.load(config, str(tmp_path / 'latin.jsonl'))


def test_an_ill_typed_solution_is_named(config, jsonl):
  config = dataclasses.replace(config, solution_field='proof')
  with pytest.raises(InputError, match=r"train.jsonl:1: field 'proof' is \['x'\]"):
    questions.load(config, jsonl({**GOOD, 'proof': ['x']}))


@pytest.mark.parametrize('content', ['', '\n\n'], ids=['empty', 'blank_lines'])
def test_an_empty_file_is_refused(config, jsonl, content):
  with pytest.raises(InputError, match='train.jsonl: the file holds no question'):
    questions.load(config, jsonl(content))


# ---- parquet ----


def test_verl_columns(config, parquet):
  dataset = questions.load(config, parquet(VERL, {**VERL, 'data_source': 'aime'}))
  assert dataset[1] == questions.Question(
    row=1, messages=(Message('system', 'Think.'), Message('user', 'What is 1+1?')), answer='2',
    solution='', source='aime')


def test_a_parquet_column_of_solutions(config, parquet):
  config = dataclasses.replace(config, solution_field='target')
  dataset = questions.load(config, parquet({**VERL, 'target': 'so 2'}, {**VERL, 'target': None}))
  assert [question.solution for question in dataset] == ['so 2', '']
  assert questions.load(config, parquet(VERL))[0].solution == ''


@pytest.mark.parametrize('column', ['data_source', 'prompt', 'reward_model'])
def test_a_missing_column_is_named_with_those_there_are(config, parquet, column):
  row = {name: value for name, value in VERL.items() if name != column}
  with pytest.raises(InputError, match=f"bench.parquet: no column '{column}' .has: .*'extra_info'"):
    questions.load(config, parquet(row))


@pytest.mark.parametrize('change, message', [
  pytest.param({'reward_model': {'ground_truth': None, 'style': 'rule'}},
               r"parquet: row 1: field 'reward_model.ground_truth' is null", id='null_truth'),
  pytest.param({'reward_model': None}, 'row 1: reward_model is None', id='null_reward_model'),
  pytest.param({'prompt': []}, r'row 1: prompt is \[\]; it must be a list of chat', id='no_turn'),
  pytest.param({'prompt': [{'role': 'tool', 'content': 'x'}]}, 'row 1: prompt is .*tool',
               id='unknown_role'),
  pytest.param({'prompt': [{'role': 'user', 'content': None}]}, "row 1: field 'content' is null",
               id='null_content'),
  pytest.param({'data_source': None}, "row 1: field 'data_source' is null", id='null_source'),
])
def test_a_bad_parquet_row_is_named(config, parquet, change, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, parquet(VERL, {**VERL, **change}))


def test_a_prompt_that_is_text_is_refused(config, parquet):
  with pytest.raises(InputError, match="row 0: prompt is 'What.*must be a list of chat messages"):
    questions.load(config, parquet({**VERL, 'prompt': 'What is 1+1?'}))


def test_a_reward_model_that_is_text_is_refused(config, parquet):
  with pytest.raises(InputError, match="row 0: reward_model is '2'; it must hold ground_truth"):
    questions.load(config, parquet({**VERL, 'reward_model': '2'}))


def test_a_parquet_without_rows_is_refused(config, tmp_path):
  pq.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / 'none.parquet')
  with pytest.raises(InputError, match='none.parquet: the file holds no question'):
    questions.load(config, str(tmp_path / 'none.parquet'))


def test_half_a_parquet_file_is_refused(config, parquet):
  path = pathlib.Path(parquet(VERL))
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(InputError, match='not a whole parquet file'):
    questions.load(config, str(path))


# ---- TFDS names, tasks, specs ----


def test_a_tfds_name(config):
  dataset = questions.load(config, 'tiny_qa:validation[1:3]')
  assert list(dataset) == [
    questions.Question(0, (Message('user', 'Was ist 1 größer?'),), '1', '', 'tiny_qa'),
    questions.Question(1, (Message('user', 'Was ist 2 größer?'),), '2', '', 'tiny_qa')]


def test_a_tfds_feature_that_is_not_there_is_named(config):
  config = dataclasses.replace(config, answer_field='label')
  with pytest.raises(InputError, match=r"tiny_qa:validation: no field 'label' \(has: 'question', "
                     r"'answer', 'hint'\); set config\.data\.answer_field"):
    questions.load(config, 'tiny_qa:validation')


def test_a_bad_tfds_row_is_named_when_it_is_read(config):
  config = dataclasses.replace(config, question_field='hint')
  with pytest.raises(InputError, match="tiny_qa:validation: row 0: field 'hint' is ''"):
    questions.load(config, 'tiny_qa:validation')[0]


def test_the_embedded_task(config, few_sums):
  dataset = questions.load(config, 'arithmetic:ood[10:15]')
  assert len(dataset) == 5
  expected = tasks.arithmetic_rows()['ood'][11]
  assert dataset[1] == questions.Question(
    row=1, messages=(Message('user', expected['messages'][0]['content']),),
    answer=expected['answer'], solution=expected['solution'], source='arithmetic_ood')


@pytest.mark.parametrize('spec, message', [
  pytest.param('arithmetic:dev', r"arithmetic has no split 'dev' \(has: train, validation, test, "
               r'ood\)', id='unknown_split_of_a_task'),
  pytest.param('tiny_qa:train', r"tiny_qa has no split 'train' \(has: validation\)",
               id='unknown_split_of_tfds'),
  pytest.param('no_such_data:train', "'no_such_data' is neither an embedded task .arithmetic. nor "
               'a dataset that TFDS finds', id='unknown_name'),
  pytest.param('no such name:train', "TFDS could not give 'no such name' as array_record .*failed",
               id='no_name_at_all'),
  pytest.param('broken_qa:validation', "could not give 'broken_qa' as array_record .ImportError: "
               r'Failed to import TensorFlow\.\); its builder', id='a_builder_that_fails'),
  pytest.param('arithmetic', "data spec 'arithmetic' must be an embedded task's split",
               id='no_split'),
  pytest.param('', "data spec '' must be", id='nothing'),
  pytest.param('data/train.csv', "data spec 'data/train.csv' must be .*jsonl or .*parquet",
               id='unknown_kind_of_file'),
  pytest.param('absent/x.jsonl', 'absent/x.jsonl: there is no such file', id='missing_file'),
  pytest.param('absent/x.parquet[:5]', 'absent/x.parquet: there is no such file',
               id='missing_file_with_a_slice'),
])
def test_what_names_no_data_is_refused(config, few_sums, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, spec)


@pytest.mark.parametrize('part, rows', [
  ('[:3]', range(3)), ('[15:]', range(15, 20)), ('[5:8]', range(5, 8)), ('[:10%]', range(2)),
  ('[-2:]', range(18, 20)), ('', range(20))])
def test_slices_are_those_of_tfds(config, jsonl, part, rows):
  dataset = questions.load(config, jsonl(*LINES) + part)
  assert [question.answer for question in dataset] == [str(row + 1) for row in rows]
  assert [question.row for question in dataset] == list(range(len(rows)))


@pytest.mark.parametrize('part, message', [
  ('[:21]', r'the slice \[:21\] must be .* within the 20 rows'), ('[]', r'the slice \[\] must be'),
  ('[x:]', 'must be as in TFDS'), ('[3]', 'must be as in TFDS'), ('[:200%]', 'must be as in TFDS'),
  ('[5:5]', 'holds none of the 20 rows'), ('[9:3]', 'holds none of the 20 rows'),
  ('[20:]', 'holds none of the 20 rows')])
def test_a_slice_that_cannot_be_is_refused(config, jsonl, part, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(*LINES) + part)


def test_rows_outside_a_dataset_are_an_index_error(config, jsonl):
  dataset = questions.load(config, jsonl(*LINES) + '[:4]')
  assert dataset[np.int64(3)].answer == '4'
  for row in (4, -1):
    with pytest.raises(IndexError, match=f'rows 0 to 3, not {row}'):
      dataset[row]


# ---- Preparing ----


def prepared(config):
  return sorted(pathlib.Path(config.cache_dir).glob('question_file/*/1.0.0'))


def test_a_file_is_prepared_once_and_anew_when_it_or_its_fields_change(config, jsonl):
  path = jsonl(*LINES)
  questions.load(config, path)
  first = prepared(config)
  written = first[0].stat().st_mtime_ns
  questions.load(config, path + '[:2]')
  assert prepared(config) == first and first[0].stat().st_mtime_ns == written
  assert questions.load(config, jsonl(GOOD))[0].answer == 'a'
  assert len(prepared(config)) == 2
  jsonl(GOOD, name='renamed.jsonl')
  assert questions.load(config, path.replace('train', 'renamed'))[0].source == 'renamed'
  swapped = dataclasses.replace(config, question_field='answer', answer_field='question')
  assert questions.load(swapped, path)[0].answer == 'q'
  assert len(prepared(config)) == 4


def test_an_error_or_a_kill_leaves_nothing_that_reads_as_prepared(config, jsonl):
  path = jsonl(*LINES)
  script = f"""
import os
from exgrpo_jax import questions
rows = questions._jsonl_rows
def killed(*args):
  for number, row in enumerate(rows(*args)):
    if number == 10:
      os._exit(9)
    yield row
questions._jsonl_rows = killed
questions.load(questions.{config!r}, {path!r})
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 9
  assert list(pathlib.Path(config.cache_dir).glob('question_file/*/incomplete.*'))
  assert not prepared(config)
  assert len(questions.load(config, path)) == 20
  with pytest.raises(InputError):
    questions.load(config, jsonl(*LINES, '{'))
  assert len(prepared(config)) == 1


def test_two_that_prepare_at_once_both_read_it_whole(config, jsonl, monkeypatch):
  path, found, both = jsonl(*LINES), [], threading.Barrier(2, timeout=30)
  rows = questions._jsonl_rows

  def slowly(*args):
    yield from rows(*args)
    both.wait()  # neither renames before the other has begun to write

  monkeypatch.setattr(questions, '_jsonl_rows', slowly)
  threads = [threading.Thread(target=lambda: found.append(len(questions.load(config, path))))
             for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [20, 20]
  assert len(prepared(config)) == 1


def test_tensorflow_is_not_imported(config, jsonl):
  path = jsonl(*LINES)
  script = f"""
import sys
from exgrpo_jax import questions
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


def test_prompts_of_just_the_limit_are_kept():
  assert questions.check_prompts('x', np.array([3, 5]), 5, 'refuse').tolist() == [0, 1]


def test_an_overlong_prompt_is_refused_with_all_that_is_needed_to_act():
  with pytest.raises(InputError, match=r'^arithmetic:train: the prompt of row 1 has 6 tokens, '
                     r"and 2 of 3 prompts exceed the limit of 5; .*config\.data\.overlong='drop'"):
    questions.check_prompts('arithmetic:train', np.array([3, 6, 7]), 5, 'refuse')


def test_overlong_prompts_are_dropped():
  assert questions.check_prompts('x', np.array([6, 5, 9, 1]), 5, 'drop').tolist() == [1, 3]


def test_everything_dropped_is_refused():
  with pytest.raises(InputError, match='all of its 2 prompts exceed the limit of 5 .*shortest'):
    questions.check_prompts('x', np.array([6, 7]), 5, 'drop')


# ---- The stream ----


def order(epoch, size=10, seed=7):
  return questions.permutation(seed, epoch, size).tolist()


def take(cursor, count, retired=(), taken=(), size=10, quorum=4):
  return questions.take(Cursor(*cursor), count, size, 7, dict(retired), taken, quorum)


def test_an_epoch_is_the_permutation_that_seed_and_epoch_give():
  assert order(3) == np.random.default_rng((7, 3)).permutation(10).tolist()
  assert sorted(order(3)) == list(range(10))
  assert order(3) != order(4)


def test_the_stream_reads_an_epoch_in_order():
  rows, cursor = take((0, 0), 4)
  assert (rows, cursor) == (order(0)[:4], Cursor(0, 4))
  assert take((0, 4), 4) == (order(0)[4:8], Cursor(0, 8))


def test_a_step_may_end_with_an_epoch_without_leaving_it():
  assert take((0, 6), 4) == (order(0)[6:], Cursor(0, 10))
  assert take((0, 10), 4)[1] == Cursor(1, 4)


def test_a_step_crosses_into_the_next_epoch_and_never_repeats_a_question():
  for seed in range(20):
    rows, cursor = questions.take(Cursor(0, 7), 8, 10, seed, {}, (), 8)
    assert len(set(rows)) == 8
    last = order(0, seed=seed)[7:]
    fresh = [row for row in order(1, seed=seed) if row not in last][:5]
    assert rows == last + fresh
    assert cursor == Cursor(1, order(1, seed=seed).index(fresh[-1]) + 1)


def test_replayed_questions_are_passed_over():
  first = order(0)
  rows, cursor = take((0, 0), 2, taken=[first[0], first[2]])
  assert (rows, cursor) == ([first[1], first[3]], Cursor(0, 4))


def test_a_retired_question_stays_in_its_own_epoch_and_is_out_of_the_next():
  row = order(0)[0]
  assert take((0, 0), 1, retired={row: 0})[0] == [row]
  place = order(1).index(row)
  rows, cursor = take((1, place), 1, retired={row: 0})
  assert (rows, cursor) == ([order(1)[place + 1]], Cursor(1, place + 2))


def test_a_question_retired_in_this_epoch_is_out_once_the_step_has_crossed():
  row = order(1)[0]
  assert take((0, 10), 1, retired={row: 0}) == ([order(1)[1]], Cursor(1, 2))
  assert take((0, 10), 1, retired={row: 1}) == ([row], Cursor(1, 1))


def test_retired_questions_return_when_too_few_others_are_left():
  retired = dict.fromkeys(range(6), 0)
  assert not questions.retired_return(1, 10, retired, quorum=4)  # 4 are left, 4 are needed
  assert sorted(take((1, 0), 4, retired)[0]) == [6, 7, 8, 9]
  retired[6] = 0
  assert questions.retired_return(1, 10, retired, quorum=4)
  assert take((1, 0), 4, retired) == (order(1)[:4], Cursor(1, 4))
  assert not questions.retired_return(0, 10, retired, quorum=4)  # they are in it still


def test_all_retired_and_all_replayed_still_deliver():
  everything = dict.fromkeys(range(4), 0)
  rows, _ = take((1, 0), 2, everything, taken=[0, 1], size=4)
  assert sorted(rows) == [2, 3]


def test_nothing_taken_leaves_the_cursor():
  assert take((2, 10), 0, taken=[0, 1, 2, 3]) == ([], Cursor(2, 10))


def test_reading_in_other_portions_reads_the_same():
  cursor, one_by_one = Cursor(0, 0), []
  for _ in range(10):
    rows, cursor = questions.take(cursor, 1, 10, 7, {}, (), 1)
    one_by_one += rows
  assert one_by_one == take((0, 0), 10, quorum=10)[0]


def test_fewer_questions_than_a_step_needs_are_refused():
  with pytest.raises(InputError, match='has 3 questions, and a step needs 4 different'):
    take((0, 0), 1, size=3)


def test_a_step_of_the_paper_is_read_from_46_000_rows_without_delay():
  retired = dict.fromkeys(range(45_800), 0)
  rows, _ = questions.take(Cursor(1, 0), 128, 46_000, 0, retired, (), 128)
  assert len(set(rows)) == 128 and min(rows) >= 45_800
