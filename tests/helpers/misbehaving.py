"""Code that makes a worker misbehave as a request says; it runs in the worker, so without jax."""

import os
import signal
import sys
import time

from exgrpo_jax.environments.environment import Observation


def act(text):
  """Do what the first word of a text says."""
  word, _, rest = text.partition(' ')
  if word == 'hang':
    time.sleep(600)
  elif word == 'spin':  # holds the GIL for longer than any test takes
    int('9' * 4300) ** (10**7)
  elif word == 'crash':
    os.kill(os.getpid(), signal.SIGSEGV)
  elif word == 'exit':
    os._exit(3)
  elif word == 'raise':
    raise KeyError('of the code')
  elif word == 'hog':
    bytearray(10**9)
  elif word == 'sleep_once':
    _sleep_unless_exists(rest, content=str(os.getpid()))
  elif word == 'print':
    print('{"outcome": "correct", "reward": 1}', flush=True)
    sys.stdin.read()
  elif word == 'import':
    assert not [name for name in rest.split() if name in sys.modules], rest


def reward(response, answer, outcome):
  """The response's length, once `act` is done."""
  del answer, outcome
  act(response)
  return len(response)


class Misbehaving:
  """An environment of one turn, which does what that says and answers with its process id."""

  def reset(self, task, seed):
    del seed
    return task.messages

  def step(self, response):
    act(response)
    return Observation(str(os.getpid()), done=True)


def worth(response, answer, outcome):
  """The value that the response names, else 0."""
  del answer, outcome
  return {
    'nan': float('nan'),
    'inf': float('inf'),
    'none': None,
    'text': '1',
    'true': True,
    'half': 0.5,
  }.get(response, 0.0)


def as_list(response, answer, outcome):
  """No number, which any response shows."""
  del answer, outcome
  return [float(len(response))]


def beyond_float32(outcome):
  """Larger than what advantages can be computed of."""
  return 1e39 if outcome == 'correct' else 0.0


def leaves(response):
  """Ends its process as a program would."""
  del response
  sys.exit(3)


def vanishes(response):
  """Ends its process at once."""
  del response
  os._exit(3)


def of_last_word(response, answer, outcome):
  """Fails where there is no word."""
  del answer, outcome
  return float(len(response.split()[-1]))


def always_fails(response, answer, outcome):
  """Passes the check at the start, and no other response."""
  del answer, outcome
  if 'So it is' not in response and response:
    raise OSError('the service that this asks is down')
  return 0.0


def outcome_of(response, answer, outcome):
  """1, 2 or 3 for the verifier's outcome, plus 10 where the answer is 'a'."""
  del response
  return 1 + ('correct', 'wrong', 'no answer').index(outcome) + 10 * (answer == 'a')


def pid(response, answer, outcome):
  """The worker's process id, once `act` is done."""
  del answer, outcome
  act(response)
  return os.getpid()


def _sleep_unless_exists(path, content):
  """Writes a file and sleeps; returns at once where the file exists, as the second time."""
  if not os.path.exists(path):
    with open(path + '.new', 'w') as file:
      file.write(content)
    os.replace(path + '.new', path)
    time.sleep(600)


def of_trl(completions, **kwargs):
  """A reward for TRL."""
  del kwargs
  return [0.0 for _ in completions]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
  """A reward for verl."""
  del data_source, solution_str, ground_truth, extra_info
  return 0.0


def slow(response):
  """Takes its time over any response."""
  del response
  time.sleep(0.3)
  return 0.0


_CALLS: list[int] = []


def slow_at_first(response):
  """Takes its time over the fourth call of its first process, which the check limits."""
  del response
  _CALLS.append(0)
  if len(_CALLS) == 4:
    _sleep_unless_exists(os.environ['SLOW_AT_FIRST'], '')
  return 0.0


def broken(response):
  """Raises within a function that it calls."""
  return {response: 1.0}['score']


def of_position(response, /):
  """No reward: arguments are given by name."""
  del response
  return 0.0


# ---- Of a batch: these take and return lists ----

_calls = 0


def service(response, outcome):
  """Does what a response of the batch says, unless its file exists; tells who answered how often.

  Returns for each response its place in the batch, plus ten times the calls of this process.
  """
  global _calls
  for text, of_verifier in zip(response, outcome):
    word, _, path = text.partition(' ')
    if of_verifier == 'crashed':
      raise AssertionError('what could not be graded has no rewards')
    if word in ('hang', 'die', 'fail') and not (path and os.path.exists(path)):
      if path:
        open(path, 'w').close()
      {'hang': lambda: time.sleep(600), 'die': lambda: os._exit(3), 'fail': _fail}[word]()
  _calls += 1
  return [place + 10 * _calls for place in range(len(response) - ('few' in response))]


def _fail():
  raise OSError('the service is down')


class Undecided:
  """A verifier whose outcome is none."""

  def judge(self, response, question):
    del response, question
    return 'perhaps', None
