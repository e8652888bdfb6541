"""Names of data specs."""

import pytest

from exgrpo_jax.data import spec_names
from exgrpo_jax.errors import InputError


@pytest.mark.parametrize(
  ('spec', 'name'),
  [
    ('aa/test.jsonl', 'aa_test'),
    ('bb/test.jsonl', 'bb_test'),
    ('/data/gsm8k/test.jsonl[:10%]', 'gsm8k_test_to_10pct'),
    ('./test.id.parquet', 'test.id'),
    ('arithmetic:test', 'arithmetic_test'),
    ('arithmetic:test[:64]', 'arithmetic_test_to_64'),
    ('arithmetic:test[64:]', 'arithmetic_test_from_64'),
    ('arithmetic:test[64:96]', 'arithmetic_test_64_to_96'),
  ],
)
def test_a_name_is_made_of_file_and_folder_or_task_and_split_and_the_slice(spec, name):
  assert spec_names.spec_name(spec) == name


def test_data_sets_that_would_overwrite_each_other_are_refused():
  with pytest.raises(InputError, match=r"'a/x.jsonl' and '/b/a/x.jsonl' would both .*'a_x'"):
    spec_names.check_distinct(['a/x.jsonl', 'a/y.jsonl', '/b/a/x.jsonl'], '--data')
