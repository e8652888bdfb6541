"""Rewards that do to a worker what a response says, for test_grading.py. No jax here."""

import os
import signal
import sys
import time


def reward(response, answer, outcome):
  """What the first word of the response says; else the number of characters."""
  word, _, rest = response.partition(' ')
  if word == 'hang':
    time.sleep(600)
  elif word == 'spin':  # holds the interpreter's lock for longer than any test
    int('9' * 4300) ** (10**7)
  elif word == 'crash':
    os.kill(os.getpid(), signal.SIGSEGV)
  elif word == 'raise':
    raise KeyError('of the reward')
  elif word == 'hog':
    bytearray(10**9)
  elif word == 'sleep_once':  # the second time the file is there
    _leave(rest, str(os.getpid()))
  elif word == 'print':
    print('{"outcome": "correct", "reward": 1}', flush=True)
    sys.stdin.read()
  return len(response)


def worth(response, answer, outcome):
  """The response as a Python number where it is one; it is written by the test."""
  return {
    'nan': float('nan'),
    'inf': float('inf'),
    'none': None,
    'text': '1',
    'true': True,
    'half': 0.5,
  }[response]


def outcome_of(response, answer, outcome):
  """1, 2, 3 by the verifier's word, 10 more where the answer is 'a'."""
  return 1 + ('correct', 'wrong', 'no answer').index(outcome) + 10 * (answer == 'a')


def imports(response, answer, outcome):
  """How many of the modules named in the response have been imported."""
  return sum(name in sys.modules for name in response.split())


def pid(response, answer, outcome):
  """The worker's; 'hog' and 'raise' come first, 'sleep_once' too but for its end."""
  reward(response, answer, outcome)
  return os.getpid()


def _leave(path, text):
  """Writes a file and waits, unless the file is there."""
  if not os.path.exists(path):
    with open(path + '.new', 'w') as file:
      file.write(text)
    os.replace(path + '.new', path)
    time.sleep(600)


def two_arguments(response, answer):
  return 0.0
