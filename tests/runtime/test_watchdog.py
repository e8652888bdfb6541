"""A step that takes far too long is reported while it lasts, with what it is doing."""

import re
import time

from exgrpo_jax.runtime import watchdog
from exgrpo_jax.runtime.clock import Clock, Now


def test_a_slow_step_is_reported_with_its_phase_and_again_when_it_has_taken_twice_as_long():
  reports = []
  with watchdog.watching(reports.append, least_seconds=0.1) as clock:
    for _ in range(5):
      with clock('generate'):
        time.sleep(0.01)
      clock.restart()
    with clock('grade'):
      deadline = time.monotonic() + 60  # for a busy machine
      while sum("'grade'" in report for report in reports) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
      seconds = clock.now().step_seconds
  assert sum("'grade'" in report for report in reports) == 3 and seconds > 0.4
  assert re.fullmatch(
    r'this step has taken \d+ s, where the median of those before it is 0.0 s; '
    r"it has been in phase 'grade' for \d+ s",
    reports[-1],
  )


def now(phase='plan', median_seconds=2.0):
  return Now(
    step=5,
    step_seconds=90.2,
    phase=phase,
    phase_seconds=30.0,
    median_seconds=median_seconds,
  )


def test_a_step_that_is_slow_between_phases_is_reported_too():
  assert watchdog.message(now(phase='', median_seconds=4.04)) == (
    'this step has taken 90 s, where the median of those before it is 4.0 s; it is between two '
    'phases'
  )


def test_the_limit_is_ten_times_the_median_once_there_is_one_and_at_least_a_minute():
  for median, limit in ((float('inf'), float('inf')), (2.0, 60), (7.0, 70)):
    assert watchdog.first_limit(now(median_seconds=median), least_seconds=60.0) == limit


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
