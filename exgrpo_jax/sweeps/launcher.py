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
  start_time: float  # time.monotonic(), seconds
  cores: frozenset[int]  # core numbers


def run(jobs: Sequence[Job], parallel: int, open_fds: Sequence[int] = ()) -> Outcome:
  """Run `jobs`, at most `parallel` at a time, and report their progress on stdout.

  On the first SIGINT, SIGTERM or SIGHUP, this function sends SIGTERM to the running jobs and waits
  for them to exit. A second signal kills them. Concurrent jobs run on separate cores, which is
  faster: on two cores, two SmolLM2 steps take 1.3 times as long if they run one after the other,
  each on both cores. Every job inherits the file descriptors in `open_fds`.
  """
  queue = collections.deque(enumerate(jobs, 1))
  running_jobs: list[_RunningJob] = []
  failures: dict[str, str] = {}
  unfinished: list[str] = []
  num_handled = 0  # number of signals handled
  parallel = max(1, min(parallel, len(jobs)))
  # Each job's cores; with fewer cores than jobs, each job gets all cores.
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
  size = len(cores) // parallel
  free_cores = [frozenset(cores[n * size :][:size] if size else cores) for n in range(parallel)]
  with _collect_signals() as signals:
    try:
      while running_jobs or (queue and not signals):
        while queue and len(running_jobs) < parallel and not signals:
          number, job = queue.popleft()
          running_jobs.append(
            _start(f'[{number}/{len(jobs)}] {job.name}', job, free_cores.pop(), open_fds)
          )
        if len(signals) > num_handled:
          num_handled = len(signals)
          _stop(running_jobs, by_force=num_handled > 1)
        time.sleep(_POLL_SECONDS)
        for entry, status in [(entry, entry.process.poll()) for entry in running_jobs]:
          if status is None:
            continue
          running_jobs.remove(entry)
          free_cores.append(entry.cores)
          name = entry.job.name
          elapsed = datetime.timedelta(seconds=round(time.monotonic() - entry.start_time))
          if status == 0:
            print(f'{entry.label}: finished after {elapsed}', flush=True)
          elif signals:
            print(f'{entry.label}: interrupted after {elapsed}', flush=True)
            unfinished.append(name)
          else:
            failures[name] = _failure_reason(status, entry.job.log, entry.log_start)
            print(f'{entry.label}: failed after {elapsed}: {failures[name]}', flush=True)
    finally:  # so that no job outlives an exception
      for entry in running_jobs:
        os.killpg(entry.process.pid, signal.SIGKILL)
        entry.process.wait()
  return Outcome(failed=failures, unfinished=unfinished + [job.name for _, job in queue])


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
  """Yield a list that collects the signals received during the block.

  The handler does not raise, because it might run between a job's start and its registration.
  """
  signals: list[int] = []
  previous = {}
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
      previous[number] = signal.signal(number, lambda number, _: signals.append(number))
  try:
    yield signals
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _start(label: str, job: Job, cores: frozenset[int], open_fds: Sequence[int]) -> _RunningJob:
  os.makedirs(os.path.dirname(job.log), exist_ok=True)
  with open(job.log, 'ab') as log:
    log.write(f'$ {shlex.join(job.command)}\n'.encode())
    log.flush()
    log_start = log.tell()
    # Start a new session, so that Ctrl-C reaches only this process, which then stops the job.
    files = {'stdin': subprocess.DEVNULL, 'stdout': log, 'stderr': subprocess.STDOUT}
    process = subprocess.Popen(job.command, **files, start_new_session=True, pass_fds=open_fds)
  if cores:  # before the job starts threads, because threads inherit the process's cores
    with contextlib.suppress(ProcessLookupError):
      os.sched_setaffinity(process.pid, cores)
  print(f'{label}: started, see {job.log}', flush=True)
  return _RunningJob(label, job, process, log_start, time.monotonic(), cores)


def _stop(running_jobs: Sequence[_RunningJob], by_force: bool) -> None:
  if running_jobs and not by_force:
    jobs = counted(len(running_jobs), 'running job')
    print(f'interrupted: waiting for {jobs}. Interrupt again to kill them.', flush=True)
  for entry in running_jobs:
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
