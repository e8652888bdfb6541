"""The columns of visits and responses: what is kept of them, and what is left out."""

import math

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import experience
from exgrpo_jax.reporting.page.texts import Group
from exgrpo_jax.reporting.runs import Recorded
from tests.helpers import tiny


@pytest.fixture
def run(recorded):
  tables = step_records.read(recorded.workdir)
  return Recorded(str(recorded.workdir), {}, [], tables.responses, tables.questions)


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


def test_of_too_many_responses_whole_steps_are_left_out(run):
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


def test_groups_that_are_there_token_by_token_keep_their_responses(run):
  columns = experience.describe_visits(run, run.responses.num_rows // 3, {Group(2, 1)})
  described = columns['visits']
  kept = [s for s, first in zip(described['step'], described['first']) if first >= 0 and s < 4]
  assert kept == [1] * tiny.QUESTIONS + [2]


def test_questions_are_cut_short_where_all_of_them_are_too_long(run, monkeypatch):
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
