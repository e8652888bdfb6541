"""The page of slices is made of the table beside it."""

import pytest

from tests.docs import documents

ROW = {
  'config': 'qwen2_5_math_7b',
  'slice': 'v5e:8x8',
  'slots': '1,024',
  'memory': '12.0 of 15.8',
  'program': 'decode',
  'seconds': '90',
  'tokens': '15,000',
  'hours': '160',
  'versions': 'libtpu 1',
}


@pytest.fixture(scope='module')
def slices():
  return documents.load('slices')


def test_the_page_checked_in_is_the_one_that_is_made(slices):
  made = slices.page(slices.read(), slices.read(slices.PARTS_FILE))
  assert made == slices.PAGE.read_text(encoding='utf-8'), (
    'docs/slices.md is out of date; run: python docs/slices.py'
  )


def test_a_row_has_all_configs_of_its_shape_and_a_dash_where_nothing_is_known(slices):
  made = slices.page([ROW, ROW | {'slice': 'v5e:4x4', 'seconds': ''}])
  first, second = [line for line in made.splitlines() if line.startswith('| qwen')]
  assert '| v5e:4x4 | 1,024 | 12.0 of 15.8 | decode | — | 15,000 |' in first
  assert second.startswith('| qwen2_5_math_7b, qwen2_5_7b_instruct | v5e:8x8 |')
  assert 'with libtpu 1.' in made
  assert 'qwen2_5_math_7b on v6e:4x8' in made and 'qwen2_5_math_7b on v5e:8x8' not in made


def parts_of(topology, decode):
  values = ('decode', decode), ('host', '1.00'), ('sum', '9.0')
  names = 'part', 'seconds'
  return [{'slice': topology} | dict(zip(names, row, strict=True)) for row in values]


def test_parts_of_a_step_have_a_column_for_each_slice_that_is_known(slices):
  parts = parts_of('v5e:8x8', '12.39') + parts_of('v6e:8x8', '5.00')
  lines = slices.page([ROW], parts).splitlines()
  assert '| part | v5e:8x8 | v6e:8x8 |' in lines
  assert '| decode | 12.39 | 5.00 |' in lines
  assert '| host | 1.00 | 1.00 |' in lines and '| sum | 9.0 | 9.0 |' in lines
  assert '| part |' not in slices.page([ROW])


def test_rows_are_kept_as_they_are(slices, monkeypatch, tmp_path):
  for name, suffix in (('FILE', '.csv'), ('PARTS_FILE', '_parts.csv'), ('PAGE', '.md')):
    monkeypatch.setattr(slices, name, tmp_path / f'slices{suffix}')
  assert slices.read() == []
  slices.write([ROW], parts_of('v5e:8x8', '12.39'))
  assert slices.read() == [ROW]
  assert slices.read(slices.PARTS_FILE) == parts_of('v5e:8x8', '12.39')
