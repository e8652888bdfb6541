"""Every benchmark of an accelerator, one after the other, and a page that says what came out."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import benchmark_page, measurement
from exgrpo_jax.performance.benchmark_page import Outcome
from exgrpo_jax.performance.benchmark_parts import Part, device_part, parts

# A part may take so many times its own estimate, and at least so many seconds.
_PATIENCE, _LEAST_LIMIT = 4, 120
_ERROR = re.compile(r'(error: |[\w.]*(Error|Exception|Interrupt|Exit)\b)')


class Ended(NamedTuple):
  """How a command ended."""

  status: int | None  # None: it ran out of time
  output: str


def check_out(path: str | None, flag: str = 'out') -> str:
  """`path` where a file can be written there; else InputError, which names the flag."""
  if not path:
    raise InputError('--out is needed: the page to write, e.g. --out=report.md.')
  folder = os.path.dirname(os.path.abspath(path))
  try:
    if os.path.isdir(path):
      raise IsADirectoryError('it is a folder')
    if os.path.exists(path) and not os.access(path, os.W_OK):
      raise PermissionError('the file there is read-only')
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise InputError(
      f'--{flag}={path} cannot be written ({error}); all results go there, so name a file in a '
      'folder that exists and can be written into.'
    ) from error
  return path


def run(out: str, shape: str | None, minutes: float) -> bool:
  """Runs all parts and writes the page; whether none failed, by itself or in a check.

  The page is written anew after each part, so that a machine that is lost leaves what it measured.

  Args:
    out: the page's path.
    shape: one of SHAPES; by default the platform's.
    minutes: for all parts together; what would take longer is shrunk or skipped.
  """
  started = time.monotonic()

  def seconds_left() -> float:
    return 60 * minutes - (time.monotonic() - started)

  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as folder:
    outcomes = [_run_part(device_part(shape), seconds_left(), folder)]
    facts = measurement.read_facts(_facts_file(folder))
    remaining = parts(facts, shape)
    while True:
      page = benchmark_page.text(
        facts, outcomes, [part.name for part in remaining], minutes, time.monotonic() - started
      )
      with open(out, 'w') as file:
        file.write(page)
      if not remaining:
        break
      outcomes.append(_run_part(remaining.pop(0), seconds_left(), folder))
  good = all(outcome.verdict != 'FAILED' for outcome in outcomes)
  print(f'{out}: {benchmark_page.summary(outcomes)}', flush=True)
  return good


def _run_part(part: Part, seconds_left: float, folder: str) -> Outcome:
  """Runs a part, smaller or not at all where the time is short, and prints how it went."""
  note = ''
  if seconds_left < part.seconds / 2:
    note = (
      f'skipped: it takes about {part.seconds:.0f} s, and {max(0, seconds_left):.0f} s are left'
    )
    print(f'{part.name}: {note}', flush=True)
    return Outcome(part, [], 0.0, note=note)
  if seconds_left < part.seconds and part.can_shrink:
    part = part.shrunk()
    note = 'shrunk to responses of half the length and one repeat, for the time that was left'
  print(f'{part.name}: about {part.seconds:.0f} s, {seconds_left:.0f} s are left', flush=True)
  file = os.path.join(folder, 'measurements.json')
  started = time.monotonic()
  limit = min(seconds_left, max(_LEAST_LIMIT, _PATIENCE * part.seconds))
  ended = execute([*part.command, f'--json={file}', f'--facts={_facts_file(folder)}'], limit)
  seconds = time.monotonic() - started
  measurements = measurement.read(file)
  with contextlib.suppress(FileNotFoundError):
    os.remove(file)  # the next part must not be taken to have written it
  error = ''
  if ended.status is None:
    error = f'stopped after {limit:.0f} s; its last line: {last_line(ended.output)}'
  elif ended.status or not measurements:
    error = f'exit status {ended.status}: {last_line(ended.output)}'
  outcome = Outcome(part, measurements, seconds, note=note, error=error)
  measurement.print_lines(measurements)
  print(f'{part.name}: {outcome.verdict} after {seconds:.0f} s', flush=True)
  return outcome


def _facts_file(folder: str) -> str:
  """Where the first part writes what it runs on."""
  return os.path.join(folder, 'facts.json')


def execute(command: Sequence[str], seconds: float) -> Ended:
  """Runs a command in a session of its own, which ends with it, for at most so many seconds."""
  with tempfile.TemporaryFile('w+', errors='replace') as output:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
      status = None
    finally:
      if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)  # what it has started too
        process.wait()
    output.seek(0)
    return Ended(status, output.read())


def last_line(output: str) -> str:
  """The last line that names an error, else the last that is not empty."""
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  errors = [line for line in lines if _ERROR.match(line)]
  return (errors or lines or ['it printed nothing'])[-1]
