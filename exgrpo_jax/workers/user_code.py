"""Load the user code named in a config, and summarize its errors."""

import contextlib
import functools
import importlib
import inspect
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
# For each setting: the form of a value, an example, and what the code must do.
_FORMS = {
  'grading.rewards': (
    "'package.module:function', such as exgrpo_jax.grading.rewards:think_format. The function must "
    'return a number from -1e10 to 1e10 for any response (or a list of numbers if it is in '
    'config.grading.batched), and any service that it calls must be running'
  ),
  'grading.verifier': (
    "'package.module:Class', such as exgrpo_jax.grading.verifier:BuiltIn. Its method `judge` must "
    'return a Judgement for any response'
  ),
  'environment.name': (
    "'package.module:Class', such as exgrpo_jax.environments.toys:Guess. The class is instantiated "
    'without arguments, or with config.environment.tools if there are tools'
  ),
  'environment.tools': (
    "'package.module:function', such as exgrpo_jax.environments.expressions:calculate. The "
    'function, or each public method of a class, needs a docstring and type hints'
  ),
}


def load(spec: str, kind: str = 'function') -> Any:
  """Import and return the object 'package.module:name'. Raises whatever the import raises.

  First adds the current folder to sys.path if it is missing.
  """
  module, _, name = spec.partition(':')
  if not (module and name) or module.endswith('.py'):
    raise ValueError(f"it must have the form 'package.module:{kind}', without .py")
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  return getattr(importlib.import_module(module), name)


def awaited(result: Any) -> Any:
  """Return a function's result; if it is a coroutine, run it first."""
  return _runner().run(result) if inspect.iscoroutine(result) else result


@functools.cache
def _runner() -> Any:
  """Create the event loop once, because async functions may keep connections open between calls."""
  import asyncio  # takes a tenth of a second, and workers must start instantly

  return asyncio.Runner()


@contextlib.contextmanager
def refusing(key: str, spec: str) -> Iterator[None]:
  """Turn any error in user code into an InputError that names the code and the setting."""
  try:
    yield
  except InputError:
    raise
  except ERRORS as error:
    advice = 'Correct the function as shown in docs/extending.md'
    if key in _FORMS:
      place = 'the folder where the run is started'
      advice = f'Set a value of the form {_FORMS[key]}. The module must be importable from {place}'
    raise InputError(
      f'config.{key}: {spec!r} cannot be used ({summarize(error)}). {advice}.'
    ) from error


def summarize(error: BaseException) -> str:
  """Summarize an error and its location in user code on one line.

  The line may quote the response.
  """
  frames = traceback.extract_tb(error.__traceback__)
  user_frames = [frame for frame in frames if not frame.filename.startswith(('<', *_LIBRARIES))]
  # The innermost frame in user code.
  place = f' ({user_frames[-1].filename}:{user_frames[-1].lineno})' if user_frames else ''
  return f'{on_a_line(error)}{place}'


def on_a_line(error: BaseException) -> str:
  """Format an error's type and text as one short line."""
  text = f'{type(error).__name__}: {error}'[:_MAX_REASON]
  return ''.join(c if c.isprintable() else ' ' for c in text).strip(': ')
