"""The files of records/: read back as written, from this version and from older ones."""

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records
from tests.reporting.test_record_writer import recorded_tokens, rows_of, write

LATER = {  # columns that earlier versions did not write
  'responses': ('components', 'reason', 'ratio_variance'),
  'questions': ('text', 'answer'),
}


def test_what_is_written_is_read_back(tmp_path):
  write(tmp_path, 0, 2)
  responses, questions = step_records.read(tmp_path)
  of_step = rows_of(2)
  for name, table in (('responses', responses), ('questions', questions)):
    expected = pa.table(of_step[name], schema=step_records.SCHEMAS[name])
    assert table.slice(2).to_pylist() == expected.to_pylist()
  for row, expected in zip(recorded_tokens(tmp_path)[2:], zip(*of_step['tokens'].values())):
    for found, value in zip(row.values(), expected, strict=True):
      np.testing.assert_array_equal(found, value)


def test_without_a_file_there_are_no_rows(tmp_path):
  responses, questions = step_records.read(tmp_path)
  assert responses.num_rows == questions.num_rows == 0
  assert responses.schema == step_records.RESPONSES
  assert responses['entropy'].to_numpy().tolist() == []


def rewrite(workdir, name, change):
  """Writes the files of a table anew, changed."""
  for path in step_records.files(workdir, name):
    step_records.write_file(path, change(step_records.read_file(path, name)))


def test_a_run_of_an_earlier_version_is_read_and_resumed(tmp_path):
  write(tmp_path / 'new', 0, 6)
  write(tmp_path / 'old', 0, 6)
  for name, columns in LATER.items():
    rewrite(tmp_path / 'old', name, lambda table, gone=list(columns): table.drop_columns(gone))
  for path in step_records.files(tmp_path / 'old', 'tokens'):
    path.unlink()
  for name, columns in LATER.items():
    old, new = (getattr(step_records.read(tmp_path / run), name) for run in ('old', 'new'))
    assert old.schema == new.schema
    assert old.drop_columns(list(columns)).equals(new.drop_columns(list(columns)))
    assert [old[column].null_count for column in columns] == [old.num_rows] * len(columns)
  write(tmp_path / 'old', 6, 7)
  _, questions = step_records.read(tmp_path / 'old')
  assert questions['text'].is_valid().to_pylist() == [False] * 10 + [True, False] * 2
  assert {row['step'] for row in recorded_tokens(tmp_path / 'old')} == {6, 7}


@pytest.mark.parametrize(
  ('name', 'change'),
  [
    ('responses', lambda table: table.drop_columns(['reward'])),
    ('tokens', lambda table: table.drop_columns(['logp'])),
    ('questions', lambda table: table.append_column('mood', pa.array(['good'] * 2))),
  ],
  ids=['lacks_a_column', 'lacks_values', 'unknown_column'],
)
def test_a_file_that_no_version_wrote_is_refused(tmp_path, name, change):
  write(tmp_path, 0, 1)
  rewrite(tmp_path, name, change)
  with pytest.raises(InputError, match=f'cannot be read as {name} of a run'):
    step_records.read_file(step_records.files(tmp_path, name)[0], name)


def test_a_damaged_file_is_named(tmp_path):
  write(tmp_path, 0, 1)
  path = tmp_path / 'records' / 'questions_000001.parquet'
  path.write_bytes(path.read_bytes()[:50])
  for use in (step_records.read, lambda workdir: write(workdir, 2, 2)):
    with pytest.raises(InputError, match=r'questions_000001\.parquet cannot be read as questions'):
      use(tmp_path)
