"""The package as a graph: rooms, their files, and which imports which.

python -m tests.helpers.rooms prints the diagram that docs/architecture.md shows.
"""

import ast
import functools
import re

from tests.helpers.paths import REPOSITORY

PACKAGE = REPOSITORY / 'exgrpo_jax'
# Files at the bottom.
FOUNDATION = ('config', 'datatypes', 'errors', 'renamed', 'packing', '__init__')
_ROW = re.compile(r'\| \[`(\w+)/?`\]\([^)]*\) \| (.+?) \|')


def table(path):
  """Room -> purpose, as a document's table of rooms has them, top first."""
  rows = filter(None, map(_ROW.fullmatch, path.read_text().splitlines()))
  return {row[1]: row[2] for row in rows}


def room_of(module):
  """The room of 'policy.model' or 'errors'; the entry belongs to the commands."""
  head, _, rest = module.partition('.')
  if rest or (PACKAGE / head).is_dir():
    return head
  return 'foundation' if head in FOUNDATION else 'commands'


def modules():
  """Dotted name below the package -> file, of every module."""
  return {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts): path
    for path in sorted(PACKAGE.rglob('*.py'))
    if path.stem != '__init__'
  }


@functools.cache  # parsing the package takes seconds
def imported_names(path):
  """Dotted names of all that a file imports, also within functions."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative imports cannot be resolved here'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return frozenset(names)


def imported_modules(path, known):
  """The `known` modules of this package that a file imports, or imports attributes of."""
  imports = set()
  for name in imported_names(path):
    package, _, module = name.partition('.')
    while package == 'exgrpo_jax' and module and module not in known:
      module = module.rpartition('.')[0]
    if package == 'exgrpo_jax' and module:
      imports.add(module)
  return imports


def file_edges():
  """Module -> modules that it imports."""
  known = modules()
  return {name: imported_modules(path, known) for name, path in known.items()}


def room_edges():
  """Room -> other rooms that it imports."""
  edges = {}
  for name, imports in file_edges().items():
    edges.setdefault(room_of(name), set()).update(map(room_of, imports))
  return {room: imports - {room} for room, imports in edges.items()}


def reachable(edges, start):
  """All nodes that can be reached from `start`."""
  reached, waiting = set(), [start]
  while waiting:
    new = edges[waiting.pop()] - reached
    reached |= new
    waiting += new
  return reached


def reduce(edges):
  """The edges that no longer path implies: the transitive reduction."""
  return {
    node: {
      target
      for target in targets
      if not any(target in reachable(edges, via) for via in targets - {target})
    }
    for node, targets in edges.items()
  }


def mermaid():
  """The reduced graph of rooms as a Mermaid diagram."""
  lines = ['```mermaid', 'graph TD']
  for room, imports in sorted(reduce(room_edges()).items()):
    lines += [f'  {room} --> {imported}' for imported in sorted(imports)]
  return '\n'.join([*lines, '```'])


if __name__ == '__main__':
  print(mermaid())
