"""Grading comes back whole and in order, whatever a response does to its worker."""

import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, rewards, verifier, worker
from tests.helpers.processes import is_running

VERIFIER = verifier.Config(require_think=False, require_box=True)
CONFIG = pool.Config(
  workers=1, time_limit=30.0, memory_limit=256, max_length=1000, max_failures=0.0, reward=''
)
QUICK = dataclasses.replace(CONFIG, time_limit=2.0)
RIGHT, WRONG, NONE = Verdict(1.0, 'correct'), Verdict(0.0, 'wrong'), Verdict(0.0, 'no answer')
PATIENCE = 60.0  # seconds for what must happen at once, on a machine that does other things


def grader(reward='', config=CONFIG, **changes):
  name = f'tests.helpers.misbehaving:{reward}' if reward else ''
  return pool.Grader(dataclasses.replace(config, reward=name, **changes), VERIFIER)


@pytest.fixture(scope='module')
def plain():
  with grader() as shared:
    yield shared


def outcomes(verdicts):
  return [verdict.outcome for verdict in verdicts]


def until(is_so):
  """Waits for `is_so()`; fails where it does not come."""
  end = time.monotonic() + PATIENCE
  while not is_so():
    assert time.monotonic() < end
    time.sleep(0.01)


# Order, keys and outcomes.


def test_verdicts_stand_in_the_order_of_the_responses(plain):
  assert plain.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', '2', '1']) == [RIGHT, WRONG, NONE]


def test_order_and_number_hold_among_several_workers():
  with grader(workers=2) as running:
    verdicts = running.grade([rf'\boxed{{{n % 3}}}' for n in range(200)], ['0'] * 200)
  assert verdicts == [WRONG if n % 3 else RIGHT for n in range(200)]


def test_collect_gives_each_verdict_once_under_its_key_as_submitted(plain):
  plain.submit(('question', 1), lambda: r'\boxed{1}', '1')
  plain.submit(('question', 0), lambda: r'\boxed{2}', '1')
  assert list(plain.collect().items()) == [(('question', 1), RIGHT), (('question', 0), WRONG)]
  assert plain.collect() == {}


def test_grading_a_list_leaves_what_was_submitted(plain):
  plain.submit(0, lambda: r'\boxed{1}', '1')
  assert plain.grade([r'\boxed{3}'], ['4']) == [WRONG]
  assert plain.collect() == {0: RIGHT}


def test_submit_does_not_wait_for_the_verdict(tmp_path):
  path = tmp_path / 'pid'
  with grader('reward') as running:
    running.submit(0, lambda: f'sleep_once {path}', '')  # would hang here if it waited
    until(path.exists)
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert outcomes(running.collect().values()) == ['no answer']


def test_a_key_is_not_submitted_twice(plain):
  plain.submit(0, str, '')
  with pytest.raises(KeyError, match='key 0'):
    plain.submit(0, str, '')
  assert plain.collect() == {0: NONE}


def test_responses_and_answers_are_as_many(plain):
  with pytest.raises(ValueError, match='zip'):
    plain.grade(['a', 'b'], ['1'])


@pytest.mark.parametrize('text', ['\x00\n"\\', 'é\u2028𝟙', '\ud800'])
def test_any_text_reaches_the_verifier_and_the_reward(text):
  with grader('reward') as running:
    (verdict,) = running.grade([rf'{text}\boxed{{1}}'], ['1'])
  assert verdict == Verdict(len(text) + 9.0, 'correct')


# Lengths.


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('x' * 10, 'x' * 10),
    ('y' * 9 + '</think>12', '</think>12'),  # only thought is cut
    ('y' * 9 + '</think>123', None),  # the end of the thought would be lost
    ('</think>' + 'y' * 20 + '</think>1', 'y</think>1'),
    ('<think>' + 'x' * 4, None),  # its last characters could look like an answer
  ],
  ids=['as_it_is', 'thought', 'long_solution', 'last_think', 'no_end'],
)
def test_a_long_response_loses_only_thought(response, expected):
  assert worker.bounded(response, 10) == expected


def test_a_long_response_is_judged_by_its_end(plain):
  long = 'x' * 2000
  assert plain.grade(
    [rf'{long}</think>\boxed{{1}}', rf'{long}\boxed{{1}}', rf'</think>{long}\boxed{{1}}'], ['1'] * 3
  ) == [RIGHT, NONE, NONE]


# What a response does to its worker.


def test_what_hangs_or_crashes_costs_only_its_own_verdict():
  responses = ['hang', r'\boxed{1}', 'crash', r'\boxed{2}', 'raise', 'hog', 'spin', r'\boxed{1}']
  with grader('reward', QUICK) as running:
    found = running.grade(responses, ['1'] * 8)
  assert outcomes(found) == [
    'timed out',
    'correct',
    'crashed',
    'wrong',
    'crashed',
    'crashed',
    'timed out',
    'correct',
  ]
  assert [verdict.reward for verdict in found] == [0, 9, 0, 9, 0, 0, 0, 9]
  assert [verdict.reason for verdict in found if verdict.reason] == [
    'no verdict after 2 s',
    '2 workers died of it, the last with exit status -11',
    "KeyError: 'of the reward'",
    'MemoryError',
    'no verdict after 2 s',
  ]


def test_a_batch_in_which_every_eighth_response_hangs_is_complete_and_else_right():
  with grader('reward', QUICK, workers=2) as running:
    found = running.grade(['hang' if n % 8 == 5 else r'\boxed{1}' for n in range(32)], ['1'] * 32)
  assert outcomes(found) == ['timed out' if n % 8 == 5 else 'correct' for n in range(32)]


def test_a_worker_that_is_stopped_and_reads_nothing_is_timed_out():
  with grader('pid', QUICK) as running:
    (pid,) = (int(verdict.reward) for verdict in running.grade([''], ['']))
    os.kill(pid, signal.SIGSTOP)
    found = running.grade(['x' * 10**6, ''], ['', ''])
  assert outcomes(found) == ['timed out', 'no answer'] and found[1].reward != pid


def test_a_worker_killed_from_outside_in_the_middle_loses_nothing(tmp_path):
  path = tmp_path / 'pid'
  responses = [rf'{n} \boxed{{1}}' for n in range(20)]
  responses[7] = rf'sleep_once {path}\boxed{{1}}'
  with grader('reward') as running:
    for n, response in enumerate(responses):
      running.submit(n, lambda response=response: response, '1')
    until(pathlib.Path(str(path) + r'\boxed{1}').exists)
    os.kill(int(pathlib.Path(str(path) + r'\boxed{1}').read_text()), signal.SIGKILL)
    found = running.collect()
  assert found == {n: Verdict(len(response), 'correct') for n, response in enumerate(responses)}


def test_workers_killed_while_idle_are_replaced():
  with grader('pid') as running:
    pids = []
    for _ in range(4):
      (verdict,) = running.grade([''], [''])
      pids.append(int(verdict.reward))
      os.kill(pids[-1], signal.SIGKILL)
      until(lambda: not is_running(pids[-1]))
  assert len(set(pids)) == 4 and 0 not in pids


def test_a_death_while_idle_is_not_laid_to_the_next_response(tmp_path):
  path = tmp_path / 'pid'
  with grader('pid') as running:
    (verdict,) = running.grade([''], [''])
    os.kill(int(verdict.reward), signal.SIGKILL)
    until(lambda: not is_running(int(verdict.reward)))
    running.submit(0, lambda: f'sleep_once {path}', '')
    until(path.exists)
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert outcomes(running.collect().values()) == ['no answer']


def test_a_worker_serves_on_until_it_was_out_of_memory():
  with grader('pid') as running:
    before, after = [
      {verdict.reward for verdict in running.grade([*[''] * 20, last], [''] * 21)} - {0.0}
      for last in ('raise', 'hog')
    ]
    assert len(before) == 1 and after == before
    (last,) = running.grade([''], [''])
  assert last.outcome == 'no answer' and last.reward not in before


def test_what_is_printed_is_no_verdict(capfd):
  with grader('reward') as running:
    assert running.grade(['print'], ['1']) == [Verdict(5.0, 'no answer')]
  assert capfd.readouterr().out == ''


# The worker's surroundings.


def test_a_worker_imports_no_jax():
  with grader('imports') as running:
    (verdict,) = running.grade(
      ['jax jaxlib flax tensorflow numpy.linalg exgrpo_jax.datatypes'], ['1']
    )
    (control,) = running.grade(['exgrpo_jax.grading.verifier tests.helpers.misbehaving'], ['1'])
  assert verdict.reward == 0 and control.reward == 2


def test_leaving_the_context_ends_the_workers_at_once_even_in_the_middle(tmp_path):
  path = tmp_path / 'pid'
  with grader('reward') as running:
    running.submit(0, lambda: f'sleep_once {path}', '')
    running.submit(1, str, '')
    until(path.exists)
    assert is_running(path.read_text())
  assert not is_running(path.read_text())
  with pytest.raises(concurrent.futures.CancelledError):  # nobody waited for the time limit
    running.collect()


ORPHANS = """
import pathlib, sys
from exgrpo_jax.grading import pool, verifier
config = pool.Config(2, 600., 256, 1000, 0., 'tests.helpers.misbehaving:reward')
running = pool.Grader(config, verifier.Config(False, False))
running.submit(0, lambda: 'sleep_once ' + sys.argv[1], '')  # a busy worker
running.submit(1, lambda: 'sleep_once ' + sys.argv[2], '')
running.collect()
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux tells a busy process of its parent')
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
  paths = [tmp_path / 'first', tmp_path / 'second']
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_PLATFORMS': 'cpu'}
  with subprocess.Popen([sys.executable, '-c', ORPHANS, *map(str, paths)], env=env) as parent:
    try:
      until(lambda: all(path.exists() for path in paths))
      workers = [int(path.read_text()) for path in paths]
      assert all(is_running(pid) for pid in workers)
    finally:
      parent.kill()
  until(lambda: not any(is_running(pid) for pid in workers))


# Rewards.


def test_a_reward_knows_the_answer_and_the_verifiers_word_which_alone_says_what_is_correct():
  with grader('outcome_of') as running:
    assert running.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', 'a', '1']) == [
      Verdict(1.0, 'correct'),
      Verdict(12.0, 'wrong'),
      Verdict(3.0, 'no answer'),
    ]


def test_a_reward_that_is_no_finite_number_has_crashed_and_says_why():
  with grader('worth') as running:
    found = running.grade(['nan', 'inf', 'none', 'text', 'true', 'half'], [''] * 6)
  assert outcomes(found) == ['crashed'] * 4 + ['no answer'] * 2
  assert [verdict.reward for verdict in found] == [0, 0, 0, 0, 1, 0.5]
  assert (
    found[0].reason
    == 'ValueError: tests.helpers.misbehaving:worth returned nan, not a finite number'
  )


@pytest.mark.parametrize(
  ('name', 'why'),
  [
    ('misbehaving', r"ValueError: it has not the form 'package\.module:function'"),
    ('nowhere_at_all:reward', "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    (
      'tests.helpers.misbehaving:nothing',
      "AttributeError: module 'tests.helpers.misbehaving' has no attribute 'nothing'",
    ),
    ('tests.helpers.misbehaving:two_arguments', 'TypeError: too many positional arguments'),
    ('tests.helpers.misbehaving:time', 'TypeError: .* is not a callable object'),
  ],
  ids=['form', 'module', 'function', 'arguments', 'callable'],
)
def test_a_reward_that_cannot_be_used_is_refused_by_name(name, why):
  with pytest.raises(
    InputError,
    match=rf"^config\.grading\.reward='{name}' cannot be used "
    rf"\({why}\): it must be 'package\.module:function'",
  ):
    pool.check(dataclasses.replace(CONFIG, reward=name), VERIFIER)


def test_a_reward_that_can_be_used_passes_the_check():
  pool.check(
    dataclasses.replace(CONFIG, reward='exgrpo_jax.grading.rewards:think_format'), VERIFIER
  )


def test_workers_that_do_not_start_end_the_run(monkeypatch):
  monkeypatch.setattr(pool, 'COMMAND', (sys.executable, '-c', 'raise SystemExit(7)'))
  with grader() as running, pytest.raises(RuntimeError, match='3 .*did not start: .*status 7'):
    running.grade([''], [''])


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('So it is 2.\n</think>\nThe answer is 2.', 1.0),
    ('So it is 2.', 0.0),
    ('<think>\nSo it is 2.\n</think>\nThe answer is 2.', 0.0),  # the prompt has opened it
    ('a</think>b</think>c', 0.0),
    ('a</think>b<think>', 0.0),
    ('\n</think>The answer is 2.', 0.0),
    ('So it is 2.</think>\n', 0.0),
  ],
)
def test_the_papers_format_is_one_end_of_thought_between_two_texts(response, expected):
  assert rewards.think_format(response, '2', 'wrong') == expected
