"""Write and serve the report page for one or more runs."""

import contextlib
import datetime
import http
import http.server
import itertools
import json
import os
import pathlib
import re
import socket
import statistics
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics, runs, step_records
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.page import contents, evaluations
from exgrpo_jax.reporting.runs import Group, Recorded
from exgrpo_jax.runtime import activity, clock, hosts
from exgrpo_jax.runtime.workdir import RUN_LOCK, is_abandoned

# ---- The page server ----

ADDRESS = '127.0.0.1'
_OWN_NAMES = (ADDRESS, 'localhost')
_TEXTS = re.compile(r'/texts/(\d+)_(\d+)\.js')
_POLL = 2.0  # seconds between checks of the files
_SLOW_POLL = 10.0  # the same for runs that have ended or stopped
_LIVE = {'texts': 'texts/', 'again': _POLL, 'version': '', 'parts': {}}  # served page


class State(NamedTuple):
  """A run's state: a keyword, which page.css maps to a color, and a sentence."""

  kind: str  # 'waiting', 'running', 'stalled', 'stopped' or 'ended'
  text: str


def state_of(workdir: str, records: Run, start_time: float, is_gone: bool, now: float) -> State:
  """Return a run's state at time `now`; it is 'stalled' when `clock.watched` would print a warning.

  Only steps since the latest start are timed, because a run may resume long after its last step
  and must compile first. Times are in Unix seconds. `is_gone` is True if the run's process has
  ended.
  """
  if not records:
    if is_gone:
      return State('stopped', 'The run stopped before its first step. Its output shows the reason.')
    return State('waiting', 'Waiting for the first step.')
  config = runs.read_settings(workdir)
  step, last = round(records[-1]['step']), runs.last_step(config, records)
  progress = f'step {step} of {config["num_steps"]}'
  if step >= last:
    return State('ended', f'The run ended after {progress}.')
  if is_gone:
    text = f'The run stopped after {progress}: its process is gone. The Overview page shows the '
    return State('stopped', text + 'command to resume it.')
  times = [moment for record in records if (moment := record.get('timestamp', 0.0)) > start_time]
  gaps = [after - before for before, after in itertools.pairwise(times)][-clock.RECENT :]
  if len(gaps) < clock.MEDIAN_STEPS:
    return State('running', f'{progress.capitalize()} has finished.')
  pace, last_time = statistics.median(gaps), datetime.datetime.fromtimestamp(times[-1])
  if now - times[-1] > max(clock.FACTOR * pace, clock.LEAST_SECONDS):
    text = f'No step has finished since {progress} at {last_time:%H:%M:%S on %Y-%m-%d}, although a '
    text += f'step usually takes {pace:.1f} s. The run may be stuck; its output may show where.'
    return State('stalled', text)
  text = f'{progress.capitalize()} finished at {last_time:%H:%M:%S}; a step takes {pace:.1f} s.'
  return State('running', text)


class Server(http.server.ThreadingHTTPServer):
  """A loopback server that renders the runs' page at most once per `every` seconds.

  It spends at most a tenth of a core on rendering.
  """

  daemon_threads = True

  def __init__(self, workdirs: Sequence[str], port: int, every: float) -> None:
    """Bind the port (0 for any free port); raise InputError if that fails."""
    try:
      super().__init__((ADDRESS, port), _Handler)
    except OSError as error:
      raise InputError(
        f'--port={port}: cannot bind to this port on {ADDRESS} ({error}). Choose another port, '
        'or 0 for any free port.'
      ) from error
    self._workdirs, self._every = workdirs, every
    self._lock = threading.Lock()
    self._read_version: str | None = None  # the files' signature when the records were read
    self._records: list[Run] = []
    self._abandoned: set[tuple[str, float]] = set()  # locks without an owner: workdir, start time
    self._next_render = 0.0
    # The newest page (empty until all runs have metrics), its parts, and its runs in page order.
    self._page: contents.Parts = {'runs': [], 'title': ', '.join(workdirs), **_LIVE}
    self._parts: dict[str, str] = {}
    self._page_runs: list[tuple[Recorded, contents.Pieces | None]] = []

  def refresh(self) -> list[State]:
    """Read new records, return the runs' states, and render a new page if one is due."""
    with self._lock:
      version = _signature(self._workdirs)
      if version != self._read_version:
        self._records = [runs.read_metrics(workdir) for workdir in self._workdirs]
        self._read_version = version
      states = list(map(self._state, self._workdirs, self._records))
      are_over = all(state.kind in ('ended', 'stopped') for state in states)
      is_due = are_over or time.monotonic() >= self._next_render
      if all(self._records) and version != self._page['version'] and is_due:
        start, groups = time.thread_time(), runs.read(self._workdirs)
        self._page_runs = [(run, contents.open_pieces(run)) for run in _runs(groups)]
        parts = _describe(groups, True, **_LIVE | {'version': version})
        page = parts.pop('page')
        self._parts = {name: contents.pack(part) for name, part in parts.items() if part}
        page['parts'] = {name: zlib.crc32(text.encode()) for name, text in self._parts.items()}
        self._page = page  # last, because `document` and `part` do not wait for the lock
        seconds = time.thread_time() - start  # without the time in which training ran instead
        self._next_render = time.monotonic() + max(self._every, 9 * seconds)
      return states

  def _state(self, workdir: str, records: Run) -> State:
    lock = pathlib.Path(workdir, RUN_LOCK)
    start_time = lock.stat().st_mtime if lock.exists() else 0.0
    if (workdir, start_time) not in self._abandoned and is_abandoned(lock):
      self._abandoned.add((workdir, start_time))
    is_gone = (workdir, start_time) in self._abandoned
    return state_of(workdir, records, start_time, is_gone, time.time())

  def news(self, version: str) -> dict[str, Any]:
    """Return the runs' states, and the newest page unless the reader already has it."""
    try:
      states = self.refresh()
    except (InputError, OSError) as error:  # keep showing the last page
      states = [State('stopped', str(error))]
    if len(states) > 1:
      states = [
        State(kind, f'{name}: {text}') for name, (kind, text) in zip(self._workdirs, states)
      ]
    is_over = all(kind in ('ended', 'stopped') for kind, _ in states)
    page = None if version == self._page['version'] else contents.pack(self._page)
    return {'states': states, 'page': page, 'again': _SLOW_POLL if is_over else _POLL}

  def document(self) -> str:
    """Return the page as a document that requests its other parts on demand."""
    return contents.render({'page': self._page})

  def part(self, name: str) -> str | None:
    """Return one of the page's other parts, packed by `contents.pack`, or None if it is missing."""
    return self._parts.get(name)

  def texts(self, run: int, step: int) -> str | None:
    """Return the script with a step's texts, or None if there are none."""
    with self._lock:
      recorded_run, pieces = self._page_runs[run] if run < len(self._page_runs) else (None, None)
      texts = (
        contents.describe_step(recorded_run, pieces, step) if recorded_run and pieces else None
      )
      return texts and contents.texts_script(f'{run}/{step}', texts)


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self) -> None:
    # Prevent DNS rebinding: a foreign page must not read the runs via a name that resolves here.
    if urlsplit(f'//{self.headers.get("Host", "")}').hostname not in _OWN_NAMES:
      self.send_error(http.HTTPStatus.FORBIDDEN, 'This page can be read only from this machine.')
      return
    url = urlsplit(self.path)
    texts = _TEXTS.fullmatch(url.path)
    if url.path == '/':
      self._answer(self.server.document(), 'text/html')
    elif url.path == '/news':
      version = parse_qs(url.query).get('have', [''])[0]
      self._answer(json.dumps(self.server.news(version)), 'application/json')
    elif part := self.server.part(url.path.removeprefix('/parts/')):
      self._answer(part, 'text/plain')
    elif texts and (script := self.server.texts(int(texts[1]), int(texts[2]))):
      self._answer(script, 'text/javascript')
    else:
      self.send_error(http.HTTPStatus.NOT_FOUND)

  def log_message(self, format: str, *args: object) -> None:
    """Log nothing, because a page polls every few seconds."""

  def _answer(self, text: str, kind: str) -> None:
    content = text.encode()
    self.send_response(http.HTTPStatus.OK)
    self.send_header('Content-Type', f'{kind}; charset=utf-8')
    self.send_header('Content-Length', str(len(content)))
    self.send_header('Cache-Control', 'no-store')
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()
    with contextlib.suppress(ConnectionError):  # the reader has closed the page
      self.wfile.write(content)


# ---- Files ----

PAGE = 'report.html'  # in a finished run's workdir


def write_report(
  workdirs: Sequence[str], out: pathlib.Path, all_texts: bool = False
) -> list[Group]:
  """Write the report page for these runs to `out`, and return the runs grouped as on the page.

  With `all_texts`, all recorded texts are written to a folder next to the file. Missing folders are
  created. Raises InputError if a folder is not a run's workdir or has no metrics yet, or if writing
  fails.
  """
  groups = runs.read(workdirs)
  folder = out.with_name(f'{out.stem}_texts')
  text = contents.render(_describe(groups, texts=f'{folder.name}/' if all_texts else None))
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    if all_texts:  # a file for each run and each step with recorded responses
      folder.mkdir(exist_ok=True)
      for index, run in enumerate(_runs(groups)):
        for step, texts in contents.describe_steps(run):
          script = contents.texts_script(f'{index}/{step}', texts)
          contents.write(folder / f'{index}_{step:06d}.js', script)
    contents.write(out, text)
  except OSError as error:
    raise InputError(
      f'--out={out}: this file cannot be written ({error}). Choose another path.'
    ) from error
  return groups


def write_at_end(workdir: str) -> None:
  """Write a finished run's page to its workdir; warn if that fails."""
  try:
    with activity.doing(f'writing {PAGE}'):
      write_report([workdir], pathlib.Path(workdir, PAGE))
  except InputError as error:
    hosts.warn(f'{PAGE} was not written: {error}')


def _describe(
  groups: Sequence[Group], all_responses: bool = False, **options: Any
) -> contents.Parts:
  """Return the page's parts. `options` are added to the part 'page'; see browser/start.js."""
  parts = contents.describe(groups, all_responses)
  now = datetime.datetime.now().astimezone()
  parts['page'] |= {'written': now.isoformat(sep=' ', timespec='seconds'), 'by': __version__}
  parts['page'] |= options
  return parts


def _runs(groups: Sequence[Group]) -> list[Recorded]:
  return [run for group in groups for run in group.runs]


def print_written(out: pathlib.Path, groups: Sequence[Group]) -> None:
  """Print the page's path and size, and each run's progress."""
  steps = ', '.join(
    f'{run.workdir}: step {run.metrics[-1]["step"]:.0f} of {run.config["num_steps"]}'
    for run in _runs(groups)
  )
  print(f'{out} ({out.stat().st_size / 1e6:.1f} MB); {steps}', flush=True)


def serve(workdirs: Sequence[str], port: int, every: float) -> None:
  """Serve the page until Ctrl-C; raise InputError if a folder is not a run's workdir."""
  os.nice(10)  # training has priority, but 19 would delay pages for a minute on busy cores
  with Server(workdirs, port, every) as server:
    server.refresh()  # raises InputError for folders that cannot be shown
    place = f'{ADDRESS}:{server.server_address[1]}'
    print(f'Serving {", ".join(workdirs)} at http://{place}/. Press Ctrl-C to stop.')
    tunnel = f'ssh -L {server.server_address[1]}:{place} {socket.gethostname()}'
    print(f'To open the page on another machine, first run this there: {tunnel}', flush=True)
    server.serve_forever()


def _signature(workdirs: Sequence[str]) -> str:
  """Return a string that changes whenever a run writes something that the page shows."""
  names = (metrics.FILE, step_records.FOLDER, evaluations.FOLDER)
  paths = [pathlib.Path(workdir, name) for workdir in workdirs for name in names]
  return ' '.join(str(path.stat().st_mtime_ns) for path in paths if path.exists())
