"""The parts of the page that grow with a run: what is kept of them, and what is left out."""

import math
import types

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.figures.runs import Recorded
from exgrpo_jax.reporting.page import charts, document, stored, texts, visits, warnings_log
from exgrpo_jax.reporting.page.texts import Group, Size
from exgrpo_jax.reporting.panels import Line, Lines
from tests.helpers import tiny


def test_numbers_keep_six_digits_and_what_is_not_finite_is_null():
  values = [0.0, 3.0, -2.5, 0.1 + 0.2, 1234567.8, 1e-9, np.nan, np.inf, -np.inf]
  assert charts.numbers(values) == [0, 3, -2.5, 0.3, 1234570.0, 1e-9, None, None, None]
  assert all(isinstance(value, int) for value in charts.numbers(np.array([2.0, -7.0])))


def test_lines_of_a_chart_are_smoothed_alike_however_long_they_are():
  values = np.array([1.0, 4.0] * 40)
  lines = tuple(Line(str(count), range(count), values[:count]) for count in (80, 24, 3, 1))
  drawn = charts.describe(Lines('Reward', '', lines, smooth=True))['lines']
  long, short, three, one = (line['smooth'] for line in drawn)
  assert short[:22] == long[:22]  # the means of two neighbours to either side
  assert (short[23], three, one) == (3, [2, 2, 2], [1])
  alone = charts.describe(Lines('Reward', '', lines[1:], smooth=True))['lines']
  assert not any('smooth' in line for line in alone)


def test_whole_stories_of_the_most_visited_questions_are_chosen():
  sizes = {
    Group(1, 0): Size(question=7, tokens=40),
    Group(1, 1): Size(question=8, tokens=50),
    Group(2, 0): Size(question=7, tokens=40),
    Group(3, 0): Size(question=9, tokens=20),
  }
  # 8 no longer fits, and 9 does.
  assert texts.choose(sizes, 100) == {Group(1, 0), Group(2, 0), Group(3, 0)}
  assert texts.choose(sizes, 79) == {Group(1, 1), Group(3, 0)}  # half of a story is none
  assert texts.choose(sizes, 10) == set()


def test_warnings_have_the_step_that_they_name_or_that_was_going_on(tmp_path):
  lines = """
---- 2026-11-23  exgrpo train
WARNING: before the first step
step  1/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: the grader is slow
step  2/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: step 4: the run is killed before the line of its step
step  3/60 | reward  0.500
WARNING: after the last
"""
  (tmp_path / 'console.log').write_text(lines)
  assert [(found['step'], found['text']) for found in warnings_log.read(tmp_path)] == [
    (1, 'before the first step'),
    (2, 'step 2: half of all is truncated'),
    (2, 'the grader is slow'),
    (3, 'after the last'),
    (4, 'step 4: the run is killed before the line of its step'),
  ]
  assert warnings_log.read(tmp_path / 'nowhere') == []


@pytest.fixture
def run(recorded):
  tables = step_records.read(recorded.workdir)
  return Recorded(str(recorded.workdir), {}, [], tables.responses, tables.questions)


def test_each_visit_has_its_own_responses(run):
  columns = visits.describe(run, math.inf)
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
  columns = visits.describe(run, total // 3)
  assert columns['every'] == 3  # 11 of 32 steps
  assert len(columns['responses']['length']) == total * 11 // tiny.NUM_STEPS
  assert columns['replays'] == visits.describe(run, math.inf)['replays']  # of all steps
  shown = {
    step for step, first in zip(columns['visits']['step'], columns['visits']['first']) if first >= 0
  }
  steps = sorted(set(run.responses['step'].to_pylist()))
  assert shown == set(steps[::3])
  assert len(columns['visits']['step']) == run.questions.num_rows  # of all steps


def test_groups_that_are_there_token_by_token_keep_their_responses(run):
  columns = visits.describe(run, run.responses.num_rows // 3, {Group(2, 1)})
  described = columns['visits']
  kept = [s for s, first in zip(described['step'], described['first']) if first >= 0 and s < 4]
  assert kept == [1] * tiny.QUESTIONS + [2]


def test_questions_are_cut_short_where_all_of_them_are_too_long(run, monkeypatch):
  whole = dict(zip(*(run.questions[name].to_pylist() for name in ('question', 'text'))))
  described = visits.describe(run, 10**6)['questions']
  assert dict(zip(described['row'], described['text'])) == whole and described['cut'] == 0
  monkeypatch.setattr(visits, '_WHOLE_TEXTS', sum(map(len, whole.values())) - 1)
  monkeypatch.setattr(visits, '_MAX_TEXT', 2)
  described = visits.describe(run, 10**6)['questions']
  short = [text for text in described['text'] if text.endswith(' …')]
  assert len(short) == described['cut'] > 3
  assert visits.describe(run, math.inf)['questions']['cut'] == 0  # a served page has all


def test_responses_whose_visit_is_lost_are_left_out(run):
  kept = run.questions.filter(pa.array(np.array(run.questions['step']) > 3))
  columns = visits.describe(Recorded(run.workdir, {}, [], run.responses, kept), math.inf)
  expected = [row['length'] for row in run.responses.to_pylist() if row['step'] > 3]
  assert columns['responses']['length'] == expected and min(columns['visits']['first']) == 0
  without = pa.array(np.array(run.responses['step']) != 5)
  lost = visits.describe(
    Recorded(run.workdir, {}, [], run.responses.filter(without), run.questions), math.inf
  )
  of_step = [lost['visits']['step'][v] for v, yes in enumerate(lost['visits']['replayed']) if yes]
  nothing = [step for step, age in zip(of_step, lost['replays']['written']) if age is None]
  assert set(nothing) == {5} and nothing


FULL = 8  # a step after which the recorded run's buffer has questions


def test_stored_successes_are_those_of_the_newest_checkpoint(recorded, monkeypatch):
  workdir, newest = str(recorded.workdir), FULL
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [4, FULL])
  whole = buffer_files.read(checkpoint.buffer_folder(workdir, newest)).entries
  rows = sorted(whole, reverse=True)
  found = stored.read(workdir, [*rows, 10**6], 10**9)
  assert list(found) == rows and len(rows) == 2
  for row, trajectories in found.items():
    for own, expected in zip(trajectories, whole[row].trajectories, strict=True):
      np.testing.assert_array_equal(own.tokens, expected.tokens)
      np.testing.assert_array_equal(own.logp, expected.logp)
      assert (own.step, own.times_replayed) == (expected.step, expected.times_replayed)
  of_first = sum(len(trajectory.tokens) for trajectory in whole[rows[0]].trajectories)
  assert list(stored.read(workdir, rows, of_first)) == rows[:1]
  assert stored.read(workdir, rows, of_first - 1) == {}


def test_an_older_checkpoint_is_read_where_the_newest_is_gone(recorded, monkeypatch):
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [FULL, 10**6])
  assert stored.read(str(recorded.workdir), range(100), 10**9)
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [10**6])
  assert stored.read(str(recorded.workdir), range(100), 10**9) is None


def test_the_document_takes_nothing_of_its_data_for_its_own_words():
  parts = {'page': {'title': '{{script}}</title><b>', 'runs': []}, 'visits-0': None}
  text = document.render(parts)
  assert '<title>{{script}}&lt;/title&gt;&lt;b&gt;</title>' in text
  assert text.count('id="part-') == 1  # None is no part
  lone = types.SimpleNamespace(text='\udc80')
  assert document.pack({'text': lone.text})  # a lone surrogate can be written
