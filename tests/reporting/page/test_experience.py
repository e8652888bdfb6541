"""The page's description of a run's experience, recounted from the records."""

import collections
import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting import runs
from exgrpo_jax.reporting.page import experience
from exgrpo_jax.reporting.page.experience import Group, Size
from exgrpo_jax.reporting.runs import Recorded
from tests.helpers import tiny

# ---- The buffer ----


@pytest.fixture(scope='module')
def run(recorded):
  (group,) = runs.read([str(recorded.workdir)])
  return group.runs[0]


@pytest.fixture(scope='module')
def panels(run):
  """Title -> panel."""
  return {panel['title']: panel for panel in experience.describe(run)['panels']}


def test_flows_of_the_buffer_match_the_records(run, panels):
  flows = collections.defaultdict(collections.Counter)
  for row in run.questions.to_pylist():
    before, after = row['bucket_before'], row['bucket_after']
    flows['entered'][row['step']] += before is None and after is not None
    flows['moved to another bucket'][row['step']] += None not in (before, after) and before != after
    flows['retired'][row['step']] += row['retired_step'] is not None
    flows['replayed'][row['step']] += row['is_replay']
  lines = panels['Questions entering and leaving']['lines']
  assert {line['label'] for line in lines} == set(flows)
  for line in lines:
    assert dict(zip(line['steps'], line['values'])) == flows[line['label']]
    assert sum(line['values']) > 0


def test_ratios_and_sample_sizes_by_age_match_the_records(run, panels):
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


# ---- Visits and responses ----


def test_each_visit_has_its_own_responses(run):
  columns = experience.describe_visits(run, math.inf)
  rows = run.responses.to_pylist()
  assert columns['every'] == 1 and len(columns['responses']['length']) == len(rows)
  described = columns['visits']
  for visit, first in enumerate(described['first']):
    members = rows[first : first + described['responses'][visit]]
    assert {row['question'] for row in members} == {described['question'][visit]}
    assert {row['step'] for row in members} == {described['step'][visit]}
  replays = [row for row in rows if row['is_replay']]
  assert columns['replays']['written'] == [row['policy_step'] for row in replays]
  assert sum(described['replayed']) == len(replays) > 9


def test_whole_steps_are_left_out_if_there_are_too_many_responses(run):
  total = run.responses.num_rows
  columns = experience.describe_visits(run, total // 3)
  assert columns['every'] == 3  # 11 of 32 steps
  assert len(columns['responses']['length']) == total * 11 // tiny.NUM_STEPS
  assert columns['replays'] == experience.describe_visits(run, math.inf)['replays']  # of all steps
  shown = {
    step for step, first in zip(columns['visits']['step'], columns['visits']['first']) if first >= 0
  }
  steps = sorted(set(run.responses['step'].to_pylist()))
  assert shown == set(steps[::3])
  assert len(columns['visits']['step']) == run.questions.num_rows  # of all steps


def test_groups_shown_token_by_token_keep_their_responses(run):
  columns = experience.describe_visits(run, run.responses.num_rows // 3, {Group(2, 1)})
  described = columns['visits']
  kept = [s for s, first in zip(described['step'], described['first']) if first >= 0 and s < 4]
  assert kept == [1] * tiny.QUESTIONS + [2]


def test_questions_are_shortened_if_they_are_too_long_in_total(run, monkeypatch):
  whole = dict(zip(*(run.questions[name].to_pylist() for name in ('question', 'text'))))
  described = experience.describe_visits(run, 10**6)['questions']
  assert dict(zip(described['row'], described['text'])) == whole and described['cut'] == 0
  monkeypatch.setattr(experience, '_WHOLE_TEXTS', sum(map(len, whole.values())) - 1)
  monkeypatch.setattr(experience, '_MAX_TEXT', 2)
  described = experience.describe_visits(run, 10**6)['questions']
  short = [text for text in described['text'] if text.endswith(' …')]
  assert len(short) == described['cut'] > 3
  assert experience.describe_visits(run, math.inf)['questions']['cut'] == 0  # a served page has all


def test_responses_whose_visit_is_lost_are_left_out(run):
  kept = run.questions.filter(pa.array(np.array(run.questions['step']) > 3))
  columns = experience.describe_visits(Recorded(run.workdir, {}, [], run.responses, kept), math.inf)
  expected = [row['length'] for row in run.responses.to_pylist() if row['step'] > 3]
  assert columns['responses']['length'] == expected and min(columns['visits']['first']) == 0
  without = pa.array(np.array(run.responses['step']) != 5)
  lost = experience.describe_visits(
    Recorded(run.workdir, {}, [], run.responses.filter(without), run.questions), math.inf
  )
  of_step = [lost['visits']['step'][v] for v, yes in enumerate(lost['visits']['replayed']) if yes]
  nothing = [step for step, age in zip(of_step, lost['replays']['written']) if age is None]
  assert set(nothing) == {5} and nothing
  nowhere = pa.array(np.zeros(run.responses.num_rows, bool))
  without = Recorded(run.workdir, {}, [], run.responses.filter(nowhere), run.questions)
  assert experience.describe_visits(without, 10)['visits']['step']


def test_a_replayed_question_without_a_visit_is_left_out(run):
  replayed = {row['question'] for row in run.responses.to_pylist() if row['is_replay']}
  lost = min(replayed)
  kept = run.questions.filter(pa.array(np.array(run.questions['question']) != lost))
  table = experience.describe(dataclasses.replace(run, questions=kept))['replayed']
  assert {row['question'] for row in table} == replayed - {lost}


# ---- Token by token ----


FULL = 8  # a step after which the recorded run's buffer has questions


def test_the_most_visited_questions_are_chosen_with_all_their_groups():
  sizes = {
    Group(1, 0): Size(question=7, tokens=40),
    Group(1, 1): Size(question=8, tokens=50),
    Group(2, 0): Size(question=7, tokens=40),
    Group(3, 0): Size(question=9, tokens=20),
  }
  # 8 no longer fits, and 9 does.
  assert experience.choose(sizes, 100) == {Group(1, 0), Group(2, 0), Group(3, 0)}
  assert experience.choose(sizes, 79) == {
    Group(1, 1),
    Group(3, 0),
  }  # never only some of a question's groups
  assert experience.choose(sizes, 10) == set()


def test_stored_successes_come_from_the_newest_checkpoint(recorded, monkeypatch):
  workdir, newest = str(recorded.workdir), FULL
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [4, FULL])
  whole = buffer_files.read(checkpoint.buffer_folder(workdir, newest)).entries
  rows = sorted(whole, reverse=True)
  found = experience.read_stored(workdir, [*rows, 10**6], 10**9)
  assert list(found) == rows and len(rows) == 2
  for row, trajectories in found.items():
    for own, expected in zip(trajectories, whole[row].trajectories, strict=True):
      np.testing.assert_array_equal(own.tokens, expected.tokens)
      np.testing.assert_array_equal(own.logp, expected.logp)
      assert (own.step, own.times_replayed) == (expected.step, expected.times_replayed)
  of_first = sum(len(trajectory.tokens) for trajectory in whole[rows[0]].trajectories)
  assert list(experience.read_stored(workdir, rows, of_first)) == rows[:1]
  assert experience.read_stored(workdir, rows, of_first - 1) == {}


def test_an_older_checkpoint_is_read_if_the_newest_is_gone(recorded, monkeypatch):
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [FULL, 10**6])
  assert experience.read_stored(str(recorded.workdir), range(100), 10**9)
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [10**6])
  assert experience.read_stored(str(recorded.workdir), range(100), 10**9) is None
