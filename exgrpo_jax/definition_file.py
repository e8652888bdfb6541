"""Runs a user's file that defines a config, sweep, study or suite."""

import runpy
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from exgrpo_jax.errors import InputError


def evaluate(
  path: str,
  kind: str,
  returned: str,
  check: Callable[[Any], None] | None = None,
  arguments: Sequence[str] = (),
  is_flag: bool = True,
) -> tuple[Any, str]:
  """Run the file; return what its get_config(), get_sweep(), … returns, and its docstring.

  Args:
    path: of the file.
    kind: what it defines and by which flag it is given, such as 'config' or 'sweep'.
    returned: what the function returns, and a file where it does, for messages.
    check: raises an exception where what was returned cannot be used; None: the caller checks.
    arguments: of the function.
    is_flag: whether the file is given by a flag; messages then begin with that.

  Raises:
    InputError: the file fails, has no such function, or does not pass `check`; it names the flag
      and the line.
  """
  function = f'get_{kind}'
  try:
    definitions = runpy.run_path(path)
    if function not in definitions:
      raise InputError(f'it has no {function}()')
    value = definitions[function](*arguments)
    if check:
      check(value)
  except (Exception, SystemExit) as error:  # the file is the user's code and may raise anything
    given = f'--{kind}={path}' if is_flag else path
    problem = str(error) if isinstance(error, InputError) else f'{type(error).__name__}: {error}'
    raise InputError(
      f'{given}{_line(error, path)}: {problem.rstrip(".")}; a {kind} is a Python file '
      f'whose {function}() returns {returned}.'
    ) from error
  return value, (definitions['__doc__'] or '').strip()


def _line(error: BaseException, path: str) -> str:
  """':7' where line 7 of the file is the last of its lines that the error came through."""
  if isinstance(error, SyntaxError) and error.filename == path:
    return f':{error.lineno}'
  lines = [
    frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
  ]
  return f':{lines[-1]}' if lines else ''
