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
from exgrpo_jax.grading import pool, verifier, worker_slot
from exgrpo_jax.grading.pool import Submission
from exgrpo_jax.runtime import activity
from tests.helpers import tiny
from tests.helpers.processes import is_running

VERIFIER = verifier.Config(require_think=False, require_box=True)
CONFIG = dataclasses.replace(tiny.GRADING, workers=1, time_limit=30.0)
QUICK = dataclasses.replace(CONFIG, time_limit=2.0)
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


# Order, keys and outcomes.


def test_verdicts_are_in_the_order_of_the_responses(plain):
  assert plain.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', '2', '1']) == [RIGHT, WRONG, NONE]


def test_verdicts_of_several_workers_are_complete_and_in_order():
  with grader(workers=2) as running:
    verdicts = running.grade([rf'\boxed{{{n % 3}}}' for n in range(200)], ['0'] * 200)
  assert verdicts == [(WRONG if n % 3 else RIGHT)._replace(answer=str(n % 3)) for n in range(200)]


def test_collect_gives_each_verdict_once_under_its_key_as_submitted(plain):
  plain.submit(('question', 1), Submission(lambda: r'\boxed{1}', '1'))
  plain.submit(('question', 0), Submission(lambda: r'\boxed{1}', '2'))
  assert list(plain.collect().items()) == [(('question', 1), RIGHT), (('question', 0), WRONG)]
  assert plain.collect() == {}


def test_grading_a_list_leaves_alone_what_was_submitted(plain):
  plain.submit(0, Submission(lambda: r'\boxed{1}', '1'))
  assert plain.grade([r'\boxed{1}'], ['4']) == [WRONG]
  assert plain.collect() == {0: RIGHT}


def test_submit_does_not_wait_for_the_verdict(tmp_path):
  path = tmp_path / 'pid'
  with grader('reward') as running:
    running.submit(0, Submission(lambda: f'sleep_once {path}', ''))  # would hang if it waited
    wait_until(path.exists)
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert outcomes(running.collect().values()) == ['no answer']


def test_while_responses_are_judged_it_can_be_asked_how_many_have_been(plain):
  assert plain.progress() == ''
  plain.submit(0, Submission(lambda: r'\boxed{1}', '1'))
  wait_until(lambda: plain.progress() == '1 of 1 graded')
  seen = []

  def text():
    seen.append(activity.now())
    return ''

  waiting = Submission(lambda: wait_until(lambda: 'graded' in activity.now()) or text(), '1')
  plain.submit(1, waiting)
  plain.collect()
  assert seen[0].startswith('1 of 2 graded (') and activity.now() == ''


def test_a_key_is_not_submitted_twice(plain):
  plain.submit(0, Submission(str, ''))
  with pytest.raises(KeyError, match='key 0'):
    plain.submit(0, Submission(str, ''))
  assert plain.collect() == {0: NONE}


def test_there_must_be_an_answer_for_each_response(plain):
  with pytest.raises(ValueError, match='zip'):
    plain.grade(['a', 'b'], ['1'])


@pytest.mark.parametrize('text', ['\x00\n"\\', 'é\u2028𝟙', '\ud800'])
def test_any_text_reaches_the_verifier_and_the_reward(text):
  with grader('reward') as running:
    (verdict,) = running.grade([rf'{text}\boxed{{1}}'], ['1'])
  assert verdict == rewarded(len(text) + 9.0, 'correct', '1')


def test_a_long_response_is_judged_by_its_end(plain):
  long = 'x' * 2000
  assert plain.grade(
    [rf'{long}</think>\boxed{{1}}', rf'{long}\boxed{{1}}', rf'</think>{long}\boxed{{1}}'], ['1'] * 3
  ) == [RIGHT, NONE, NONE]


def test_a_verdict_has_the_answer_as_the_response_gives_it_cut_where_it_is_long(plain):
  long = '+'.join(['1'] * 100)
  verdicts = plain.grade(
    [r'So \boxed{ \frac12 }.', 'none', rf'\boxed{{{long}}}'], ['0.5', '1', '100']
  )
  assert [verdict.answer for verdict in verdicts] == [r'\frac12', None, long[:64]]
  assert outcomes(verdicts) == ['correct', 'no answer', 'correct']  # the whole of it was judged


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
  responses = ['hang', r'\boxed{1}', 'crash', r'\boxed{2}', 'raise', 'hog', 'spin', r'\boxed{1}']
  with grader('reward', QUICK) as running:
    verdicts = running.grade(responses, ['1'] * 8)
  assert outcomes(verdicts) == [
    'timed out',
    'correct',
    'crashed',
    'wrong',
    'crashed',
    'crashed',
    'timed out',
    'correct',
  ]
  assert [verdict.reward for verdict in verdicts] == [0, 9, 0, 9, 0, 0, 0, 9]
  assert [verdict.reason for verdict in verdicts if verdict.reason] == [
    'no verdict after 2 s',
    '2 workers died of it, the last with exit status -11',
    "tests.helpers.misbehaving:reward: KeyError: 'of the reward'",
    'tests.helpers.misbehaving:reward: MemoryError',
    'no verdict after 2 s',
  ]


def test_when_every_eighth_response_hangs_the_others_are_judged():
  with grader('reward', QUICK, workers=2) as running:
    verdicts = running.grade(
      ['hang' if n % 8 == 5 else r'\boxed{1}' for n in range(32)], ['1'] * 32
    )
  assert outcomes(verdicts) == ['timed out' if n % 8 == 5 else 'correct' for n in range(32)]


def test_a_stopped_worker_that_reads_nothing_times_out():
  with grader('pid', QUICK) as running:
    (pid,) = (int(verdict.reward) for verdict in running.grade([''], ['']))
    os.kill(pid, signal.SIGSTOP)
    verdicts = running.grade(['x' * 10**6, ''], ['', ''])
  assert outcomes(verdicts) == ['timed out', 'no answer'] and verdicts[1].reward != pid


def test_a_worker_killed_while_it_judges_loses_nothing(tmp_path):
  path = tmp_path / 'pid'
  responses = [rf'{n} \boxed{{1}}' for n in range(20)]
  responses[7] = rf'sleep_once {path}\boxed{{1}}'
  with grader('reward') as running:
    for n, response in enumerate(responses):
      running.submit(n, Submission(lambda response=response: response, '1'))
    wait_until(pathlib.Path(str(path) + r'\boxed{1}').exists)
    os.kill(int(pathlib.Path(str(path) + r'\boxed{1}').read_text()), signal.SIGKILL)
    verdicts = running.collect()
  assert verdicts == {
    n: rewarded(len(response), 'correct', '1') for n, response in enumerate(responses)
  }


def test_workers_killed_while_idle_are_replaced():
  with grader('pid') as running:
    pids = []
    for _ in range(4):
      (verdict,) = running.grade([''], [''])
      pids.append(int(verdict.reward))
      os.kill(pids[-1], signal.SIGKILL)
      wait_until(lambda: not is_running(pids[-1]))
  assert len(set(pids)) == 4 and 0 not in pids


def test_a_death_while_idle_is_not_blamed_on_the_next_response(tmp_path):
  path = tmp_path / 'pid'
  with grader('pid') as running:
    (verdict,) = running.grade([''], [''])
    os.kill(int(verdict.reward), signal.SIGKILL)
    wait_until(lambda: not is_running(int(verdict.reward)))
    running.submit(0, Submission(lambda: f'sleep_once {path}', ''))
    wait_until(path.exists)
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert outcomes(running.collect().values()) == ['no answer']


def test_a_worker_is_replaced_only_after_it_ran_out_of_memory():
  with grader('pid') as running:
    before, after = [
      {verdict.reward for verdict in running.grade([*[''] * 20, last], [''] * 21)} - {0.0}
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
  with grader('imports') as running:
    (verdict,) = running.grade(
      ['jax jaxlib flax tensorflow numpy.linalg exgrpo_jax.datatypes'], ['1']
    )
    (control,) = running.grade(['exgrpo_jax.grading.verifier tests.helpers.misbehaving'], ['1'])
  assert verdict.reward == 0 and control.reward == 2


def test_leaving_the_context_kills_busy_workers_at_once(tmp_path):
  path = tmp_path / 'pid'
  with grader('reward') as running:
    running.submit(0, Submission(lambda: f'sleep_once {path}', ''))
    running.submit(1, Submission(str, ''))
    wait_until(path.exists)
    assert is_running(path.read_text())
  assert not is_running(path.read_text())
  with pytest.raises(concurrent.futures.CancelledError):  # without waiting for the time limit
    running.collect()


# The settings are written out, for what tiny.py imports takes seconds.
ORPHANS = f"""
import dataclasses, sys
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.pool import Submission
from exgrpo_jax.grading.settings import Config
config = dataclasses.replace(
  {tiny.GRADING!r}, workers=2, time_limit=600., rewards=('tests.helpers.misbehaving:reward',))
running = pool.Grader(config, verifier.Config(require_think=False, require_box=False))
running.submit(0, Submission(lambda: 'sleep_once ' + sys.argv[1], ''))  # a busy worker
running.submit(1, Submission(lambda: 'sleep_once ' + sys.argv[2], ''))
running.collect()
"""


@pytest.mark.skipif(
  sys.platform != 'linux', reason='only Linux signals a busy process when its parent ends'
)
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
  paths = [tmp_path / 'first', tmp_path / 'second']
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_PLATFORMS': 'cpu'}
  with subprocess.Popen([sys.executable, '-c', ORPHANS, *map(str, paths)], env=env) as parent:
    try:
      wait_until(lambda: all(path.exists() for path in paths))
      workers = [int(path.read_text()) for path in paths]
      assert all(is_running(pid) for pid in workers)
    finally:
      parent.kill()
  wait_until(lambda: not any(is_running(pid) for pid in workers))


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
  assert (
    verdicts[0].reason
    == 'tests.helpers.misbehaving:worth: ValueError: returned nan, not a finite number'
  )


@pytest.mark.parametrize(
  ('name', 'why'),
  [
    (':reward', r"ValueError: it does not have the form 'package\.module:function'"),
    ('nowhere_at_all:reward', "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    (
      'tests.helpers.misbehaving:nothing',
      "AttributeError: module 'tests.helpers.misbehaving' has no attribute 'nothing'",
    ),
    (
      'tests.helpers.misbehaving:of_position',
      "ValueError: its parameter 'response' cannot be given by name",
    ),
    ('tests.helpers.misbehaving:time', 'TypeError: .* is not a callable object'),
    (
      'tests.helpers.misbehaving:as_list',
      r"ValueError: tried on \(.*, '1', 'correct'\): ValueError: returned \[19\.0\], not a number",
    ),
    (
      'tests.helpers.misbehaving:leaves',
      r"ValueError: tried on \(.*, '1', 'correct'\): SystemExit: 3",
    ),
    (
      'tests.helpers.misbehaving:of_last_word',
      r"ValueError: tried on \('', '1', 'no answer'\): IndexError: list index out of range",
    ),
  ],
  ids=['form', 'module', 'function', 'arguments', 'callable', 'type', 'exit', 'empty_response'],
)
def test_a_reward_that_cannot_be_used_is_refused_by_name(name, why):
  with pytest.raises(
    InputError,
    match=rf"^config\.grading\.rewards: '{name}' cannot be used "
    rf"\({why}\): it must be 'package\.module:function'",
  ):
    pool.check(dataclasses.replace(CONFIG, rewards=('correctness', name)), VERIFIER)


def test_a_reward_that_ends_its_process_is_refused_by_name():
  name = 'tests.helpers.misbehaving:vanishes'
  with pytest.raises(InputError) as refused:
    pool.check(dataclasses.replace(CONFIG, rewards=('correctness', name)), VERIFIER)
  assert str(refused.value) == (
    f"config.grading.rewards: '{name}' cannot be used (its process ended with exit status 3, while "
    'trying it on three responses): as a grading process starts, it imports its rewards and tries '
    'each on three responses, for which it has 60 s.'
  )


@pytest.fixture
def hanging(monkeypatch):
  """The clock of workers that say of a reward that they import it, and then nothing."""
  clock = types.SimpleNamespace(now=100.0)

  class Hanging:
    def __init__(self, command, setup):
      del command
      self.said = [{'trying': name, 'how': 'importing it'} for name in setup['rewards']]
      self.said = self.said or [{'asks': []}]

    def receive(self, deadline):
      if self.said:
        return self.said.pop(0)
      clock.now = deadline
      raise TimeoutError

    def kill(self):
      pass

    close = kill

  monkeypatch.setattr(worker_slot, 'WorkerProcess', Hanging)
  monkeypatch.setattr(worker_slot, 'time', types.SimpleNamespace(monotonic=lambda: clock.now))
  return clock


@pytest.mark.parametrize(
  ('batched', 'limit', 'of_batches'),
  [((), 60, ''), (('a:b',), 67, ', of which config.grading.batch_timeout is a part')],
)
def test_a_reward_that_hangs_is_refused_by_name_once_its_time_is_over(
  batched, limit, of_batches, hanging, capsys
):
  """After one attempt, during which the wait is explained every ten seconds."""
  config = dataclasses.replace(CONFIG, rewards=('a:b',), batched=batched, batch_timeout=7.0)
  with pytest.raises(InputError) as refused:
    pool.check(config, VERIFIER)
  assert str(refused.value) == (
    f"config.grading.rewards: 'a:b' cannot be used (not ready after {limit} s, while importing "
    'it): as a grading process starts, it imports its rewards and tries each on three responses, '
    f'for which it has {limit} s{of_batches}.'
  )
  assert hanging.now == 100 + limit
  assert capsys.readouterr().out.splitlines() == [
    f"config.grading.rewards: 'a:b': still importing it ({waited} s of {limit})"
    for waited in range(10, limit, 10)
  ]


def test_a_reward_that_can_be_used_passes_the_check():
  pool.check(
    dataclasses.replace(CONFIG, rewards=('exgrpo_jax.grading.rewards:think_format',)), VERIFIER
  )


def test_workers_that_do_not_start_end_the_run(monkeypatch):
  monkeypatch.setattr(worker_slot, 'COMMAND', (sys.executable, '-c', 'raise SystemExit(7)'))
  with (
    grader() as running,
    pytest.raises(RuntimeError, match=r'did not start \(attempts: 3\): .*status 7'),
  ):
    running.grade([''], [''])
