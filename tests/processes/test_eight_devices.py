"""The checks on eight devices: one test per check, and a single process for all checks."""

import subprocess
import sys

import pytest

from tests.helpers import checks, devices
from tests.helpers.paths import REPOSITORY
from tests.processes import eight_devices

pytestmark = pytest.mark.full
NAMES = list(eight_devices.BY_NAME)


def run_python(*arguments):
  return subprocess.run(
    [sys.executable, '-X', 'faulthandler', *arguments],
    cwd=REPOSITORY,
    env=devices.environment(8),
    text=True,
    capture_output=True,
    check=False,
  )


@pytest.fixture(scope='module')
def process():
  """The finished process that ran all checks."""
  return run_python('-m', 'tests.processes.eight_devices')


@pytest.fixture(scope='module')
def failures(process):
  return checks.failures(NAMES, process)


@pytest.mark.parametrize('name', NAMES)
def test_on_eight_devices(name, failures):
  if failures[name]:
    pytest.fail(failures[name], pytrace=False)


def test_all_checks_finish_and_xla_never_gathers_an_array_to_change_its_layout(process, failures):
  """If XLA gives up on a layout and gathers a whole array, it warns on standard error."""
  assert process.returncode == 0, process.stderr
  assert failures['gradients_are_those_of_one_device'] is None  # so its programs were compiled
  assert failures['each_device_holds_an_eighth_of_every_parameter_and_moment'] is None
  assert 'rematerialization' not in process.stderr, process.stderr


def test_a_check_that_ends_the_process_fails_with_all_later_checks():
  ended = run_python(
    '-c',
    """
import os
from tests.helpers import checks

def passes():
  print('not a report')

def raises():
  raise ValueError('a reason')

def ends_the_process():
  os.abort()

def comes_after():
  pass

checks.run([passes, raises, ends_the_process, comes_after])
""",
  )
  names = ['passes', 'raises', 'ends_the_process', 'comes_after']
  failures = checks.failures(names, ended)
  assert list(failures) == names
  assert failures['passes'] is None
  assert 'ValueError: a reason' in failures['raises']
  for name in ('ends_the_process', 'comes_after'):
    assert 'exit status -6 in ends_the_process' in failures[name]
    assert 'Fatal Python error: Aborted' in failures[name]
