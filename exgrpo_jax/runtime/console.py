"""Output of long commands: a status line, and a log file of everything printed.

On a terminal, the last line shows the current activity (activity.py) and is updated several times a
second. Elsewhere, a status line is printed after ten seconds without output. Background threads do
both.
"""

import contextlib
import datetime
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

import rich.console
import rich.live
import rich.text
from absl import logging

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity, compilations, hosts

SILENCE = 10.0  # seconds without output after which a status line is printed
# Escape sequences, such as colors and cursor movements.
_CONTROL = re.compile(r'\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])')
# Flags for folders, and flags for files or names.
_FOLDER = re.compile(r'--?(workdir|checkpoint|out|logdir)')
_FILE = re.compile(r'--?(config|sweep)')


@contextlib.contextmanager
def opened(path: str = '', silence: float = SILENCE) -> Iterator[None]:
  """Show the current activity during the block, and append the block's output to the file `path`.

  The file receives standard output, standard error and the error that ends the block, without
  terminal escape sequences. With a file, the block continues even if nobody reads its output any
  more, as after `| head -1`. If `path` is '', no file is written. With several hosts, only the
  first host shows and logs anything. Calls must not be nested.
  """
  if not hosts.is_first():
    yield
    return
  stop = threading.Event()
  with (
    open(path or os.devnull, 'ab', buffering=0) as file,
    compilations.shown(),
    _live_line() as is_live,
  ):
    log = _Log(file)
    moment = datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')
    log.write(f'---- {moment}  {shlex.join(sys.orig_argv)}')
    thread = threading.Thread(
      target=_break_silence, args=(stop, log, silence, is_live), daemon=True
    )
    thread.start()
    try:
      with (
        contextlib.redirect_stdout(cast(IO[str], _LoggedStream(sys.stdout, log, bool(path)))),
        contextlib.redirect_stderr(cast(IO[str], _LoggedStream(sys.stderr, log, bool(path)))),
        _logging_to_stderr(),
      ):
        yield
    except InputError as error:
      log.write(f'error: {error}')
      raise
    except Exception:
      log.write(traceback.format_exc().rstrip())
      raise
    finally:
      stop.set()
      thread.join()


def program() -> list[str]:
  """Return the command that started this program, as a prefix for suggested commands."""
  script = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ''
  if os.path.basename(script) != 'exgrpo':
    return [sys.orig_argv[0], '-m', 'exgrpo_jax']
  return ['exgrpo' if shutil.which('exgrpo') == os.path.abspath(script) else script]


def to_copy(words: Sequence[str], workdir: str = '') -> str:
  """Format a command for the user to copy, with absolute paths for its program and in its flags.

  The command then works from any folder. Use this function for every printed command. Paths in
  settings (--config.…) are unchanged, because an absolute path would count as a changed setting
  when the run resumes. `workdir` replaces the value of --workdir.
  """
  copied_words: list[str] = []
  flag = ''
  for index, word in enumerate(words):
    is_path = (os.sep in word or word.endswith('.py')) and not word.startswith('-')
    if index < 2 and is_path:  # a program, or Python's script
      word = os.path.abspath(word)
    if flag:  # written as --flag value
      word, flag = f'{flag}={word}', ''
    elif _FOLDER.fullmatch(word) or _FILE.fullmatch(word):
      flag = word
      continue
    name, equals, value = word.partition('=')
    if workdir and name.lstrip('-') == 'workdir':
      value = workdir
    is_file = _FILE.fullmatch(name) and (os.sep in value or '.py' in value)
    if equals and '://' not in value and (_FOLDER.fullmatch(name) or is_file):
      value = os.path.abspath(os.path.expanduser(value))
    copied_words.append(name + equals + value)
  return shlex.join(copied_words + [flag] * bool(flag))


class _Log:
  """A log file, written line by line. `last` is the time.monotonic() value of the last line."""

  def __init__(self, file: IO[bytes]) -> None:
    self._file = file
    self.last = time.monotonic()

  def write(self, line: str) -> None:
    """Append a line, without escape sequences or overwritten progress updates."""
    self.last = time.monotonic()
    text = _CONTROL.sub('', line).rstrip('\r').rpartition('\r')[2]
    with contextlib.suppress(OSError):  # a full disk must not end a run because of its log
      self._file.write(f'{text}\n'.encode(errors='backslashreplace'))


class _LoggedStream:
  """A stream that also copies its lines to the log, and may outlive the reader of a pipe."""

  def __init__(self, stream: IO[str], log: _Log, outlives_reader: bool) -> None:
    self._stream, self._log, self._outlives_reader = stream, log, outlives_reader
    self._line = ''  # the current, unfinished line

  def write(self, text: str) -> int:
    *lines, self._line = (self._line + text).split('\n')
    for line in lines:
      self._log.write(line)
    self._attempt(self._stream.write, text)
    return len(text)

  def flush(self) -> None:
    self._attempt(self._stream.flush)

  def _attempt(self, action: Callable[..., Any], *args: str) -> None:
    try:
      action(*args)
    except BrokenPipeError:
      if not self._outlives_reader:
        raise
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


class _Terminal(rich.console.Console):
  """A terminal that never hides its cursor, because a killed run could not show it again."""

  def show_cursor(self, show: bool = True) -> bool:
    del show
    return False


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
  """Send library logs to the current standard error, not to the one in use at import time."""
  handler = logging.get_absl_handler().python_handler
  old_stream = handler.setStream(sys.stderr)
  try:
    yield
  finally:
    handler.setStream(old_stream)


@contextlib.contextmanager
def _live_line() -> Iterator[bool]:
  """Keep a terminal's last line up to date; yield True if standard output is a terminal."""
  terminal = _Terminal(file=sys.stdout, soft_wrap=True)
  if not sys.stdout.isatty() or terminal.is_dumb_terminal:
    yield False
    return
  # Output of both streams appears above the line, unless standard error is a file.
  with rich.live.Live(
    console=terminal,
    get_renderable=lambda: rich.text.Text(
      textwrap.fill(activity.now(), terminal.width - 1), no_wrap=True, overflow='crop'
    ),
    transient=True,
    redirect_stderr=sys.stderr.isatty(),
  ):
    yield True


def _break_silence(stop: threading.Event, log: _Log, silence: float, is_live: bool) -> None:
  while not stop.wait(silence / 60):
    status = activity.now()
    if not status or time.monotonic() - log.last < silence:
      continue
    if is_live:  # the terminal shows it already, but the file must also show that the run is alive
      log.write(f'... {status}')
      continue
    try:
      print(f'... {status}', flush=True)
    except OSError:  # the reader of the pipe is gone
      return
