"""A launcher for parallel local commands, each with a log; one failure does not stop the rest."""

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

from exgrpo_jax.errors import counted

_POLL_SECONDS = 0.1
# The error may not be the log's last line: JAX may print notes after a traceback, and Python may
# print warnings at exit.
_ERROR_LINE = re.compile(r'error: |[\w.]*(Error|Exception|Interrupt|Exit)\b')


class Job(NamedTuple):
  """A command to run, with a name and a log."""

  name: str
  command: Sequence[str]
  log: str  # path of the log; the output is appended


class Outcome(NamedTuple):
  """The jobs that failed or did not finish; all other jobs exited with status 0."""

  failed: dict[str, str]  # job name -> exit status or signal, plus the error line from its log
  unfinished: list[str]  # jobs that an interrupt stopped or prevented from starting


class _RunningJob(NamedTuple):
  label: str  # e.g. '[2/6] ratio=0,seed=1'
  job: Job
  process: subprocess.Popen
  log_start: int  # size of the log when the command started, in bytes
  started: float  # time.monotonic(), seconds
  cores: frozenset[int]  # core numbers


def run(jobs: Sequence[Job], parallel: int, kept_open: Sequence[int] = ()) -> Outcome:
  """Run `jobs`, at most `parallel` at a time, and report their progress on stdout.

  On the first SIGINT, SIGTERM or SIGHUP, this function sends SIGTERM to the running jobs and waits
  for them to exit. A second signal kills them. Concurrent jobs run on separate cores, which is
  faster: on two cores, two SmolLM2 steps take 1.3 times as long if they run one after the other,
  each on both cores. Every job inherits the file descriptors in `kept_open`.
  """
  waiting = collections.deque(enumerate(jobs, 1))
  running: list[_RunningJob] = []
  failed: dict[str, str] = {}
  unfinished: list[str] = []
  handled = 0  # number of signals handled
  parallel = max(1, min(parallel, len(jobs)))
  # Each job's cores; with fewer cores than jobs, each job gets all cores.
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
  size = len(cores) // parallel
  free = [frozenset(cores[n * size :][:size] if size else cores) for n in range(parallel)]
  with _collect_signals() as signals:
    try:
      while running or (waiting and not signals):
        while waiting and len(running) < parallel and not signals:
          number, job = waiting.popleft()
          running.append(_start(f'[{number}/{len(jobs)}] {job.name}', job, free.pop(), kept_open))
        if len(signals) > handled:
          handled = len(signals)
          _stop(running, by_force=handled > 1)
        time.sleep(_POLL_SECONDS)
        for ended, status in [(entry, entry.process.poll()) for entry in running]:
          if status is None:
            continue
          running.remove(ended)
          free.append(ended.cores)
          name = ended.job.name
          elapsed = datetime.timedelta(seconds=round(time.monotonic() - ended.started))
          if status == 0:
            print(f'{ended.label}: finished after {elapsed}', flush=True)
          elif signals:
            print(f'{ended.label}: interrupted after {elapsed}', flush=True)
            unfinished.append(name)
          else:
            failed[name] = _failure_reason(status, ended.job.log, ended.log_start)
            print(f'{ended.label}: failed after {elapsed}: {failed[name]}', flush=True)
    finally:  # so that no job outlives an exception
      for entry in running:
        os.killpg(entry.process.pid, signal.SIGKILL)
        entry.process.wait()
  return Outcome(failed=failed, unfinished=unfinished + [job.name for _, job in waiting])


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
  """Yield a list that collects the signals received during the block.

  The handler does not raise, because it might run between a job's start and its registration.
  """
  received: list[int] = []
  previous = {}
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
      previous[number] = signal.signal(number, lambda number, _: received.append(number))
  try:
    yield received
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _start(label: str, job: Job, cores: frozenset[int], kept_open: Sequence[int]) -> _RunningJob:
  os.makedirs(os.path.dirname(job.log), exist_ok=True)
  with open(job.log, 'ab') as log:
    log.write(f'$ {shlex.join(job.command)}\n'.encode())
    log.flush()
    log_start = log.tell()
    # Start a new session, so that Ctrl-C reaches only this process, which then stops the job.
    files = {'stdin': subprocess.DEVNULL, 'stdout': log, 'stderr': subprocess.STDOUT}
    process = subprocess.Popen(job.command, **files, start_new_session=True, pass_fds=kept_open)
  if cores:  # before the job starts threads, because threads inherit the process's cores
    with contextlib.suppress(ProcessLookupError):
      os.sched_setaffinity(process.pid, cores)
  print(f'{label}: started, see {job.log}', flush=True)
  return _RunningJob(label, job, process, log_start, time.monotonic(), cores)


def _stop(running: Sequence[_RunningJob], by_force: bool) -> None:
  if running and not by_force:
    jobs = counted(len(running), 'running job')
    print(f'interrupted: waiting for {jobs}. Interrupt again to kill them.', flush=True)
  for entry in running:
    if by_force:
      os.killpg(entry.process.pid, signal.SIGKILL)  # also kills its child processes
    else:
      entry.process.terminate()


def _failure_reason(status: int, log: str, log_start: int) -> str:
  """Return the exit status or signal, plus the log's last error line (or just its last line)."""
  ending = f'exit status {status}' if status > 0 else signal.Signals(-status).name
  with open(log, 'rb') as file:
    file.seek(log_start)
    lines = [line.strip() for line in file.read().decode(errors='replace').splitlines()]
  lines = list(filter(None, lines)) or ['its log is empty']
  errors = list(filter(_ERROR_LINE.match, lines))
  return f'{ending}: {(errors or lines)[-1]}'
