"""A file of the user's that defines a sweep or a study: run, and what its function returns."""

import os
import runpy
from typing import Any

from exgrpo_jax.errors import InputError


def evaluate(path: str, flag: str, function: str, returned: str) -> tuple[Any, str]:
  """What the file's `function` returns, and the file's docstring.

  Args:
    path: of the file.
    flag: that names it, for messages: 'sweep' or 'study'.
    function: its name, without arguments.
    returned: what it returns, for messages.

  Raises:
    InputError: the file does not exist or fails, or has no such function.
  """
  if not os.path.isfile(path):
    folder = {'sweep': 'configs/sweeps/', 'study': 'configs/studies/'}[flag]
    raise InputError(f'--{flag}={path}: there is no such file; {folder} has some.')
  try:
    definitions = runpy.run_path(path)
    if function not in definitions:
      raise InputError(f'it has no {function}(), which returns {returned}.')
    return definitions[function](), (definitions['__doc__'] or '').strip()
  except Exception as error:  # the file is the user's code and may raise anything
    kind = '' if isinstance(error, InputError) else f'{type(error).__name__}: '
    raise InputError(f'--{flag}={path}: {kind}{error}') from error
