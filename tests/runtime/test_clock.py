"""Step phases, the estimated time left, hanging steps, the status line, and signals."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from exgrpo_jax.runtime import activity, clock, compilations, console
from exgrpo_jax.runtime.clock import RECENT, Clock, Pace, watched
from tests.helpers.paths import REPOSITORY

COMPILED = '/jax/core/compile/backend_compile_duration'


@pytest.mark.parametrize('phase', ['grade', ''])
def test_a_slow_step_is_reported_with_its_phase_and_again_after_twice_as_long(
  phase, monkeypatch, capsys
):
  monkeypatch.setattr(clock, 'LEAST_SECONDS', 0.1)
  reports, where = '', f"has been in phase '{phase}' for" if phase else 'is between two phases'
  deadline = time.monotonic() + 60  # for a busy machine
  with watched() as timed:
    for _ in range(5):
      with timed('generate'):
        time.sleep(0.01)
      timed.restart()
    with timed(phase) if phase else contextlib.nullcontext():
      while reports.count(where) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
        reports += capsys.readouterr().err
    seconds = timed.now().step_seconds
  assert reports.count(where) == 3 and seconds > 0.4
  step = r'this step has taken \d+ s, but the median of the earlier steps is 0.0 s; the step '
  assert re.match(rf'WARNING: {socket.gethostname()}: {step}', reports.splitlines()[-1])


def test_the_first_steps_are_not_reported_because_they_have_no_median(monkeypatch, capsys):
  monkeypatch.setattr(clock, 'LEAST_SECONDS', 0.01)
  with watched() as timed:
    timed.restart()
    timed.restart()
    time.sleep(0.1)
  assert capsys.readouterr().err == ''


def test_a_clock_can_be_read_within_a_step():
  timed = Clock()
  assert timed.now().phase == '' and timed.now().median_seconds == float('inf')
  with timed('plan'):
    time.sleep(0.02)
    now = timed.now()
    assert now.phase == 'plan' and 0.02 <= now.phase_seconds <= now.step_seconds
  assert timed.now().phase == '' and timed.seconds()['time/plan'] >= 0.02
  timed.restart()
  assert timed.now().step == 1 and 'time/plan' not in timed.seconds()


# ---- Pace, with a fake clock ----


@pytest.fixture
def compiled():
  return compilations.Counter()


@pytest.fixture
def wait(monkeypatch, compiled):
  """Return a function that lets time pass, during which a program may be compiled."""
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
  assert run.seconds_left(9, 0) is None and run.seconds_left(0, 0) == 0  # no timings yet
  for seconds in [9] * RECENT + [2] * (RECENT - 2) + [100]:
    wait(seconds)
    run.finish_step()
  wait(40, compiling=True)
  run.finish_step()
  assert run.seconds_left(10, 0) == 20


def test_future_evaluations_are_estimated_from_past_ones_without_compilation(compiled, wait):
  run = Pace(compiled)
  with run.evaluation():
    wait(30, compiling=True)
    wait(5)
  wait(50, compiling=True)
  run.finish_step()
  wait(2)
  with run.evaluation():  # it does not count in its step's time
    wait(10, compiling=True)
    wait(5)
  run.finish_step()
  assert run.seconds_left(8, 3) == 8 * 2 + 3 * 5


def test_a_resumed_run_knows_the_times_of_earlier_evaluations(compiled, wait):
  unknown = Pace(compiled)
  known = Pace(compiled, [{'step': 0}, {'time/evaluate': 4.0, 'time/export': 2.0}])
  wait(2)
  for run in unknown, known:
    run.finish_step()
  assert unknown.seconds_left(8, 1) is None and unknown.seconds_left(8, 0) == 16
  assert known.seconds_left(8, 1) == 16 + 6


# ---- The status line ----


def test_the_status_line_lists_nested_blocks_from_the_outside_in():
  finished = []
  assert activity.now() == ''
  with activity.doing(lambda: f'step {len(finished) + 1}/9'):
    assert activity.now() == 'step 1/9 (0:00:00)'
    finished.append('first')
    with Clock()('old_logprobs'), activity.doing('12 of 256 responses'):
      assert activity.now() == 'step 2/9: old logprobs, 12 of 256 responses (0:00:00)'
    assert activity.now() == 'step 2/9 (0:00:00)'
  with activity.doing(''):  # no text yet
    assert activity.now() == ''
    with activity.doing('a'), activity.doing(''):
      assert activity.now() == 'a (0:00:00)'
  with pytest.raises(KeyError), activity.doing('a'), activity.doing('b'):
    raise KeyError  # the failed block ends
  assert activity.now() == ''


def test_the_status_line_names_a_compiling_program_until_its_block_ends():
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


def test_the_status_line_names_a_program_only_while_it_compiles():
  """This depends on the installed JAX version's events."""
  said = []

  def listen(event, _, **__):
    if event.startswith('/jax/core/compile/'):
      said.append(activity.now())

  def slow(x):
    return jnp.sin(x) * 3

  x = jnp.ones(3)  # compiles a separate program
  with console.opened(silence=1e9), activity.doing('learn'):
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
      jax.jit(slow)(x)
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)
    assert 'learn: compiling slow (0:00:00)' in said, said
    assert said[-1] == activity.now() == 'learn (0:00:00)'


# ---- Signals ----


# One long call into C, during which Python runs no signal handler, as during a compilation.
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
def test_the_second_signal_immediately_ends_a_busy_process(number):
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  process = subprocess.Popen([sys.executable, '-c', BUSY], cwd=REPOSITORY, text=True, **pipes)
  assert process.stdout.readline() == 'ready\n', process.communicate()
  process.send_signal(number)
  assert process.stderr.readline() == (
    f'{number.name}: the run will stop after this step is finished and saved. A second signal '
    'stops the run immediately.\n'
  )
  assert process.poll() is None
  process.send_signal(number)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (128 + number, '')
