"""A step's phases, the time that a run still takes, and steps that hang."""

import re
import time

import pytest

from exgrpo_jax.runtime import compilations
from exgrpo_jax.runtime.clock import RECENT, Clock, Pace, watched

COMPILED = '/jax/core/compile/backend_compile_duration'


@pytest.mark.parametrize('phase', ['grade', ''])
def test_a_slow_step_is_reported_with_its_phase_and_again_when_it_has_taken_twice_as_long(phase):
  reports = []
  with watched(reports.append, least_seconds=0.1) as clock:
    for _ in range(5):
      with clock('generate'):
        time.sleep(0.01)
      clock.restart()
    words = f"has been in phase '{phase}' for" if phase else 'is between two phases'
    deadline = time.monotonic() + 60  # for a busy machine

    def wait():
      while sum(words in report for report in reports) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)

    if phase:
      with clock(phase):
        wait()
    else:
      wait()
    seconds = clock.now().step_seconds
  assert sum(words in report for report in reports) == 3 and seconds > 0.4
  assert re.match(
    r'this step has taken \d+ s, where the median of those before it is 0.0 s; it ', reports[-1]
  )


def test_the_first_steps_which_compile_and_have_no_median_are_not_reported():
  reports = []
  with watched(reports.append, least_seconds=0.01) as clock:
    clock.restart()
    clock.restart()
    time.sleep(0.1)
  assert reports == []


def test_a_clock_can_be_read_within_a_step():
  clock = Clock()
  assert clock.now().phase == '' and clock.now().median_seconds == float('inf')
  with clock('plan'):
    time.sleep(0.02)
    now = clock.now()
    assert now.phase == 'plan' and 0.02 <= now.phase_seconds <= now.step_seconds
  assert clock.now().phase == '' and clock.seconds()['time/plan'] >= 0.02
  clock.restart()
  assert clock.now().step == 1 and 'time/plan' not in clock.seconds()


# ---- Pace, on a clock that the tests turn ----


@pytest.fixture
def compiled():
  return compilations.Counter()


@pytest.fixture
def wait(monkeypatch, compiled):
  """Lets seconds pass, in which a program may be compiled."""
  now = [1000.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])

  def advance(seconds, compiling=False):
    now[0] += seconds
    if compiling:
      compiled.hear(COMPILED, seconds)

  return advance


def test_the_pace_is_the_median_of_recent_steps_that_did_not_compile(compiled, wait):
  run = Pace(compiled)
  wait(50, compiling=True)
  wait(2)
  run.finish_step()
  assert run.seconds_left(9, 0) is None and run.seconds_left(0, 0) == 0  # nothing to go by
  for seconds in [9] * RECENT + [2] * (RECENT - 2) + [100]:
    wait(seconds)
    run.finish_step()
  wait(40, compiling=True)
  run.finish_step()
  assert run.seconds_left(10, 0) == 20


def test_evaluations_to_come_cost_what_they_have_cost_without_compiling(compiled, wait):
  run = Pace(compiled)
  with run.evaluation():
    wait(30, compiling=True)
    wait(5)
  wait(50, compiling=True)
  run.finish_step()
  wait(2)
  with run.evaluation():  # the step that it is part of is none the slower for it
    wait(10, compiling=True)
    wait(5)
  run.finish_step()
  assert run.seconds_left(8, 3) == 8 * 2 + 3 * 5


def test_a_resumed_run_knows_its_evaluations_from_before(compiled, wait):
  unknown = Pace(compiled)
  known = Pace(compiled, [{'step': 0}, {'time/evaluate': 4.0, 'time/export': 2.0}])
  wait(2)
  for run in unknown, known:
    run.finish_step()
  assert unknown.seconds_left(8, 1) is None and unknown.seconds_left(8, 0) == 16
  assert known.seconds_left(8, 1) == 16 + 6
