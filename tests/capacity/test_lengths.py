"""The lengths for which a step's time is estimated."""

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.capacity import lengths
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records

MANY = 100_000


@pytest.mark.parametrize(
  ('spec', 'median', 'limit'),
  [
    ('lognormal:1000', 1000, 8192),
    ('lognormal:1000,4096', 1000, 4096),
    ('', 1024, 8192),  # an eighth of the limit
  ],
)
def test_lognormal_lengths_have_the_median_and_the_limit(spec, median, limit):
  drawn = lengths.draw(spec, MANY, 8192)
  assert np.median(drawn) == pytest.approx(median, rel=0.02)
  assert (drawn.min() >= 1, drawn.max()) == (True, limit)
  assert f'median {median:,}' in lengths.describe(spec, 8192)
  assert f'cut at {limit:,}' in lengths.describe(spec, 8192)


def test_the_99th_percentile_is_eight_medians():
  drawn = lengths.draw('lognormal:100', MANY, 8192)
  assert np.quantile(drawn, 0.99) == pytest.approx(800, rel=0.05)
  assert drawn.mean() == pytest.approx(149, rel=0.05)
  assert lengths.draw('lognormal:100', MANY, 8192).tolist() == drawn.tolist()


def test_the_lengths_of_a_run_are_those_that_it_generated(tmp_path):
  write_records(tmp_path, lengths=[7, 50, 9000, 3], is_replay=[False, False, False, True])
  drawn = lengths.draw(str(tmp_path), MANY, 8192)
  assert sorted(set(drawn)) == [7, 50, 8192]
  assert np.mean(drawn == 7) == pytest.approx(1 / 3, rel=0.05)
  assert str(tmp_path) in lengths.describe(str(tmp_path), 8192)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('lognormal', r'--lengths=lognormal must be lognormal:MEDIAN or lognormal:MEDIAN,LIMIT in tok'),
    ('lognormal:0', r'--lengths=lognormal:0 must be lognormal:MEDIAN'),
    ('lognormal:10,20,30', r'must be lognormal:MEDIAN'),
    ('lognormal:1e3', r'must be lognormal:MEDIAN'),
    ('lognormal:1000,9000', r'its limit must be at most config\.rollout\.max_response=8192'),
    ('nowhere', r'--lengths=nowhere has no folder records: it must be .* the workdir of a run'),
  ],
)
def test_other_lengths_are_refused(spec, message):
  with pytest.raises(InputError, match=message):
    lengths.draw(spec, 1, 8192)


def test_a_run_without_responses_is_refused(tmp_path):
  write_records(tmp_path, lengths=[3], is_replay=[True])
  with pytest.raises(InputError, match='the run has no recorded response yet'):
    lengths.draw(str(tmp_path), 1, 8192)


def write_records(workdir, **columns):
  """A file of responses with these columns; nothing or zeros in the others."""
  count = len(columns['is_replay'])
  columns['length'] = columns.pop('lengths')
  blank = {
    field.name: pa.nulls(count, field.type)
    if field.nullable
    else pa.array(['' if field.type == pa.string() else 0] * count).cast(field.type)
    for field in step_records.RESPONSES
  }
  values = blank | {name: pa.array(column) for name, column in columns.items()}
  table = pa.table(values).cast(step_records.RESPONSES)
  path = step_records.path_of(workdir, 'responses', 1)
  path.parent.mkdir()
  step_records.write_file(path, table)
