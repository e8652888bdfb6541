"""The package as a graph: rooms, their files, and who imports whom.

python -m tests.helpers.rooms prints the diagram that docs/architecture.md shows.
"""

import ast
import re

from tests.helpers.paths import REPOSITORY

PACKAGE = REPOSITORY / 'exgrpo_jax'
FOUNDATION = ('config', 'datatypes', 'errors', 'padding', '__init__')  # files at the bottom
_ROW = re.compile(r'\| \[`([\w/*.]+?)/?`\]\([^)]*\) \| (.+?) \|(?: (.+?) \|)?')


def table(path):
  """Room -> (purpose, names of its files) of the table of rooms in a document, top room first."""
  rows = [_ROW.fullmatch(line) for line in path.read_text().splitlines()]
  return {
    row[1]: (row[2], re.findall(r'`([\w/]+\.py)`', row[3] or '')) for row in rows if row is not None
  }


def room_of(module):
  """The room of 'policy.model', 'train' or 'errors'."""
  head, _, rest = module.partition('.')
  if rest or (PACKAGE / head).is_dir():
    return head
  return 'foundation' if head in FOUNDATION else 'commands'


def modules():
  """Every module by its dotted name below the package, with its file."""
  return {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts): path
    for path in sorted(PACKAGE.rglob('*.py'))
    if path.stem != '__init__'
  }


def imported(path):
  """Dotted names of all that a file imports, wherever in it, those of this package in full."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path} imports relatively, which this does not read'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


def internal(names, known):
  """Modules of this package among imported names, which may be attributes of theirs."""
  found = set()
  for name in names:
    if not name.startswith('exgrpo_jax.'):
      continue
    name = name.removeprefix('exgrpo_jax.')
    while name and name not in known:
      name = name.rpartition('.')[0]
    if name:
      found.add(name)
  return found


def file_edges():
  """Module -> modules that it imports."""
  known = modules()
  return {name: internal(imported(path), known) for name, path in known.items()}


def room_edges():
  """Room -> rooms that it imports, itself left out."""
  edges = {}
  for name, others in file_edges().items():
    edges.setdefault(room_of(name), set()).update(room_of(other) for other in others)
  return {room: others - {room} for room, others in edges.items()}


def reduced(edges):
  """The edges that no longer path replaces: what a diagram needs to show."""

  def reachable(room):
    seen, waiting = set(), [room]
    while waiting:
      for other in edges[waiting.pop()] - seen:
        seen.add(other)
        waiting.append(other)
    return seen

  return {
    room: {
      other
      for other in others
      if not any(other in reachable(between) for between in others - {other})
    }
    for room, others in edges.items()
  }


def mermaid():
  """The reduced graph of rooms as a Mermaid diagram."""
  lines = ['```mermaid', 'graph TD']
  for room, others in sorted(reduced(room_edges()).items()):
    lines += [f'  {room} --> {other}' for other in sorted(others)]
  return '\n'.join([*lines, '```'])


if __name__ == '__main__':
  print(mermaid())
