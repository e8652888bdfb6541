"""Checks that run one after the other in a process of their own, and report to the tests there.

A check is a function without arguments that raises if what its name says does not hold.
"""

import contextlib
import json
import sys
import time
import traceback


class Checks(list):
  """The checks of a module, in its order."""

  def add(self, check):
    """A decorator."""
    self.append(check)
    return check


@contextlib.contextmanager
def case(name):
  """A case of a check; what it raises says in which."""
  try:
    yield
  except Exception as error:
    error.add_note(f'This was the case of {name}.')
    raise


def run(checks):
  """Runs every check, whatever came of those before it.

  Writes one line of JSON per check to standard output: its name, how long it took, and its
  traceback or null. What a check prints goes to standard error.
  """
  for check in checks:
    start, failure = time.monotonic(), None
    try:
      with contextlib.redirect_stdout(sys.stderr):
        check()
    except Exception:
      failure = traceback.format_exc()
    seconds = round(time.monotonic() - start, 1)
    print(
      json.dumps({'check': check.__name__, 'seconds': seconds, 'traceback': failure}), flush=True
    )


def failures(names, process):
  """Why each check failed, or None if it passed.

  `run` ran the checks of these names, in this order, in a subprocess.CompletedProcess. If it did
  not come to its end, the check that it was in fails, and so do those after it, with its standard
  error.
  """
  reports = [json.loads(line) for line in process.stdout.splitlines()]
  reasons = {report['check']: report['traceback'] for report in reports}
  missing = [name for name in names if name not in reasons]
  for name in missing:
    reasons[name] = (
      f'The process ended with exit status {process.returncode} in {missing[0]}, '
      f'without a report of {name}. Its standard error:\n{process.stderr}'
    )
  return reasons
