"""What the page says of the replay buffer, counted again from the records."""

import collections

import numpy as np
import pytest

from exgrpo_jax.reporting import runs
from exgrpo_jax.reporting.page import experience


@pytest.fixture(scope='module')
def run(recorded):
  (group,) = runs.read([str(recorded.workdir)])
  return group.runs[0]


@pytest.fixture(scope='module')
def panels(run):
  """Title -> panel."""
  return {panel['title']: panel for panel in experience.describe(run)['panels']}


def test_flows_of_the_buffer_are_those_of_the_records(run, panels):
  flows = collections.defaultdict(collections.Counter)
  for row in run.questions.to_pylist():
    before, after = row['bucket_before'], row['bucket_after']
    flows['entered'][row['step']] += before is None and after is not None
    flows['moved to another bucket'][row['step']] += None not in (before, after) and before != after
    flows['retired'][row['step']] += row['retired_step'] is not None
    flows['replayed'][row['step']] += row['is_replay']
  lines = panels['Into the buffer, within it and out of it']['lines']
  assert {line['label'] for line in lines} == set(flows)
  for line in lines:
    assert dict(zip(line['steps'], line['values'])) == flows[line['label']]
    assert sum(line['values']) > 0


def test_ratios_and_sample_sizes_by_age_are_those_of_the_records(run, panels):
  sums = collections.defaultdict(lambda: np.zeros(3))  # of tokens, ratios and their squares
  for row in run.responses.to_pylist():
    if row['is_replay']:
      tokens, mean = row['length'], row['ratio_mean']
      squares = row['ratio_variance'] + mean**2
      sums[row['step'] - row['policy_step']] += tokens * np.array([1, mean, squares])
  assert len(sums) > 3
  ratios, _ = panels['Importance ratio by age']['lines']
  (sizes,) = panels['Effective sample size by age']['lines']
  for age, ratio, size in zip(ratios['steps'], ratios['values'], sizes['values'], strict=True):
    tokens, total, squares = sums[age]
    assert ratio == pytest.approx(total / tokens, rel=1e-5)
    assert size == pytest.approx(total**2 / (tokens * squares), rel=1e-5)


def test_the_questions_replayed_most_often_are_counted(run):
  replays = [row['question'] for row in run.responses.to_pylist() if row['is_replay']]
  table = experience.describe(run)['replayed']
  found = {row['question']: row['replays'] for row in table}
  assert found == collections.Counter(replays)
  assert [row['replays'] for row in table] == sorted(found.values(), reverse=True)
