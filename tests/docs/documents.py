"""The documents and what they mention, for the tests that hold them to the repository."""

import ast
import functools
import importlib.util
import pathlib
import re
import types
from collections.abc import Iterator

from tests.helpers.paths import REPOSITORY

PACKAGE, STUDIES = REPOSITORY / 'exgrpo_jax', REPOSITORY / 'studies'
SOURCES = [*sorted(PACKAGE.rglob('*.py')), *sorted(STUDIES.glob('*.py'))]
DOCS = REPOSITORY / 'docs'
CHANGELOG = REPOSITORY / 'CHANGELOG.md'  # it names what is no longer there
DOCUMENTS = [
  *(REPOSITORY / name for name in ('README.md', 'CONTRIBUTING.md', 'tpu_scripts/README.md')),
  *sorted(STUDIES.glob('*.md')),
  *sorted(DOCS.glob('*.md')),
]

_FENCE = re.compile(r'^[ \t]*```(\w*)\n(.*?)^[ \t]*```', re.MULTILINE | re.DOTALL)
_CODE = re.compile(r'(?<!`)`([^`]+)`(?!`)')
_LINK = re.compile(r'(?<!!)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)')
_HEADING = re.compile(r'^#+ (.*)$', re.MULTILINE)


def load(name: str) -> types.ModuleType:
  """The module docs/{name}.py; docs/ is no package."""
  spec = importlib.util.spec_from_file_location(f'docs_{name}', DOCS / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def place(path: pathlib.Path) -> str:
  return path.relative_to(REPOSITORY).as_posix()


def blocks(text: str, language: str) -> list[str]:
  """The contents of the fenced blocks in a language."""
  return [content for kind, content in _FENCE.findall(text) if kind == language]


def prose(text: str) -> str:
  """A document without its fenced blocks and comments."""
  return re.sub(r'<!--.*?-->', '', _FENCE.sub('', text), flags=re.DOTALL)


def paragraphs(text: str) -> list[str]:
  """The paragraphs of a document, its headings and tables among them, each on one line."""
  return [' '.join(paragraph.split()) for paragraph in re.split(r'\n\s*\n', prose(text))]


def inline_code(path: pathlib.Path) -> list[str]:
  text = path.read_text()
  if path.name == 'coming_from.md':  # two columns are of TRL and verl
    text = re.sub(r'^\|[^|]*\|[^|]*\|', '|', text, flags=re.MULTILINE)
  return _inline_code(text)


def _inline_code(text: str) -> list[str]:
  return [code for paragraph in paragraphs(text) for code in _CODE.findall(paragraph)]


def links(path: pathlib.Path) -> list[str]:
  """The targets of a document's links, those of code aside."""
  return _LINK.findall(_CODE.sub('', prose(path.read_text())))


def anchors(path: pathlib.Path) -> set[str]:
  """The anchors of a document's headings, as GitHub and mkdocs make them."""
  texts = _HEADING.findall(prose(path.read_text()))
  return {re.sub(r'\s+', '-', re.sub(r'[^\w\s-]', '', text).strip().lower()) for text in texts}


def commands(path: pathlib.Path) -> list[str]:
  """Each command of the shell blocks and of the inline code, on one line."""
  text = path.read_text()
  shell = '\n'.join(blocks(text, 'bash')).replace('\\\n', ' ')
  return [*filter(str.strip, shell.splitlines()), *_inline_code(text)]


# ---- The package and studies/, read without importing them ----


@functools.cache
def modules() -> dict[str, list[pathlib.Path]]:
  """The files by stem; a package's own is its folder's name."""
  found = {}
  for path in SOURCES:
    stem = path.parent.name if path.stem == '__init__' else path.stem
    found.setdefault(stem, []).append(path)
  return found


@functools.cache
def names(path: pathlib.Path) -> dict[str, set[str]]:
  """Top-level names of a file, imported ones included; each with its attributes if a class."""
  found = {}
  for node in ast.parse(path.read_text()).body:
    for name, attributes in _bound(node):
      found.setdefault(name, set()).update(attributes)
  return found


def _bound(node: ast.stmt) -> Iterator[tuple[str, set[str]]]:
  if isinstance(node, ast.ClassDef):
    attributes = {name for inner in node.body for name, _ in _bound(inner)}
    found = [x for x in ast.walk(node) if isinstance(x, ast.Attribute)]
    stored = [x for x in found if isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == 'self']
    yield node.name, attributes | {x.attr for x in stored}
  elif isinstance(node, ast.FunctionDef):
    yield node.name, set()
  elif isinstance(node, ast.Import | ast.ImportFrom):
    for alias in node.names:
      yield alias.asname or alias.name, set()
  elif isinstance(node, ast.Assign | ast.AnnAssign):
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
      for name in ast.walk(target):
        if isinstance(name, ast.Name):
          yield name.id, set()


@functools.cache
def source() -> str:
  """All of them as text."""
  return '\n'.join(path.read_text() for path in SOURCES)


@functools.cache
def identifiers() -> set[str]:
  """Every word of the source."""
  return set(re.findall(r'\w+', source()))


@functools.cache
def flags() -> set[str]:
  """The command line flags that they define, by absl or argparse."""
  found = set()
  for paths in modules().values():
    for path in paths:
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
          name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
          if name.startswith('DEFINE_') or name in ('define_path', 'define_specs'):
            found.add(node.args[0].value)
          elif name == 'add_argument':
            found.add(node.args[0].value.lstrip('-'))
  return found
