"""Write, watch and serve the report page for one or more runs."""

import datetime
import http
import http.server
import os
import pathlib
import re
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics, runs, step_records
from exgrpo_jax.reporting.page import contents, evaluations
from exgrpo_jax.reporting.runs import Group, Recorded
from exgrpo_jax.runtime import activity, hosts

# ---- The server of a page ----

ADDRESS = '127.0.0.1'
_OWN_NAMES = (ADDRESS, 'localhost')
_TEXTS = re.compile(r'/texts/(\d+)_(\d+)\.js')


class Server(http.server.ThreadingHTTPServer):
  """A loopback server that renders the runs' page at most once every `every` seconds."""

  daemon_threads = True

  def __init__(self, workdirs: Sequence[str], port: int, every: float) -> None:
    """Bind the port (0 for any free port); raise InputError if that fails."""
    try:
      super().__init__((ADDRESS, port), _Handler)
    except OSError as error:
      raise InputError(
        f'--port={port}: this port cannot be bound on {ADDRESS} ({error}). Choose another '
        'port, or 0 for any free port.'
      ) from error
    self._workdirs, self._every = workdirs, every
    self._lock = threading.Lock()
    self._version, self._document = '', b''
    self._next = 0.0
    # The runs on the newest page, in page order.
    self._shown: list[tuple[Recorded, contents.Pieces | None]] = []

  def version(self) -> str:
    """Return the version of the page that a reader would get now."""
    with self._lock:
      return self._version if time.monotonic() < self._next else _signature(self._workdirs)

  def document(self) -> bytes:
    """Return the page. Renders it again if it is old enough and there are new records."""
    with self._lock:
      version = _signature(self._workdirs)
      if version != self._version and time.monotonic() >= self._next:
        groups = runs.read(self._workdirs)
        self._shown = [(run, contents.open_pieces(run)) for run in _runs(groups)]
        page = _render(groups, True, texts='texts/', again=_POLL, version=version)
        self._document = page.encode()
        self._version, self._next = version, time.monotonic() + self._every
      return self._document

  def texts(self, run: int, step: int) -> str | None:
    """Return the script with a step's texts, or None if there are none."""
    with self._lock:
      recorded, pieces = self._shown[run] if run < len(self._shown) else (None, None)
      found = contents.describe_step(recorded, pieces, step) if recorded and pieces else None
      return found and contents.texts_script(f'{run}/{step}', found)


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self) -> None:
    # A foreign page must not read the runs by making its host name resolve to this machine.
    if urlsplit(f'//{self.headers.get("Host", "")}').hostname not in _OWN_NAMES:
      self.send_error(http.HTTPStatus.FORBIDDEN, 'This page can be read only from this machine.')
      return
    path = urlsplit(self.path).path
    texts = _TEXTS.fullmatch(path)
    if path == '/':
      self._answer(self.server.document(), 'text/html')
    elif path == '/version':
      self._answer(self.server.version().encode(), 'text/plain')
    elif texts and (script := self.server.texts(int(texts[1]), int(texts[2]))):
      self._answer(script.encode(), 'text/javascript')
    else:
      self.send_error(http.HTTPStatus.NOT_FOUND)

  def log_message(self, format: str, *args: object) -> None:
    """Log nothing, because a page polls every few seconds."""

  def _answer(self, content: bytes, kind: str) -> None:
    self.send_response(http.HTTPStatus.OK)
    self.send_header('Content-Type', f'{kind}; charset=utf-8')
    self.send_header('Content-Length', str(len(content)))
    self.send_header('Cache-Control', 'no-store')
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()
    self.wfile.write(content)


PAGE = 'report.html'  # in a finished run's workdir
_POLL = 2.0  # seconds between checks of the files


def write_report(
  workdirs: Sequence[str], out: pathlib.Path, all_texts: bool = False, again: float = 0.0
) -> list[Group]:
  """Write the report page for these runs to `out`, and return the runs as shown on the page.

  With `all_texts`, all recorded texts are written to a folder next to the file. Every `again`
  seconds, the page of an unfinished run checks for newer steps; 0 means no checks. Missing folders
  are created. Raises InputError if a folder is not a run's workdir or has no metrics yet, or if
  writing fails.
  """
  groups = runs.read(workdirs)
  folder = out.with_name(f'{out.stem}_texts')
  text = _render(
    groups,
    texts=f'{folder.name}/' if all_texts else None,
    again=0.0 if _have_ended(groups) else again,
  )
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    if all_texts:  # a file for each run and each step with recorded responses
      folder.mkdir(exist_ok=True)
      for index, run in enumerate(_runs(groups)):
        for step, found in contents.describe_steps(run):
          script = contents.texts_script(f'{index}/{step}', found)
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


def _render(groups: Sequence[Group], all_responses: bool = False, **options: Any) -> str:
  """Render the document. `options` become part of its 'page' data; see browser/start.js."""
  parts = contents.describe(groups, all_responses)
  now = datetime.datetime.now().astimezone()
  parts['page'] |= {'written': now.isoformat(sep=' ', timespec='seconds'), 'by': __version__}
  parts['page'] |= options
  return contents.render(parts)


def _runs(groups: Sequence[Group]) -> list[Recorded]:
  """Return the runs in page order."""
  return [run for group in groups for run in group.runs]


def _have_ended(groups: Sequence[Group]) -> bool:
  return all(run.metrics[-1]['step'] >= run.last_step for run in _runs(groups))


def print_written(out: pathlib.Path, groups: Sequence[Group]) -> None:
  """Print the page's path and size, and each run's progress."""
  steps = ', '.join(
    f'{run.workdir}: step {run.metrics[-1]["step"]:.0f} of {run.config["num_steps"]}'
    for run in _runs(groups)
  )
  print(f'{out} ({out.stat().st_size / 1e6:.1f} MB); {steps}', flush=True)


# ---- Unfinished runs ----


def watch(workdirs: Sequence[str], out: pathlib.Path, all_texts: bool, every: float) -> None:
  """Write the page whenever the runs have new records, until all of them have ended."""
  os.nice(19)  # training has priority
  _await_metrics(workdirs)
  seen = ''
  while True:
    started, now = time.monotonic(), _signature(workdirs)
    if now != seen:
      groups = write_report(workdirs, out, all_texts, every)
      print_written(out, groups)
      if _have_ended(groups):
        return
      seen = now
    time.sleep(max(_POLL, every - (time.monotonic() - started)))


def serve(workdirs: Sequence[str], port: int, every: float) -> None:
  """Serve the page until Ctrl-C."""
  os.nice(19)  # training has priority
  with Server(workdirs, port, every) as server:
    _await_metrics(workdirs)
    url = f'http://{ADDRESS}:{server.server_address[1]}/'
    print(f'{url} shows {", ".join(workdirs)}. Press Ctrl-C to stop.', flush=True)
    server.serve_forever()


def _await_metrics(workdirs: Sequence[str]) -> None:
  """Wait until all runs have written metrics; raise InputError for other folders."""
  waiting = [workdir for workdir in workdirs if not runs.read_metrics(workdir)]
  if waiting:
    print(f'waiting for the first metrics of {", ".join(waiting)}', flush=True)
  while not all(map(runs.read_metrics, waiting)):
    time.sleep(_POLL)


def _signature(workdirs: Sequence[str]) -> str:
  """Return a string that changes whenever a run writes something that the page shows."""
  names = (metrics.FILE, step_records.FOLDER, evaluations.FOLDER)
  paths = [pathlib.Path(workdir, name) for workdir in workdirs for name in names]
  return ' '.join(str(path.stat().st_mtime_ns) for path in paths if path.exists())
