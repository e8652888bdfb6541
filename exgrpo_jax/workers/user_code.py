"""Load user code named in a config, and describe its errors."""

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from exgrpo_jax.errors import InputError

ERRORS = (Exception, SystemExit)  # user code may raise anything or call sys.exit
_MAX_REASON = 500  # characters of an error's text

# Folders without user code: this package, installed packages, and Python's standard library.
_LIBRARIES = (
  os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
  *(sysconfig.get_path(name) + os.sep for name in ('purelib', 'platlib', 'stdlib')),
)

_NEEDED = {
  'grading.rewards': (
    "'package.module:function', importable where the run is started, and return a number "
    'from -1e10 to 1e10 for any response, such as exgrpo_jax.grading.rewards:think_format'
  ),
  'grading.verifier': (
    "'package.module:Class', importable where the run is started, and return a Judgement for any "
    'response, such as exgrpo_jax.grading.verifier:BuiltIn'
  ),
  'environment.name': (
    "'package.module:Class', importable where the run is started, and a class that is made without "
    'arguments, or with config.environment.tools, such as exgrpo_jax.environments.toys:Guess'
  ),
  'environment.tools': (
    "'package.module:function', importable where the run is started, with a docstring and type "
    'hints, such as exgrpo_jax.environments.expressions:calculate, or a class of such methods'
  ),
}


def load(spec: str, what: str = 'function') -> Any:
  """Import 'package.module:name' and return it. Raises whatever importing the module raises.

  The current folder is searched too, even if the command itself does not search it.
  """
  module, _, name = spec.partition(':')
  if not (module and name):
    raise ValueError(f"it does not have the form 'package.module:{what}'")
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def refusing(key: str, spec: str) -> Iterator[None]:
  """Turn any error in user code into an InputError that names the code and the setting."""
  try:
    yield
  except InputError:
    raise
  except ERRORS as error:
    raise InputError(
      f'config.{key}: {spec!r} cannot be used ({summarize(error)}). It must be {_NEEDED[key]}.'
    ) from error


def summarize(error: BaseException) -> str:
  """Summarize an error in one line with the file and line in user code; may quote the response."""
  line = on_a_line(error)
  return f'{line} ({place})' if (place := _place(error)) else line


def on_a_line(error: BaseException) -> str:
  """Return an error's type and text on one short line."""
  text = f'{type(error).__name__}: {error}'[:_MAX_REASON]
  return ''.join(c if c.isprintable() else ' ' for c in text).strip(': ')


def _place(error: BaseException) -> str:
  """Return file:line of the innermost frame in user code, or ''."""
  frames = traceback.extract_tb(error.__traceback__)
  own = [f for f in frames if not f.filename.startswith(('<', *_LIBRARIES))]
  return f'{own[-1].filename}:{own[-1].lineno}' if own else ''
