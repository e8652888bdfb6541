"""How heavy the project is: python -m tests.helpers.weight [ROOT ...], one column for each tree."""

import ast
import collections
import pathlib
import sys

LOOP, FORMULA = 'take_steps', 'policy_terms'  # from the training loop to the loss's formula


def lines(paths):
  return sum(len(path.read_text().splitlines()) for path in paths)


def functions(tree):
  """Every function of a module, nested ones and methods included."""
  return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def room(package, path):
  """The folder of the package that a file lies in, or the file itself at the top."""
  return path.relative_to(package).with_suffix('').parts[0]


def room_edges(package, trees):
  """Room -> the rooms that its files import."""
  rooms = {room(package, path) for path in trees}
  edges = {name: set() for name in rooms}
  for path, tree in trees.items():
    for node in ast.walk(tree):
      names = []
      if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'exgrpo_jax':
        names = [f'{node.module}.{alias.name}' for alias in node.names]
      elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      for name in names:
        parts = name.split('.')
        if parts[0] == 'exgrpo_jax' and len(parts) > 1 and parts[1] in rooms:
          edges[room(package, path)].add(parts[1])
  return {name: imports - {name} for name, imports in edges.items()}


def floors(edges):
  """The longest chain of rooms of which each imports the next."""
  heights = {}

  def height(name, above=()):
    if name not in heights:
      below = [height(other, (*above, name)) for other in edges[name] if other not in above]
      heights[name] = 1 + max(below, default=0)
    return heights[name]

  return max(map(height, edges))


def named_functions(tree, mine, own):
  """What names mean in a file: (name -> function, imported module -> its functions by name).

  `mine` are the file's own functions by name, `own` those of each module.
  """
  known, modules = dict(mine), {}
  for node in ast.walk(tree):
    for alias in node.names if isinstance(node, ast.ImportFrom) else ():
      room, _, name = f'{node.module}.{alias.name}'.partition('exgrpo_jax.')[2].rpartition('.')
      if f'{room}.{name}'.lstrip('.') in own:
        modules[alias.asname or name] = own[f'{room}.{name}'.lstrip('.')]
      elif name in own.get(room, {}):
        known[alias.asname or name] = own[room][name]
  return known, modules


def leads(package, trees):
  """Function -> the functions that its body names."""
  module = {path: '.'.join(path.relative_to(package).with_suffix('').parts) for path in trees}
  own = {
    module[path]: {f.name: (path, f.name) for f in functions(tree)} for path, tree in trees.items()
  }
  found = {}
  for path, tree in trees.items():
    known, modules = named_functions(tree, own[module[path]], own)
    for function in functions(tree):
      nodes = list(ast.walk(function))
      names = {known.get(node.id) for node in nodes if isinstance(node, ast.Name)}
      names |= {
        modules.get(node.value.id, {}).get(node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      }
      found[path, function.name] = sorted(names - {None})
  return found


def hops(package, trees):
  """The names of the functions on the shortest way from LOOP to FORMULA."""
  to = leads(package, trees)
  ways = {start: [LOOP] for start in to if start[1] == LOOP}
  waiting = collections.deque(ways)
  while waiting:
    node = waiting.popleft()
    if node[1] == FORMULA:
      return ways[node]
    for other in to[node]:
      if other not in ways:
        ways[other] = [*ways[node], other[1]]
        waiting.append(other)
  return []


def holders(trees):
  """The dataclasses with fields of other classes of ours that stand beside the training loop.

  Those that the files of the loop and of what opens a run name, plain values (datatypes) aside.
  """
  classes, fields = set(), {}
  for path, tree in trees.items():
    for node in ast.walk(tree):
      if isinstance(node, ast.ClassDef) and path.stem != 'datatypes':
        classes.add(node.name)
        hints = [part.annotation for part in node.body if isinstance(part, ast.AnnAssign)]
        fields[node.name] = {
          getattr(x, 'attr', getattr(x, 'id', '')) for h in hints for x in ast.walk(h)
        }
  named = set()
  for tree in trees.values():
    if {f.name for f in functions(tree)} & {LOOP, 'opened', 'begin'}:
      named |= {getattr(x, 'attr', getattr(x, 'id', '')) for x in ast.walk(tree)}
  return sorted(name for name in named & classes if fields[name] & classes)


def measure(root):
  """What the table shows of one tree."""
  package = root / 'exgrpo_jax'
  python = sorted(package.rglob('*.py'))
  trees = {path: ast.parse(path.read_text()) for path in python}
  edges = room_edges(package, trees)
  page = [p for p in package.rglob('*.js') if 'vendor' not in p.parts]
  way = hops(package, trees)
  return {
    'package, lines of Python': lines(python),
    "the page's JavaScript": lines(page),
    'benchmarks': lines((root / 'benchmarks').rglob('*.py')),
    'configs': lines((root / 'configs').rglob('*.py')),
    'tests': lines((root / 'tests').rglob('*.py')),
    'documents': lines([*(root / 'docs').glob('*.md'), root / 'README.md']),
    'files of Python': len(python),
    "files at the package's top": len(list(package.glob('*.py'))),
    'rooms and files at the top': len(edges),
    'floors': floors(edges),
    'arrows': sum(map(len, edges.values())),
    'hops from loop to formula': len(way) - 1,
    'holders beside the loop': len(holders(trees)),
    'longest file': max(lines([path]) for path in python),
    'longest function': max(
      f.end_lineno - f.lineno + 1 for tree in trees.values() for f in functions(tree)
    ),
  }, [' -> '.join(way), ', '.join(holders(trees))]


def main():
  roots = [pathlib.Path(word) for word in sys.argv[1:] or ['.']]
  measured = [measure(root) for root in roots]
  for name in measured[0][0]:
    print(f'{name:<28}', *(f'{values[name]:>8,}' for values, _ in measured))
  for root, (_, names) in zip(roots, measured):
    print(f'{root}:', *names, sep='\n  ')


if __name__ == '__main__':
  main()
