"""Forms of data specs, their slices and their names."""

import re

import pytest

from exgrpo_jax.data import spec_names
from exgrpo_jax.errors import InputError


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
def test_a_name_is_made_of_file_and_folder_or_task_and_split_and_the_slice(spec, name):
  assert spec_names.spec_name(spec) == name


def test_arguments_are_told_apart_in_a_name_that_stays_short():
  names = [spec_names.spec_name(f"reasoning_gym:a(x=['{sign}'])*2+b(y=1)+c:test") for sign in '+-']
  assert names[0] != names[1]
  assert all(re.fullmatch('reasoning_gym_a_[0-9a-f]{6}_c_test', name) for name in names)


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
  assert spec_names.split(spec) == parts
  assert spec_names.named_columns(spec) == named
  assert '{' not in spec_names.spec_name(spec)


@pytest.mark.parametrize(
  'braces',
  ['{}', '{key}', '{answer=}', '{=key}', '{prompt=a}', '{answer=a,answer=b}', '{answer=a,}'],
)
def test_braces_that_name_no_columns_are_refused(braces):
  with pytest.raises(InputError, match=f'^x.jsonl{braces}: {braces} must name columns, as in'):
    spec_names.named_columns(f'x.jsonl{braces}')


def test_data_sets_that_would_overwrite_each_other_are_refused():
  with pytest.raises(InputError, match=r"'a/x.jsonl' and '/b/a/x.jsonl' would both .*'a_x'"):
    spec_names.check_distinct(['a/x.jsonl', 'a/y.jsonl', '/b/a/x.jsonl'], '--data')


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
    ('[12.5%:-50%]', range(2, 10)),  # 2.5 becomes the even number
    ('[10:50%]', range(2, 10)),  # both are percentages
  ],
)
def test_slices_have_tfds_semantics(slicing, rows):
  assert spec_names.rows(f'x.jsonl{slicing}', 20) == rows


@pytest.mark.parametrize(
  ('slicing', 'message'),
  [
    *((slicing, 'must follow TFDS syntax') for slicing in ('[]', '[:]', '[x:]', '[3]', '[:200%]')),
    ('[:21]', r'the slice \[:21\] must follow TFDS syntax, .* within the 20 rows'),
    *((slicing, 'selects none of the 20 rows') for slicing in ('[5:5]', '[9:3]', '[20:]')),
  ],
)
def test_an_invalid_slice_is_refused(slicing, message):
  with pytest.raises(InputError, match=message):
    spec_names.rows(f'x.jsonl{slicing}', 20)
