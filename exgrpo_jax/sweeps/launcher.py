"""Commands run on this machine, a few at a time: each with a log, none able to stop the others."""

import collections
import contextlib
import datetime
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_POLL = 0.1  # seconds
# Behind an exception's own line others may follow: notes of JAX, warnings while Python ends.
_ERROR_LINE = re.compile(r'error: |[\w.]*(Error|Exception|Interrupt|Exit)\b')


class Job(NamedTuple):
  """A command to run."""

  name: str
  command: Sequence[str]
  log: str  # the file that its output is added to


class Outcome(NamedTuple):
  """What became of jobs; those not named have ended with exit status 0."""

  failed: dict[str, str]  # by name: how it ended, with the last line of its log
  unfinished: list[str]  # names of those that an interruption ended, or kept from starting


class _Running(NamedTuple):
  place: str
  job: Job
  process: subprocess.Popen
  log_start: int  # bytes in the log when it started
  since: float


def run(jobs: Sequence[Job], parallel: int, kept_open: Sequence[int] = ()) -> Outcome:
  """Runs `jobs`, `parallel` at a time, and says on stdout how each goes.

  The first SIGINT, SIGTERM or SIGHUP ends the running ones by SIGTERM and waits for
  them; a second one kills them. File descriptors `kept_open` are every job's too.
  """
  waiting, running = collections.deque(enumerate(jobs, 1)), []
  failed, unfinished, heard = {}, [], 0
  with _interruptions() as signals:
    try:
      while running or (waiting and not signals):
        while waiting and len(running) < parallel and not signals:
          number, job = waiting.popleft()
          running.append(_started(f'[{number}/{len(jobs)}] {job.name}', job, kept_open))
        if len(signals) > heard:
          heard = len(signals)
          _end(running, by_force=heard > 1)
        time.sleep(_POLL)
        for one in [one for one in running if one.process.poll() is not None]:
          running.remove(one)
          status, spent = one.process.returncode, _duration(time.monotonic() - one.since)
          if status == 0:
            print(f'{one.place}: ended after {spent}', flush=True)
          elif signals:
            print(f'{one.place}: interrupted after {spent}', flush=True)
            unfinished.append(one.job.name)
          else:
            failed[one.job.name] = _reason(status, one.job.log, one.log_start)
            print(f'{one.place}: failed after {spent}: {failed[one.job.name]}', flush=True)
    finally:  # whatever went wrong here, nothing runs on unseen
      for one in running:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
  return Outcome(failed, unfinished + [job.name for _, job in waiting])


@contextlib.contextmanager
def _interruptions() -> Iterator[list[int]]:
  """The signals received meanwhile; an exception instead could lose a job just started."""
  received, before = [], {}
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
      before[number] = signal.signal(number, lambda number, _: received.append(number))
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _started(place: str, job: Job, kept_open) -> _Running:
  os.makedirs(os.path.dirname(job.log), exist_ok=True)
  with open(job.log, 'ab') as log:
    log.write(f'$ {shlex.join(job.command)}\n'.encode())
    log.flush()
    start = log.tell()
    # A session of its own: Ctrl-C in a terminal is for this process to pass on.
    process = subprocess.Popen(
      job.command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      pass_fds=kept_open,
    )
  print(f'{place}: started, see {job.log}', flush=True)
  return _Running(place, job, process, start, time.monotonic())


def _end(running: Sequence[_Running], by_force: bool) -> None:
  if running and not by_force:
    print(f'interrupted: waiting for {len(running)} to end; once more kills', flush=True)
  for one in running:
    if by_force:
      os.killpg(one.process.pid, signal.SIGKILL)  # with what it has started itself
    else:
      one.process.terminate()


def _reason(status: int, log: str, start: int) -> str:
  how = f'exit status {status}' if status > 0 else signal.Signals(-status).name
  with open(log, 'rb') as file:
    file.seek(start)
    lines = [line.strip() for line in file.read().decode(errors='replace').splitlines()]
  lines = [line for line in lines if line]
  errors = [line for line in lines if _ERROR_LINE.match(line)]
  return f'{how}: {(errors or lines or ["its log is empty"])[-1]}'


def _duration(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))
