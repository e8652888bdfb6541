"""Every response gets its verdict, in order, whatever one does to its worker."""

import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, verifier, workers
from exgrpo_jax.grading.pool import Submission
from exgrpo_jax.runtime import activity, worker_slot
from tests.helpers import tiny
from tests.helpers.processes import is_running

VERIFIER = verifier.Config(require_think=False, require_box=True)
CONFIG = dataclasses.replace(tiny.GRADING, workers=1, time_limit=30.0)
QUICK = dataclasses.replace(CONFIG, time_limit=1.0)
RIGHT = Verdict(reward=1.0, outcome='correct', answer='1', components={'correctness': 1.0})
WRONG = Verdict(reward=0.0, outcome='wrong', answer='1', components={'correctness': 0.0})
NONE = Verdict(reward=0.0, outcome='no answer', components={'correctness': 0.0})
PATIENCE = 60.0  # seconds to wait for what happens at once unless the machine is busy


def grader(reward='', config=CONFIG, **changes):
  if reward:
    changes['rewards'] = (f'tests.helpers.misbehaving:{reward}',)
  return pool.Grader(dataclasses.replace(config, **changes), VERIFIER)


@pytest.fixture(scope='module')
def plain():
  with grader() as shared:
    yield shared


@pytest.fixture(scope='module')
def obedient():
  """Its worker does what a response says (misbehaving.reward)."""
  with grader('reward') as shared:
    yield shared


def rewarded(reward, outcome, answer=None, name='reward'):
  """The verdict with the reward of one function, which has that name."""
  return Verdict(reward, outcome, answer=answer, components={name: reward})


def outcomes(verdicts):
  return [verdict.outcome for verdict in verdicts]


def wait_until(condition):
  """Waits until `condition()` is true; fails after PATIENCE."""
  deadline = time.monotonic() + PATIENCE
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def kill_worker(path):
  """Kills the worker that wrote its process id to `path`, once it has; it then hangs."""
  wait_until(path.exists)
  os.kill(int(path.read_text()), signal.SIGKILL)


# Order, keys and outcomes.


def test_verdicts_of_several_workers_are_complete_and_in_order():
  with grader(workers=2) as running:
    verdicts = running.grade([rf'\boxed{{{n % 3}}}' for n in range(60)], ['0'] * 60)
  assert verdicts == [(WRONG if n % 3 else RIGHT)._replace(answer=str(n % 3)) for n in range(60)]


def test_collect_gives_each_verdict_once_under_its_key_as_submitted(plain):
  plain.submit(('question', 1), Submission(lambda: r'\boxed{1}', '1'))
  plain.submit(('question', 0), Submission(lambda: r'\boxed{1}', '2'))
  assert plain.grade([r'\boxed{1}', 'none'], ['4', '1']) == [WRONG, NONE]  # leaves these alone
  assert list(plain.collect().items()) == [(('question', 1), RIGHT), (('question', 0), WRONG)]
  assert plain.collect() == {}


def test_while_responses_are_judged_it_can_be_asked_how_many_have_been(plain):
  assert plain.progress() == ''
  plain.submit(0, Submission(lambda: r'\boxed{1}', '1'))
  wait_until(lambda: plain.progress() == '1 of 1 graded')
  seen = []

  def text():
    wait_until(lambda: 'graded' in activity.now())
    seen.append(activity.now())
    return ''

  plain.submit(1, Submission(text, '1'))
  plain.collect()
  assert seen[0].startswith('1 of 2 graded (') and activity.now() == ''


def test_a_key_is_not_submitted_twice_and_each_response_has_an_answer(plain):
  plain.submit(0, Submission(str, ''))
  with pytest.raises(KeyError, match='key 0'):
    plain.submit(0, Submission(str, ''))
  assert plain.collect() == {0: NONE}
  with pytest.raises(ValueError, match='zip'):
    plain.grade(['a', 'b'], ['1'])


def test_any_text_reaches_the_verifier_and_the_reward(obedient):
  texts = ['\x00\n"\\', 'é\u2028𝟙', '\ud800']
  verdicts = obedient.grade([rf'{text}\boxed{{1}}' for text in texts], ['1'] * 3)
  assert verdicts == [rewarded(len(text) + 9.0, 'correct', '1') for text in texts]


def test_a_long_response_is_judged_by_its_end(plain):
  long = 'x' * 2000
  assert plain.grade(
    [rf'{long}</think>\boxed{{1}}', rf'{long}\boxed{{1}}', rf'</think>{long}\boxed{{1}}'], ['1'] * 3
  ) == [RIGHT, NONE, NONE]


def test_a_verdict_has_the_answer_as_the_response_gives_it_cut_where_it_is_long(plain):
  long = '+'.join(['1'] * 100)
  verdicts = plain.grade([r'So \boxed{ \frac12 }.', rf'\boxed{{{long}}}'], ['0.5', '100'])
  assert [verdict.answer for verdict in verdicts] == [r'\frac12', long[:64]]
  assert outcomes(verdicts) == ['correct', 'correct']  # the whole of it was judged


def test_a_verdict_says_of_the_text_whether_it_has_code_and_its_steps_are_valid():
  texts = ['one two', '```python\nprint(2)\n```', 'hang']
  with grader('reward', QUICK) as running:
    for n, text in enumerate(texts):
      check = [str.islower, None, str.isupper][n]
      running.submit(n, Submission(lambda text=text: text, '', check_steps=check))
    verdicts = running.collect().values()
  assert outcomes(verdicts) == ['no answer', 'no answer', 'timed out']
  assert [verdict.has_code_block for verdict in verdicts] == [False, True, False]
  assert [verdict.valid_steps for verdict in verdicts] == [True, None, False]


# What a response does to its worker.


def test_a_response_that_hangs_or_crashes_costs_only_its_own_verdict():
  fates = {
    'hang': ('timed out', 'no verdict after 1 s'),
    r'\boxed{1}': ('correct', ''),
    'crash': ('crashed', '2 workers died of it, the last with exit status -11'),
    r'\boxed{2}': ('wrong', ''),
    'raise': ('crashed', "tests.helpers.misbehaving:reward: KeyError: 'of the reward'"),
    'hog': ('crashed', 'tests.helpers.misbehaving:reward: MemoryError'),
    'spin': ('timed out', 'no verdict after 1 s'),
    r' \boxed{1}': ('correct', ''),
  }
  with grader('reward', QUICK, workers=2) as running:
    verdicts = running.grade(list(fates), ['1'] * 8)
  reasons = [verdict.reason.partition(' (/')[0] for verdict in verdicts]  # without file and line
  assert list(zip(outcomes(verdicts), reasons, strict=True)) == list(fates.values())
  assert [verdict.reward for verdict in verdicts] == [0, 9, 0, 9, 0, 0, 0, 10]


def test_a_stopped_worker_that_reads_nothing_times_out():
  with grader('pid', QUICK) as running:
    (pid,) = (int(verdict.reward) for verdict in running.grade([''], ['']))
    os.kill(pid, signal.SIGSTOP)
    verdicts = running.grade(['x' * 10**6, ''], ['', ''])
  assert outcomes(verdicts) == ['timed out', 'no answer'] and verdicts[1].reward != pid


def test_a_worker_killed_while_it_judges_loses_nothing(tmp_path, obedient):
  path = tmp_path / 'pid'
  responses = [rf'{n} \boxed{{1}}' for n in range(6)]
  responses[3] = rf'sleep_once {path}\boxed{{1}}'
  for n, response in enumerate(responses):
    obedient.submit(n, Submission(lambda response=response: response, '1'))
  kill_worker(pathlib.Path(str(path) + r'\boxed{1}'))
  assert obedient.collect() == {
    n: rewarded(len(response), 'correct', '1') for n, response in enumerate(responses)
  }


def test_a_worker_killed_while_idle_is_replaced_and_the_next_response_not_blamed(tmp_path):
  path = tmp_path / 'pid'
  with grader('pid') as running:
    pids = []
    for _ in range(2):
      (verdict,) = running.grade([''], [''])
      pids.append(int(verdict.reward))
      os.kill(pids[-1], signal.SIGKILL)
      wait_until(lambda: not is_running(pids[-1]))
    running.submit(0, Submission(lambda: f'sleep_once {path}', ''))
    kill_worker(path)  # the first death that counts
    assert outcomes(running.collect().values()) == ['no answer']
  assert len(set(pids)) == 2 and 0 not in pids


def test_a_worker_is_replaced_only_after_it_ran_out_of_memory():
  with grader('pid') as running:
    before, after = [
      {verdict.reward for verdict in running.grade(['', '', last], [''] * 3)} - {0.0}
      for last in ('raise', 'hog')
    ]
    assert len(before) == 1 and after == before
    (last,) = running.grade([''], [''])
  assert last.outcome == 'no answer' and last.reward not in before


def test_printed_text_is_no_verdict(capfd):
  with grader('reward') as running:
    assert running.grade(['print'], ['1']) == [rewarded(5.0, 'no answer')]
  assert capfd.readouterr().out == ''


# The worker's surroundings.


def test_a_worker_imports_no_jax():
  texts = ['jax jaxlib flax numpy.linalg exgrpo_jax.datatypes', 'exgrpo_jax.grading.verifier']
  with grader('imports') as running:
    assert [verdict.reward for verdict in running.grade(texts, ['1'] * 2)] == [0, 1]


def test_leaving_the_context_kills_busy_workers_at_once(tmp_path):
  path = tmp_path / 'pid'
  with grader('reward') as running:
    running.submit(0, Submission(lambda: f'sleep_once {path}', ''))  # would hang if this waited
    running.submit(1, Submission(str, ''))
    wait_until(path.exists)
    assert is_running(path.read_text())
  assert not is_running(path.read_text())
  with pytest.raises(concurrent.futures.CancelledError):  # without waiting for the time limit
    running.collect()


# The settings are written out, for what tiny.py imports takes seconds.
ORPHAN = f"""
import dataclasses, sys
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.settings import Config
config = dataclasses.replace(
  {tiny.GRADING!r}, workers=1, time_limit=600., rewards=('tests.helpers.misbehaving:reward',))
pool.Grader(config, verifier.ANYTHING).grade(['sleep_once ' + sys.argv[1]], [''])
"""


@pytest.mark.skipif(
  sys.platform != 'linux', reason='only Linux signals a busy process when its parent ends'
)
def test_a_busy_worker_ends_with_a_parent_that_is_killed(tmp_path):
  path = tmp_path / 'pid'
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_PLATFORMS': 'cpu'}
  with subprocess.Popen([sys.executable, '-c', ORPHAN, str(path)], env=env) as parent:
    try:
      wait_until(path.exists)
      worker = int(path.read_text())
      assert is_running(worker)
    finally:
      parent.kill()
  wait_until(lambda: not is_running(worker))


def test_a_verifier_of_ones_own_decides():
  with grader(verifier='tests.helpers.chance:Chance') as running:
    verdicts = running.grade([r'\boxed{1}', r'\boxed{1}'], ['8', '0'])  # always and never right
  assert outcomes(verdicts) == ['correct', 'wrong']
  assert [verdict.answer for verdict in verdicts] == [r'\boxed{1}'] * 2


# Rewards.


def test_a_reward_gets_answer_and_outcome_but_does_not_decide_the_outcome():
  with grader('outcome_of') as running:
    assert running.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', 'a', '1']) == [
      rewarded(1.0, 'correct', '1', 'outcome_of'),
      rewarded(12.0, 'wrong', '1', 'outcome_of'),
      rewarded(3.0, 'no answer', name='outcome_of'),
    ]


def test_a_reward_that_is_not_a_finite_number_counts_as_a_crash():
  with grader('worth') as running:
    verdicts = running.grade(['nan', 'inf', 'none', 'text', 'true', 'half'], [''] * 6)
  assert outcomes(verdicts) == ['crashed'] * 4 + ['no answer'] * 2
  assert [verdict.reward for verdict in verdicts] == [0, 0, 0, 0, 1, 0.5]
  assert verdicts[0].reason.startswith('tests.helpers.misbehaving:worth: ')


@pytest.mark.parametrize(
  ('batched', 'limit'),
  [((), 60), (('a:b',), 67)],  # with batch_timeout
)
def test_a_reward_that_hangs_is_refused_by_name_once_its_time_is_over(
  batched, limit, monkeypatch, capsys
):
  """After one attempt, during which the wait is explained every ten seconds."""
  clock = types.SimpleNamespace(now=100.0)

  class Hanging:
    """A worker that says of each reward that it imports it, and then nothing."""

    def __init__(self, _command, setup, _timeout):
      self.said = [{'trying': f"'{name}'", 'how': 'importing it'} for name in setup['rewards']]
      self.said = self.said or [{'asks': []}]

    def receive(self, deadline):
      if self.said:
        return self.said.pop(0)
      clock.now = deadline
      raise TimeoutError

    def close(self):
      pass

    kill = close

  monkeypatch.setattr(worker_slot, 'WorkerProcess', Hanging)
  monkeypatch.setattr(worker_slot, 'time', types.SimpleNamespace(monotonic=lambda: clock.now))
  config = dataclasses.replace(CONFIG, rewards=('a:b',), batched=batched, batch_timeout=7.0)
  with pytest.raises(InputError, match=f"^'a:b' cannot be used .*importing it.* {limit} s"):
    pool.check(config, VERIFIER)
  assert clock.now == 100 + limit
  assert capsys.readouterr().out.splitlines() == [
    f"'a:b': still importing it ({waited} s of {limit})" for waited in range(10, limit, 10)
  ]


def test_workers_that_do_not_start_end_the_run(monkeypatch):
  monkeypatch.setattr(workers, 'COMMAND', (sys.executable, '-c', 'raise SystemExit(7)'))
  with (
    grader() as running,
    pytest.raises(RuntimeError, match=r'did not start \(attempts: 3\): .*status 7'),
  ):
    running.grade([''], [''])
