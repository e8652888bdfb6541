"""Serves the page of runs that go on, to browsers on this machine alone."""

import http
import http.server
import re
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from exgrpo_jax.errors import InputError

ADDRESS = '127.0.0.1'
_OWN_NAMES = (ADDRESS, 'localhost')
_TEXTS = re.compile(r'/texts/(\d+)_(\d+)\.js')


class Source(NamedTuple):
  """Where the server gets what it serves; its functions are called by one thread at a time."""

  version: Callable[[], str]  # of what is on the disk now; cheap
  document: Callable[[str], str]  # the page of a version
  texts: Callable[[int, int], str | None]  # script with the texts of a run's step, see texts_script


class Server(http.server.ThreadingHTTPServer):
  """Answers GET on the loopback address; makes a document at most every `every` seconds."""

  daemon_threads = True

  def __init__(self, source: Source, port: int, every: float) -> None:
    """Binds the port, 0 for any free one; InputError where it is taken."""
    try:
      super().__init__((ADDRESS, port), _Handler)
    except OSError as error:
      raise InputError(
        f'--port={port} cannot be bound on {ADDRESS} ({error}); name another one, or 0 for any '
        'that is free.'
      ) from error
    self.source, self._every = source, every
    self.lock = threading.Lock()
    self._version, self._document = '', b''
    self._next = 0.0

  @property
  def url(self) -> str:
    """Where the page is."""
    return f'http://{ADDRESS}:{self.server_address[1]}/'

  def version(self) -> str:
    """The version of the page that a reader would get now."""
    with self.lock:
      return self._version if time.monotonic() < self._next else self.source.version()

  def document(self) -> bytes:
    """The page, made anew where the runs have gone on and the last one is old enough."""
    with self.lock:
      version = self.source.version()
      if version != self._version and time.monotonic() >= self._next:
        self._document = self.source.document(version).encode()
        self._version, self._next = version, time.monotonic() + self._every
      return self._document

  def texts(self, run: int, step: int) -> str | None:
    """The script with the texts of a step."""
    with self.lock:
      return self.source.texts(run, step)


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self) -> None:
    # A page elsewhere whose name was made to mean this machine must not read the runs.
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
    """Says nothing: a page asks every few seconds."""

  def _answer(self, content: bytes, kind: str) -> None:
    self.send_response(http.HTTPStatus.OK)
    self.send_header('Content-Type', f'{kind}; charset=utf-8')
    self.send_header('Content-Length', str(len(content)))
    self.send_header('Cache-Control', 'no-store')
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()
    self.wfile.write(content)
