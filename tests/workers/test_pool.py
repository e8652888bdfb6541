"""Every request gets its reply, whatever happens to its worker, in all kinds of pools."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import types

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool as grading_pool
from exgrpo_jax.grading import verifier
from exgrpo_jax.workers import pool, user_code
from exgrpo_jax.workers.pool import Pool, Worker
from tests.helpers import misbehaving, tiny
from tests.helpers.forked import is_running
from tests.helpers.pools import ECHO, POOLS, asking, of_echoes
from tests.helpers.stand_ins import wait_until

pytestmark = pytest.mark.full


@pytest.fixture(params=POOLS)
def opened(request):
  """Makes a pool that closes when the test ends."""
  with contextlib.ExitStack() as stack:
    yield lambda **limits: stack.enter_context(POOLS[request.param](**limits))


def kill_worker(path):
  """Wait until a worker has written its process id to `path` and sleeps, then kill it."""
  wait_until(path.exists)
  os.kill(int(path.read_text()), signal.SIGKILL)


LATE = r'no (reply|verdict|answer) after 1 s( \(config\.\w+\.time_limit\))?'
# Requests that hang or crash their worker.


def test_a_request_that_hangs_or_crashes_costs_only_itself(opened):
  fates = {
    'hang': ('timed out', LATE),
    'one': ('', ''),
    'crash': ('crashed', '2 workers died during this request, the last with exit status -11'),
    'two': ('', ''),
    'exit': ('crashed', '2 workers died during this request, the last with exit status 3'),
    'raise': ('crashed', rf"(.*:pid: )?KeyError: 'of the code' \({os.sep}.*misbehaving.py:\d+\)"),
    'hog': ('crashed', r'(.*:pid: )?MemoryError( \(.*\))?'),
    'spin': ('timed out', LATE),
    'three': ('', ''),
  }
  replies = opened(count=2, time_limit=1.0)(*fates)()
  for reply, (outcome, reason) in zip(replies, fates.values(), strict=True):
    assert reply.outcome == outcome and bool(reply.pid) == (not outcome)
    assert re.fullmatch(reason, reply.reason), reply


def test_a_warning_appears_once_if_all_first_requests_time_out(opened, capfd):
  pool._warn_once.cache_clear()
  opened(time_limit=30.0)('one', 'two')()
  opened(time_limit=0.4)('one', 'hang', 'hang', 'hang')()
  assert 'WARNING' not in capfd.readouterr().err
  for _ in range(2):
    opened(time_limit=0.4)('hang', 'hang', 'hang')()
  assert capfd.readouterr().err.count('WARNING: the first 3 requests to a') == 1


def test_a_reply_that_is_too_long_is_an_error_and_the_worker_continues():
  with of_echoes() as submit:
    short, long, after = submit('long 1000000', 'long 1100000', 'after')()
  assert short.pid == after.pid and short.pid
  assert re.match(r'ValueError: the reply is 1,100,\d{3} bytes long, .* 1,048,576', long.reason)


def test_a_stopped_worker_that_reads_nothing_times_out(opened):
  submit = opened(time_limit=1.0)
  (first,) = submit('')()
  os.kill(first.pid, signal.SIGSTOP)
  stopped, later = submit('x' * 10**6, '')()
  assert stopped.outcome == 'timed out' and later.pid not in (0, first.pid)


def test_a_worker_killed_while_it_is_busy_loses_nothing(opened, tmp_path):
  wait = opened()(*'ab', f'sleep_once {tmp_path / "pid"}', *'cd')
  kill_worker(tmp_path / 'pid')
  assert all(reply.pid for reply in wait())


def test_a_worker_killed_while_idle_is_replaced_without_blaming_the_next_request(opened, tmp_path):
  submit = opened()
  pids = []
  for _ in range(2):
    (reply,) = submit('')()
    pids.append(reply.pid)
    os.kill(reply.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pids[-1]))
  wait = submit(f'sleep_once {tmp_path / "pid"}')
  kill_worker(tmp_path / 'pid')  # the first death that counts
  (reply,) = wait()
  assert reply.pid and len({*pids, reply.pid}) == 3


def test_a_worker_is_replaced_after_running_out_of_memory_but_not_after_other_errors(opened):
  submit = opened()
  before, failed, after, hogged, last = submit('', 'raise', '', 'hog', '')()
  assert failed.outcome == hogged.outcome == 'crashed'
  assert before.pid == after.pid != last.pid and last.pid


def test_printed_text_is_not_a_reply(opened, capfd):
  first, printed = opened()('', 'print')()
  assert printed == first and first.pid
  assert capfd.readouterr().out == ''


def test_several_workers_answer_at_once(opened, tmp_path):
  submit = opened(count=2)
  wait = submit(f'sleep_once {tmp_path / "pid"}', 'one')
  kill_worker(tmp_path / 'pid')
  first, second = wait()
  assert first.pid != second.pid and first.pid and second.pid


# The worker's surroundings.


def test_a_worker_imports_no_jax(opened):
  asked = ['import jax jaxlib flax exgrpo_jax.datatypes', 'import exgrpo_jax.workers.server']
  free, imported = opened()(*asked)()
  assert free.pid and imported.outcome == 'crashed'


@pytest.mark.parametrize('kind', ['echoes', 'grading'])  # environments end with the process
def test_closing_kills_busy_workers_at_once(kind, tmp_path):
  path = tmp_path / 'pid'
  with POOLS[kind]() as submit:
    wait = submit(f'sleep_once {path}', '')  # would hang if closing waited
    wait_until(path.exists)
    assert is_running(path.read_text())
  assert not is_running(path.read_text())
  with pytest.raises(concurrent.futures.CancelledError):
    wait()


ORPHAN = """
import sys
from tests.helpers import pools
with pools.POOLS[sys.argv[1]](time_limit=600.0) as submit:
  submit('sleep_once ' + sys.argv[2])()
"""


@pytest.mark.skipif(
  sys.platform != 'linux', reason='only Linux signals a busy process when its parent ends'
)
@pytest.mark.parametrize('kind', ['echoes', 'grading'])  # server.py does it for all
def test_a_busy_worker_ends_with_a_parent_that_is_killed(kind, tmp_path):
  path = tmp_path / 'pid'
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_PLATFORMS': 'cpu'}
  with subprocess.Popen([sys.executable, '-c', ORPHAN, kind, str(path)], env=env) as parent:
    try:
      wait_until(path.exists)
      worker = int(path.read_text())
      assert is_running(worker)
    finally:
      parent.kill()
  wait_until(lambda: not is_running(worker))


# How a worker starts.


def test_user_code_that_hangs_is_refused_by_name_after_the_timeout(monkeypatch, capsys):
  """After one attempt, which reports its progress every ten seconds."""
  clock = types.SimpleNamespace(now=100.0)

  class Hanging:
    """A worker that reports an import and then hangs."""

    def __init__(self, _command, first, _timeout):
      self.said = [{'trying': f"'{name}'", 'how': 'importing it'} for name in first['setup']]

    def receive(self, deadline):
      if self.said:
        return self.said.pop(0)
      clock.now = deadline
      raise TimeoutError

    def close(self):
      pass

  monkeypatch.setattr(pool, 'WorkerProcess', Hanging)
  monkeypatch.setattr(pool, 'time', types.SimpleNamespace(monotonic=lambda: clock.now))
  hanging = dataclasses.replace(
    ECHO, setup={'a:b': ''}, starts=1, timeout=67.0, timeout_note=' (some included)'
  )
  with pytest.raises(InputError, match=r"^'a:b' cannot be used .*importing it.* 67 s \(some incl"):
    Worker(hanging).start()
  assert clock.now == 167
  assert capsys.readouterr().out.splitlines() == [
    f"'a:b': still importing it ({waited} s of 67)" for waited in range(10, 67, 10)
  ]


def test_workers_that_do_not_start_end_the_run():
  program = dataclasses.replace(ECHO, command=(sys.executable, '-c', 'raise SystemExit(7)'))
  with contextlib.closing(Pool(program)) as running:
    waiting = running.submit(asking('', 30.0))
    with pytest.raises(
      RuntimeError, match=r'an echo process did not start \(attempts: 3\): .*status 7'
    ):
      waiting.result()


# ---- Unusable code in a config is refused by name ----

REQUIRED = verifier.VerifierConfig(('box',))
CODE = misbehaving.__name__


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'rewards': (':reward',)}, "ValueError: it must have the form 'package.module:function'"),
    ({'rewards': ('nowhere_at_all:f',)}, "No module named 'nowhere_at_all'). Set a value of the"),
    ({'rewards': (f'{CODE}:nothing',)}, 'AttributeError: '),
    ({'rewards': (f'{CODE}:of_position',)}, "ValueError: its parameter 'response' is positional"),
    ({'rewards': (f'{CODE}:time',)}, 'TypeError: '),
    (
      {'rewards': (f'{CODE}:of_trl',)},
      "'completions' belongs to TRL rewards; here, a reward is called",
    ),
    ({'rewards': (f'{CODE}:of_verl',)}, 'as in `def reward(response, answer): return float('),
    ({'rewards': (f'{CODE}:broken',)}, f"KeyError: 'score' ({misbehaving.__file__}:"),
    ({'rewards': (f'{CODE}:as_list',)}, 'returned [19.0], not a number'),
    ({'rewards': (f'{CODE}:beyond_float32',)}, 'returned 1e+39, not a number from -1e+10 to 1e+10'),
    ({'rewards': (f'{CODE}:leaves',)}, 'SystemExit: 3'),
    ({'rewards': (f'{CODE}:of_last_word',)}, "tried on ('', '1', 'no answer'): IndexError"),
    ({'rewards': (f'{CODE}:vanishes',)}, 'the process ended with exit status 3 while trying it'),
    ({'rewards': (f'{CODE}:reward',), 'batched': (f'{CODE}:reward',)}, 'a batch of 3 responses'),
    ({'verifier': 'nowhere_at_all:X'}, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ({'verifier': f'{CODE}:Undecided'}, "returned ('perhaps', None)"),
  ],
)
def test_unusable_code_is_refused_by_name(changes, reason):
  config = dataclasses.replace(tiny.GRADING, **changes)
  with pytest.raises(InputError) as refused:
    grading_pool.check(config, REQUIRED)
  key = next(iter(changes))
  spec = config.verifier if key == 'verifier' else config.rewards[0]
  assert str(refused.value).startswith(f"config.grading.{key}: '{spec}' cannot be used (")
  assert reason in str(refused.value)


def test_a_reward_that_always_exceeds_the_time_limit_is_refused():
  slow = dataclasses.replace(tiny.GRADING, rewards=(f'{CODE}:slow',), time_limit=0.1)
  with pytest.raises(InputError, match=r'^config\.grading\.time_limit=0\.1: .* take longer'):
    grading_pool.check(slow, REQUIRED)
  grading_pool.check(dataclasses.replace(slow, time_limit=60.0), REQUIRED)


def test_one_slow_call_at_startup_is_accepted(monkeypatch, tmp_path):
  monkeypatch.setenv('SLOW_AT_FIRST', str(tmp_path / 'was_slow'))
  rewards = (f'{CODE}:slow_at_first',)
  grading_pool.check(dataclasses.replace(tiny.GRADING, rewards=rewards, time_limit=1.0), REQUIRED)
  assert (tmp_path / 'was_slow').exists()


def test_usable_code_passes_the_check():
  rewards = ('exgrpo_jax.grading.rewards:think_format',)
  own = 'exgrpo_jax.grading.verifier:BuiltIn'
  grading_pool.check(dataclasses.replace(tiny.GRADING, rewards=rewards, verifier=own), REQUIRED)


def test_code_in_the_current_folder_is_found(tmp_path, monkeypatch):
  (tmp_path / 'lies_here.py').write_text('def score(response):\n  return 7\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [path for path in sys.path if path])
  assert user_code.load('lies_here:score')('') == 7


def test_an_error_is_one_short_line():
  assert user_code.summarize(OSError('a\nb\x00' + 'c' * 600)) == ('OSError: a b ' + 'c' * 600)[:500]
