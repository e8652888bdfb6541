"""Rewards that take a batch get the right ones, and a service that fails costs what it must."""

import dataclasses
import re

import pytest

from exgrpo_jax.grading import pool, verifier, workers
from tests.helpers import tiny

SERVICE = 'tests.helpers.misbehaving:service'
VERIFIER = verifier.Config(require_think=False, require_box=True)
CONFIG = dataclasses.replace(
  tiny.GRADING,
  workers=2,
  time_limit=30.0,
  rewards=('correctness', SERVICE),
  weights=(100.0, 1.0),
  batched=(SERVICE,),
  batch_size=4,
  batch_timeout=30.0,
)
RIGHT = r'\boxed{1}'


def grade(responses, **changes):
  with pool.Grader(dataclasses.replace(CONFIG, **changes), VERIFIER) as running:
    return running.grade(responses, ['1'] * len(responses))


def outcomes(verdicts):
  return [verdict.outcome for verdict in verdicts]


def test_batches_are_made_in_the_order_of_the_responses_and_summed_by_weight():
  """Of ten the batches are 4, 4 and 2, the second to fourth of a process that was tried first."""
  verdicts = grade([RIGHT, 'none'] * 5)
  expected = [20, 21, 22, 23, 30, 31, 32, 33, 40, 41]
  assert [verdict.components for verdict in verdicts] == [
    {'correctness': float(n % 2 == 0), 'service': expected[n]} for n in range(10)
  ]
  assert [verdict.reward for verdict in verdicts] == [
    100 * (n % 2 == 0) + expected[n] for n in range(10)
  ]


def test_a_response_that_cannot_be_graded_is_not_in_the_batch():
  failing = 'tests.helpers.misbehaving:reward'  # its length, unless told otherwise
  verdicts = grade(
    [RIGHT, 'raise', RIGHT], rewards=('correctness', SERVICE, failing), weights=(1.0, 1.0, 0.0)
  )
  assert outcomes(verdicts) == ['correct', 'crashed', 'correct']
  assert [verdict.reward for verdict in verdicts] == [21, 0, 22]
  assert verdicts[1].components is None


@pytest.mark.parametrize('word', ['hang', 'die', 'fail'])
def test_a_service_that_fails_once_is_asked_again(word, tmp_path):
  """After an exception in the same process, else in a new one."""
  verdicts = grade([RIGHT, f'{word} {tmp_path}/once'], batch_timeout=1.0)
  assert outcomes(verdicts) == ['correct', 'no answer']
  assert [verdict.components['service'] for verdict in verdicts] == [20, 21]


def test_a_service_that_hangs_costs_what_is_left_of_the_step_and_is_asked_again_in_the_next():
  responses = [RIGHT] * 5 + ['hang'] + [RIGHT] * 5  # the second batch hangs
  with pool.Grader(dataclasses.replace(CONFIG, batch_timeout=1.0), VERIFIER) as running:
    verdicts = running.grade(responses, ['1'] * 11)
    (later,) = running.grade([RIGHT], ['1'])
  assert outcomes(verdicts) == ['correct'] * 4 + ['timed out'] * 7
  assert {(v.reward, v.reason, v.components) for v in verdicts[4:]} == {
    (0.0, f'{SERVICE}: no rewards after 1 s', None)
  }
  assert later.outcome == 'correct' and later.reward == 120


def test_an_exception_costs_its_batch_alone_and_names_the_function():
  verdicts = grade([RIGHT] * 4 + ['fail'] + [RIGHT] * 7)
  assert outcomes(verdicts) == ['correct'] * 4 + ['crashed'] * 4 + ['correct'] * 4
  (reason,) = {verdict.reason for verdict in verdicts[4:8]}
  assert re.fullmatch(rf'{SERVICE}: OSError: the service is down \(/.*\.py:\d+\)', reason)
  (few,) = grade(['few'])
  assert few.reason == f'{SERVICE}: ValueError: returned 0 numbers for 1 response'


def test_a_service_that_is_not_ready_in_time_has_timed_out(monkeypatch):
  """So grading/timed_out counts all that the clock decided."""

  def late(*args, is_batched=False):
    started = program(*args, is_batched=is_batched)
    # No process is ready by then.
    return dataclasses.replace(started, timeout=0.01) if is_batched else started

  program = workers.program
  monkeypatch.setattr(workers, 'program', late)
  (verdict,) = grade([RIGHT])
  assert verdict.outcome == 'timed out' and 'not ready after 0.01 s' in verdict.reason
