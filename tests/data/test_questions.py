"""Tests of data specs, the questions they load, and the prompt limit."""

import dataclasses
import re

import numpy as np
import pytest

from exgrpo_jax.data import prompt, questions, store, tokenizer
from exgrpo_jax.data.tasks import catalogue, sums
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from tests.helpers.paths import REAL_DATA

LINES = [{'question': f'What is {i}+1?', 'answer': f'{i + 1}'} for i in range(20)]


@pytest.fixture(scope='module')
def few_sums():
  """Limit the built-in task to 40 questions per split; generating all 30,000 takes long."""
  small = {name: split._replace(questions=40) for name, split in sums.ARITHMETIC_SPLITS.items()}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sums, 'ARITHMETIC_SPLITS', small)
    yield


# ---- Specs and slices ----


@pytest.mark.usefixtures('few_sums')
def test_an_embedded_task_is_loaded_with_its_step_checker(config, jsonl):
  dataset = questions.load(config, 'arithmetic:ood[10:15]')
  assert len(dataset) == 5
  expected = sums.arithmetic_rows()['ood'][11]
  assert dataset[1] == Question(
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
    ('arithmetic', r"data spec 'arithmetic' is not valid\. It must be a split of a built-in task"),
    ('', "data spec '' is not valid"),
    ('x.jsonl[:40', r"data spec 'x\.jsonl\[:40' is not valid"),
    ("('x.jsonl[:40]','y.jsonl')", 'is not valid'),
    ('tests', r"'tests' is not valid\. 'tests' is a folder: name its files, as in tests/\*\.jsonl"),
    ('data/train.arrow', r"spec 'data/train\.arrow' is not valid.*ends in \.jsonl, \.json, \.cs"),
    ('absent/x.jsonl', r'absent/x\.jsonl: there is no such file'),
    ('caf\udce9.jsonl', r"^'caf\\udce9\.jsonl': the name is not valid UTF-8\. Rename the file"),
    ('absent/x.parquet[:5]', r'absent/x\.parquet: there is no such file'),
  ],
)
def test_a_spec_that_names_no_data_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, spec)


def test_a_slice_is_renumbered_and_rows_out_of_range_raise_index_error(config, jsonl):
  dataset = questions.load(config, jsonl(*LINES) + '[15:]')
  assert [(q.row, q.answer) for q in dataset] == [(row, str(row + 16)) for row in range(5)]
  assert dataset[np.int64(3)].answer == '19'
  for row in (5, -1):
    with pytest.raises(IndexError, match=f'row {row} is not between 0 and 4'):
      dataset[row]


def test_rows_are_read_in_batches(config, jsonl, monkeypatch):
  monkeypatch.setattr(store, '_BATCH', 8)
  dataset, read = questions.load(config, jsonl(*LINES)), []
  one_by_one, whole = [dataset[row] for row in range(20)], store.Dataset.read

  def counted(self, rows):
    read.append(len(rows))
    return whole(self, rows)

  monkeypatch.setattr(store.Dataset, 'read', counted)
  assert list(dataset) == one_by_one and read == [8, 8, 4]
  assert dataset[2:17] == one_by_one[2:17] and read == [8, 8, 4, 15]
  assert dataset[18:] == one_by_one[18:] and dataset[7:7] == []
  assert dataset.read([9, 3]) == [one_by_one[9], one_by_one[3]] and read[-1] == 2


def test_selected_questions_are_renumbered(config, jsonl):
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
  ('lengths', 'overlong', 'kept'), [([3, 5], 'refuse', [0, 1]), ([6, 5, 9, 1], 'drop', [1, 3])]
)
def test_prompts_up_to_the_limit_are_kept(lengths, overlong, kept):
  assert questions.check_prompts('x', np.array(lengths), 5, overlong).tolist() == kept


@pytest.mark.parametrize(
  ('overlong', 'lengths', 'message'),
  [
    ('refuse', [3, 6, 7], r'^x: the prompt of row 1 is 6 tokens long, .*2 of 3 .* 5\. .*overlong='),
    ('drop', [6, 7], r'no prompt is within the limit of 5 tokens .*shortest'),
  ],
)
def test_prompts_over_the_limit_are_refused(overlong, lengths, message):
  with pytest.raises(InputError, match=message):
    questions.check_prompts('x', np.array(lengths), 5, overlong)


# ---- Comparison between hosts ----

SUMS = [{'question': f'{"1+" * n}1', 'answer': f'{n + 1}'} for n in range(6)]


@pytest.fixture
def compared(config, jsonl, tmp_path, monkeypatch):
  """A function that loads questions, using the named cache, and returns what hosts compare."""
  tokenizer.train(['1+1\n'] * 9, 300, tmp_path / 'tokenizer.model')
  opened, seen = tokenizer.load(tmp_path / 'tokenizer.model'), []
  monkeypatch.setattr(hosts, 'check_same', lambda *args: seen.append(args[2]()))

  def load(lines, cache, limit):
    own = dataclasses.replace(config, cache_dir=str(tmp_path / cache), on_overlong='drop')
    questions.load_set(
      own, jsonl(*lines), opened, prompt.PromptConfig(template='plain', system=''), limit
    )
    return seen.pop()

  return load


def test_hosts_compare_the_questions_they_read(compared):
  same = compared(SUMS, 'first', 9)
  assert compared(SUMS, 'first', 9) == same  # from the cached prompts
  assert compared(SUMS, 'second', 9) == same
  assert compared([{**SUMS[0], 'answer': '7'}, *SUMS[1:]], 'second', 9) != same
  assert compared(SUMS[::-1], 'second', 9) != same
  assert compared(SUMS, 'second', 5) != same


# ---- Parsing of specs, slices and names ----


@pytest.mark.parametrize(
  ('spec', 'name'),
  [
    ('aa/test.jsonl', 'aa_test'),
    ('/data/gsm8k/test.jsonl[:10%]', 'gsm8k_test_to_10pct'),
    ('./test.id.parquet', 'test.id'),
    ('arithmetic:test', 'arithmetic_test'),
    ('arithmetic:test[:64]', 'arithmetic_test_to_64'),
    ('arithmetic:test[64:]', 'arithmetic_test_from_64'),
    ('arithmetic:test[64:96]', 'arithmetic_test_64_to_96'),
    ('reasoning_gym:gcd+lcm:test', 'reasoning_gym_gcd_lcm_test'),
  ],
)
def test_specs_have_readable_names(spec, name):
  assert questions.spec_name(spec) == name


def test_arguments_are_hashed_in_names():
  names = [questions.spec_name(f"reasoning_gym:a(x=['{sign}'])*2+b(y=1)+c:test") for sign in '+-']
  assert names[0] != names[1]
  assert all(re.fullmatch('reasoning_gym_a_[0-9a-f]{6}_c_test', name) for name in names)


@pytest.mark.parametrize('word', ['chain_sum+', 'é'])
def test_long_names_are_shortened_but_stay_distinct(word):
  specs = [f'reasoning_gym:{word * 200}{task}:test[:5]' for task in ('gcd', 'lcm')]
  names = {questions.spec_name(spec) for spec in specs}
  assert len(names) == 2
  assert all(len(name.encode()) < 150 and name.endswith('_to_5') for name in names)


@pytest.mark.parametrize(
  ('spec', 'parts', 'named'),
  [
    ('x.jsonl', ('x.jsonl', ''), {}),
    ('x.jsonl[:5]', ('x.jsonl', '[:5]'), {}),
    ('x.jsonl{answer=key}', ('x.jsonl', ''), {'answer': 'key'}),
    (
      'x.csv{ question = a b, answer=c.d }[:5]',
      ('x.csv', '[:5]'),
      {'question': 'a b', 'answer': 'c.d'},
    ),
    ('o/n:main:train[:5]{solution=s}', ('o/n:main:train', '[:5]'), {'solution': 's'}),
  ],
)
def test_a_spec_may_name_its_columns(spec, parts, named):
  assert questions.split_spec(spec) == parts
  assert questions.spec_columns(spec) == named
  assert '{' not in questions.spec_name(spec)


@pytest.mark.parametrize(
  'braces',
  ['{}', '{key}', '{answer=}', '{=key}', '{prompt=a}', '{answer=a,answer=b}', '{answer=a,}'],
)
def test_braces_without_valid_columns_are_refused(braces):
  with pytest.raises(InputError, match=f'^x.jsonl{braces}: {braces} must map question, answer '):
    questions.spec_columns(f'x.jsonl{braces}')


def test_data_sets_that_would_overwrite_each_other_are_refused():
  with pytest.raises(InputError, match=r"'a/x.jsonl' and '/b/a/x.jsonl' would both .*'a_x'"):
    questions.check_distinct(['a/x.jsonl', 'a/y.jsonl', '/b/a/x.jsonl'], '--data')


@pytest.mark.parametrize(
  ('slicing', 'rows'),
  [
    ('', range(20)),
    ('[:3]', range(3)),
    ('[15:]', range(15, 20)),
    ('[5:8]', range(5, 8)),
    ('[-2:]', range(18, 20)),
    ('[:-2]', range(18)),
    ('[:10%]', range(2)),
    ('[12.5%:-50%]', range(2, 10)),  # 2.5 is rounded to the even number
    ('[:-1%]', range(20)),  # -0.2 is rounded to 0 rows from the end
    ('[10:50%]', range(2, 10)),  # both are percentages
  ],
)
def test_slices_have_tfds_semantics(slicing, rows):
  assert questions.spec_rows(f'x.jsonl{slicing}', 20) == rows


@pytest.mark.parametrize(
  ('slicing', 'message'),
  [
    *((slicing, 'must follow TFDS syntax') for slicing in ('[]', '[:]', '[x:]', '[3]', '[:200%]')),
    ('[:21]', r'the slice \[:21\] must follow TFDS syntax, .* within the 20 rows'),
    *((slicing, 'selects none of the 20 rows') for slicing in ('[5:5]', '[9:3]', '[20:]')),
    ('[-1%:]', 'selects none of the 20 rows'),
  ],
)
def test_an_invalid_slice_is_refused(slicing, message):
  with pytest.raises(InputError, match=message):
    questions.spec_rows(f'x.jsonl{slicing}', 20)
