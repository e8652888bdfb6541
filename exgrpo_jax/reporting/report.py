"""Write, watch and serve the report page for one or more runs."""

import datetime
import http
import http.server
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
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


class Source(NamedTuple):
  """Functions that produce the server's responses. Only one thread at a time calls them."""

  version: Callable[[], str]  # version of the files now on disk; cheap
  document: Callable[[str], str]  # version -> page
  texts: Callable[[int, int], str | None]  # run, step -> script with the step's texts


class Server(http.server.ThreadingHTTPServer):
  """A loopback server that renders the document at most once every `every` seconds."""

  daemon_threads = True

  def __init__(self, source: Source, port: int, every: float) -> None:
    """Bind the port (0 for any free port); raise InputError if that fails."""
    try:
      super().__init__((ADDRESS, port), _Handler)
    except OSError as error:
      raise InputError(
        f'--port={port}: this port cannot be bound on {ADDRESS} ({error}). Choose another '
        'port, or 0 for any free port.'
      ) from error
    self.source, self._every = source, every
    self.lock = threading.Lock()
    self._version, self._document = '', b''
    self._next = 0.0

  @property
  def url(self) -> str:
    """Return the page's URL."""
    return f'http://{ADDRESS}:{self.server_address[1]}/'

  def version(self) -> str:
    """Return the version of the page that a reader would get now."""
    with self.lock:
      return self._version if time.monotonic() < self._next else self.source.version()

  def document(self) -> bytes:
    """Return the page. Renders it again if it is old enough and there are new records."""
    with self.lock:
      version = self.source.version()
      if version != self._version and time.monotonic() >= self._next:
        self._document = self.source.document(version).encode()
        self._version, self._next = version, time.monotonic() + self._every
      return self._document

  def texts(self, run: int, step: int) -> str | None:
    """Return the script with a step's texts."""
    with self.lock:
      return self.source.texts(run, step)


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self) -> None:
    # A foreign page must not read the runs by making its host name resolve to this machine.
    if urlsplit(f'//{self.headers.get("Host", "")}').hostname not in _OWN_NAMES:
      self.send_error(http.HTTPStatus.FORBIDDEN, 'only for this machine')
      return
    path = urlsplit(self.path).path
    if path == '/':
      self._answer(self.server.document(), 'text/html')
    elif path == '/version':
      self._answer(self.server.version().encode(), 'text/plain')
    elif match := _TEXTS.fullmatch(path):
      found = self.server.texts(int(match[1]), int(match[2]))
      if found is None:
        self.send_error(http.HTTPStatus.NOT_FOUND)
      else:
        self._answer(found.encode(), 'text/javascript')
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
  """Write the report page for these runs, and return the runs as shown on the page.

  Args:
    workdirs: the runs' workdirs.
    out: the file to write; its folder is created if missing.
    all_texts: also write all recorded texts to a folder next to the file.
    again: seconds between the page's checks for newer steps of unfinished runs; 0 for no checks.

  Raises:
    InputError: a folder is not a run's workdir or has no metrics yet, or writing fails.
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
    if all_texts:
      _write_texts(groups, folder)
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


def _write_texts(groups: Sequence[Group], folder: pathlib.Path) -> None:
  """Write a file of texts for each run and each step with recorded responses."""
  folder.mkdir(exist_ok=True)
  for index, run in enumerate(_runs(groups)):
    for step, found in contents.describe_steps(run):
      script = contents.texts_script(f'{index}/{step}', found)
      contents.write(folder / f'{index}_{step:06d}.js', script)


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
  shown: list[tuple[Recorded, contents.Pieces | None]] = []  # on the newest page, in page order

  def render(version: str) -> str:
    groups = runs.read(workdirs)
    shown[:] = [(run, contents.open_pieces(run)) for run in _runs(groups)]
    return _render(groups, True, texts='texts/', again=_POLL, version=version)

  def texts_of(index: int, step: int) -> str | None:
    run, pieces = shown[index] if index < len(shown) else (None, None)
    found = contents.describe_step(run, pieces, step) if run and pieces else None
    return found and contents.texts_script(f'{index}/{step}', found)

  source = Source(lambda: _signature(workdirs), render, texts_of)
  with Server(source, port, every) as server:
    _await_metrics(workdirs)
    print(f'{server.url} shows {", ".join(workdirs)}; press Ctrl-C to stop', flush=True)
    server.serve_forever()


def _await_metrics(workdirs: Sequence[str]) -> None:
  """Wait until all runs have written metrics; raise InputError for other folders."""
  waiting = [workdir for workdir in workdirs if not runs.has_metrics(workdir)]
  if waiting:
    print(f'waiting for the first metrics of {", ".join(waiting)}', flush=True)
  while not all(map(runs.has_metrics, waiting)):
    time.sleep(_POLL)


def _signature(workdirs: Sequence[str]) -> str:
  """Return a string that changes whenever a run writes something that the page shows."""
  names = (metrics.FILE, step_records.FOLDER, evaluations.FOLDER)
  paths = [pathlib.Path(workdir, name) for workdir in workdirs for name in names]
  return ' '.join(str(path.stat().st_mtime_ns) for path in paths if path.exists())
