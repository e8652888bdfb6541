"""The estimate of the time that a run still takes, on a clock that the tests turn."""

import time

import pytest

from exgrpo_jax.runtime import compilations, pace

COMPILED = '/jax/core/compile/backend_compile_duration'


@pytest.fixture
def wait(monkeypatch):
  """Lets seconds pass."""
  now = [1000.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])

  def advance(seconds):
    now[0] += seconds

  return advance


@pytest.fixture
def compile_for(compiled, wait):
  """Lets seconds pass in which a program is compiled."""

  def advance(seconds):
    wait(seconds)
    compiled.hear(COMPILED, seconds)

  return advance


@pytest.fixture
def compiled():
  return compilations.Counter()


def test_steps_that_compile_do_not_tell_the_pace(compiled, wait, compile_for):
  run = pace.Pace(compiled)
  compile_for(50)
  wait(2)
  run.finish_step()
  assert run.seconds_left(9, 0) is None  # nothing to go by
  wait(2)
  run.finish_step()
  assert run.seconds_left(8, 0) == 16
  compile_for(40)
  run.finish_step()
  assert run.seconds_left(7, 0) == 14


def test_the_pace_is_the_median_of_recent_steps(compiled, wait):
  run = pace.Pace(compiled)
  for seconds in [9] * pace.RECENT + [2] * (pace.RECENT - 2) + [100]:
    wait(seconds)
    run.finish_step()
  assert run.seconds_left(10, 0) == 20


def test_evaluations_to_come_cost_what_they_have_cost_without_compiling(
  compiled, wait, compile_for
):
  run = pace.Pace(compiled)
  with run.evaluation():
    compile_for(30)
    wait(5)
  compile_for(50)
  run.finish_step()
  wait(2)
  with run.evaluation():  # the step that it is part of is none the slower for it
    compile_for(10)
    wait(5)
  run.finish_step()
  assert run.seconds_left(8, 3) == 8 * 2 + 3 * 5


def test_a_resumed_run_knows_its_evaluations_from_before(compiled, wait):
  unknown = pace.Pace(compiled)
  known = pace.Pace(compiled, [{'step': 0}, {'time/evaluate': 4.0, 'time/export': 2.0}])
  wait(2)
  for run in unknown, known:
    run.finish_step()
  assert unknown.seconds_left(8, 1) is None and unknown.seconds_left(8, 0) == 16
  assert known.seconds_left(8, 1) == 16 + 6


def test_after_the_last_step_nothing_is_left(compiled):
  assert pace.Pace(compiled).seconds_left(0, 0) == 0
