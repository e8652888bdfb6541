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
  assert slices.page(slices.read()) == slices.PAGE.read_text(encoding='utf-8'), (
    'docs/slices.md is out of date; run: python docs/slices.py'
  )


def test_a_row_has_all_configs_of_its_shape_and_a_dash_where_nothing_is_known(slices):
  made = slices.page([ROW, ROW | {'slice': 'v5e:4x4', 'seconds': ''}])
  first, second = [line for line in made.splitlines() if line.startswith('| qwen')]
  assert '| v5e:4x4 | 1,024 | 12.0 of 15.8 | decode | — | 15,000 |' in first
  assert second.startswith('| qwen2_5_math_7b, qwen2_5_7b_instruct | v5e:8x8 |')
  assert 'with libtpu 1.' in made
  assert 'qwen2_5_math_7b on v6e:4x8' in made and 'qwen2_5_math_7b on v5e:8x8' not in made


def test_rows_are_kept_as_they_are(slices, monkeypatch, tmp_path):
  monkeypatch.setattr(slices, 'FILE', tmp_path / 'slices.csv')
  monkeypatch.setattr(slices, 'PAGE', tmp_path / 'slices.md')
  slices.write([ROW])
  assert slices.read() == [ROW]
