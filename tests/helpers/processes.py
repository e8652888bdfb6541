"""Processes that a test has started, itself or through others."""

import pathlib


def is_running(pid):
  """Whether a process does anything; one that nobody has waited for does not."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):
    return False
