"""The warnings of a run, each with its step, from what it printed."""

import pathlib
import re
from typing import Any

FILE = 'console.log'
_WARNING = 'WARNING: '
_NAMED = re.compile(r'step (\d+):')
_STEP = re.compile(
  r'step +(\d+)/\d+ \|'
)  # of a line of progress, which follows the step's warnings


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """What the run warned of, in the order of steps, as {'step', 'text'}; each warning once.

  The step is the one that the warning names or, where it names none, the one that was going on.
  """
  path = workdir / FILE
  if not path.exists():
    return []
  found: dict[tuple[int, str], None] = {}
  waiting: list[str] = []
  done = 0  # the last step that was finished
  with path.open(encoding='utf-8', errors='replace') as file:
    for line in file:
      if line.startswith(_WARNING):
        waiting.append(line.removeprefix(_WARNING).strip())
      elif match := _STEP.match(line):
        done = int(match[1])
        found |= {(_step_of(text, done), text): None for text in waiting}
        waiting = []
  found |= {(_step_of(text, done), text): None for text in waiting}
  return [{'step': step, 'text': text} for step, text in sorted(found)]


def _step_of(text: str, going_on: int) -> int:
  named = _NAMED.match(text)
  return int(named[1]) if named else going_on
