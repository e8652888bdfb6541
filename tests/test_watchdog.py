"""A step that takes far too long is told while it lasts, with what it is doing."""

import re
import time

from exgrpo_jax import watchdog
from exgrpo_jax.clock import Clock


def steps(clock, count, seconds):
  for _ in range(count):
    with clock('generate'):
      time.sleep(seconds)
    clock.restart()


def test_a_slow_step_is_told_again_when_it_has_taken_twice_as_long():
  told = []
  with watchdog.watching(told.append, least_seconds=.1) as clock:
    steps(clock, 5, .01)
    with clock('grade'):
      time.sleep(.7)
    clock.restart()
    steps(clock, 5, .01)
  assert 2 <= len(told) <= 3  # after about .1, .2 and .4 s
  for line in told:
    assert re.fullmatch(r'this step has taken \d s, where the median of those before it is 0.0 s; '
                        r"it has been in phase 'grade' for \d s", line)


def test_what_is_slow_between_phases_is_told_too():
  told = []
  with watchdog.watching(told.append, least_seconds=.1) as clock:
    steps(clock, 5, .01)
    time.sleep(.15)
  assert len(told) == 1 and told[0].endswith('it is between two phases')


def test_ten_times_the_median_is_the_measure_once_there_is_one():
  told = []
  with watchdog.watching(told.append, least_seconds=.01) as clock:
    steps(clock, 2, .2)  # there is no median yet
    steps(clock, 3, .05)
    with clock('generate'):
      time.sleep(.3)  # six times
  assert not told


def test_a_clock_shows_what_runs():
  clock = Clock()
  assert clock.now().phase == '' and clock.now().median_seconds == float('inf')
  with clock('plan'):
    time.sleep(.02)
    now = clock.now()
    assert now.phase == 'plan' and .02 <= now.phase_seconds <= now.step_seconds
  assert clock.now().phase == '' and clock.seconds()['time/plan'] >= .02
  clock.restart()
  assert clock.now().step == 1 and 'time/plan' not in clock.seconds()
