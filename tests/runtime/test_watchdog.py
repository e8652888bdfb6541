"""A step that takes far too long is told while it lasts, with what it is doing."""

import re
import time

from exgrpo_jax.runtime import watchdog
from exgrpo_jax.runtime.clock import Clock, Now


def test_a_slow_step_is_told_with_its_phase_and_again_when_it_has_taken_twice_as_long():
  told = []
  with watchdog.watching(told.append, least_seconds=0.1) as clock:
    for _ in range(5):
      with clock('generate'):
        time.sleep(0.01)
      clock.restart()
    with clock('grade'):
      end = time.monotonic() + 60  # on a machine that does other things
      while sum("'grade'" in line for line in told) < 3 and time.monotonic() < end:
        time.sleep(0.01)
      seconds = clock.now().step_seconds
  assert sum("'grade'" in line for line in told) == 3 and seconds > 0.4
  assert re.fullmatch(
    r'this step has taken \d+ s, where the median of those before it is 0.0 s; '
    r"it has been in phase 'grade' for \d+ s",
    told[-1],
  )


def test_what_is_slow_between_phases_is_told_too():
  assert watchdog.message(Now(5, 90.2, '', 30.0, 4.04)) == (
    'this step has taken 90 s, where the median of those before it is 4.0 s; it is between two '
    'phases'
  )


def test_ten_times_the_median_is_the_measure_once_there_is_one_and_a_minute_the_least():
  assert watchdog.first_limit(Now(2, 1.0, 'plan', 1.0, float('inf')), 60.0) == float('inf')
  assert watchdog.first_limit(Now(3, 1.0, 'plan', 1.0, 2.0), 60.0) == 60
  assert watchdog.first_limit(Now(3, 1.0, 'plan', 1.0, 7.0), 60.0) == 70


def test_a_clock_shows_what_runs():
  clock = Clock()
  assert clock.now().phase == '' and clock.now().median_seconds == float('inf')
  with clock('plan'):
    time.sleep(0.02)
    now = clock.now()
    assert now.phase == 'plan' and 0.02 <= now.phase_seconds <= now.step_seconds
  assert clock.now().phase == '' and clock.seconds()['time/plan'] >= 0.02
  clock.restart()
  assert clock.now().step == 1 and 'time/plan' not in clock.seconds()
