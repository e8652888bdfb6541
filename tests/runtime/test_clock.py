"""A step's phases, the time that a run still takes, and steps that hang."""

import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from exgrpo_jax.runtime import activity, compilations, console
from exgrpo_jax.runtime.clock import RECENT, Clock, Pace, watched
from tests.helpers.paths import REPOSITORY

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
    r'this step has taken \d+ s, but the median of the earlier steps is 0.0 s; the step ',
    reports[-1],
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


# ---- What the process says that it is doing ----


def test_what_is_being_done_is_named_from_the_outside_in():
  finished = []
  assert activity.now() == ''
  with activity.doing(lambda: f'step {len(finished) + 1}/9'):
    assert activity.now() == 'step 1/9 (0:00:00)'
    finished.append('first')
    with Clock()('old_logprobs'), activity.doing('12 of 256 responses'):
      assert activity.now() == 'step 2/9: old logprobs, 12 of 256 responses (0:00:00)'
    assert activity.now() == 'step 2/9 (0:00:00)'
  with activity.doing(''):  # nothing to say yet
    assert activity.now() == ''
    with activity.doing('a'), activity.doing(''):
      assert activity.now() == 'a (0:00:00)'
  assert activity.now() == ''


def test_what_failed_is_no_longer_being_done():
  with pytest.raises(KeyError), activity.doing('a'), activity.doing('b'):
    raise KeyError
  assert activity.now() == ''


def test_the_program_that_is_compiled_is_named_until_its_block_ends():
  with activity.doing('step 1 of 60'):
    with activity.doing('learn'):
      activity.compiling('accumulate')
      assert activity.now() == 'step 1 of 60: learn, compiling accumulate (0:00:00)'
      thread = threading.Thread(target=activity.compiling, args=['another'])
      thread.start()
      thread.join()
      assert 'compiling accumulate' in activity.now()
      activity.compiling('')
      assert activity.now() == 'step 1 of 60: learn (0:00:00)'
      activity.compiling('fails')
    assert activity.now() == 'step 1 of 60 (0:00:00)'
  activity.compiling('when idle')
  assert activity.now() == ''


# ---- That the console names what JAX compiles, in this version of JAX ----


def test_a_program_is_named_while_it_is_compiled_and_no_longer():
  said = []

  def listen(event, duration_secs, **details):
    del duration_secs, details
    if event.startswith('/jax/core/compile/'):
      said.append(activity.now())

  def slow(x):
    return jnp.sin(x) * 3

  x = jnp.ones(3)  # made by a program of its own
  with console.opened(silence=1e9), activity.doing('learn'):
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
      jax.jit(slow)(x)
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)
    assert 'learn: compiling slow (0:00:00)' in said, said
    assert said[-1] == activity.now() == 'learn (0:00:00)'


# ---- Signals ----


def start(program):
  """A process that has printed 'ready', which is the last thing it does before it waits."""
  process = subprocess.Popen(
    [sys.executable, '-c', program],
    cwd=REPOSITORY,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.stdout.readline() == 'ready\n', process.communicate()
  return process


# One long call of C, during which Python runs no handler, as during a compilation.
BUSY = """
import hashlib, signal
from exgrpo_jax.runtime import preemption
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with preemption.listening():
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
"""


@pytest.mark.full
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_process_that_is_busy_at_once(number):
  process = start(BUSY)
  process.send_signal(number)
  line = process.stderr.readline()
  assert line == (
    f'{number.name}: the run stops once this step is finished and saved; a second signal ends it '
    'immediately\n'
  )
  assert process.poll() is None
  process.send_signal(number)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (128 + number, '')
