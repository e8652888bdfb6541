"""The architecture: the code is held to the table of rooms in docs/architecture.md."""

import ast
import os
import subprocess
import sys

import pytest

from tests.helpers import rooms
from tests.helpers.paths import REPOSITORY

ARCHITECTURE = REPOSITORY / 'docs' / 'architecture.md'
MAX_FILE, MAX_FUNCTION = 600, 60  # lines


def room_table():
  """The rooms of docs/architecture.md, from the top."""
  table = rooms.table(ARCHITECTURE)
  assert len(table) > 10
  return table


def functions(path):
  """(name, lines) of every function in a file, nested ones and methods included."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node.name, node.end_lineno - node.lineno + 1


def test_the_table_has_every_room():
  assert set(room_table()) == {rooms.room_of(name) for name in rooms.modules()}


@pytest.mark.full
def test_no_room_imports_one_above_it():
  level = {room: index for index, room in enumerate(room_table())}
  upward = [
    f'{name} imports {imported}'
    for name, imports in rooms.file_edges().items()
    for imported in imports
    if level[rooms.room_of(imported)] < level[rooms.room_of(name)]
  ]
  assert upward == []


def test_there_is_no_cycle_of_imports():
  edges, done, path = rooms.file_edges(), set(), []

  def visit(name):
    assert name not in path, ' -> '.join([*path[path.index(name) :], name])
    if name not in done:
      path.append(name)
      for imported in sorted(edges[name]):
        visit(imported)
      done.add(path.pop())

  for name in edges:
    visit(name)


def test_the_diagram_of_rooms_is_that_of_the_code():
  """To renew it: python -m tests.helpers.rooms."""
  assert rooms.mermaid() in ARCHITECTURE.read_text()


def test_tests_mirror_the_rooms():
  folders = {path.name for path in (REPOSITORY / 'tests').iterdir() if path.is_dir()}
  no_room = {'benchmarks', 'checkpoints', 'docs', 'helpers', 'processes', 'tpu_scripts'}
  assert folders - no_room - {'__pycache__'} == set(room_table()) - {'foundation'}


def test_files_and_functions_are_short_enough_to_keep_in_mind():
  long_files = [
    f'{name}: {lines} lines'
    for name, path in rooms.modules().items()
    if (lines := len(path.read_text().splitlines())) > MAX_FILE
  ]
  long_functions = [
    f'{name}.{function}: {lines} lines'
    for name, path in rooms.modules().items()
    for function, lines in functions(path)
    if lines > MAX_FUNCTION
  ]
  assert long_files + long_functions == []


def test_no_module_has_the_name_of_a_function_in_it_or_of_the_standard_library():
  ambiguous = [
    name
    for name, path in rooms.modules().items()
    if (stem := name.rpartition('.')[2]) in sys.stdlib_module_names
    or stem in {function for function, _ in functions(path)}
  ]
  assert ambiguous == []


def imported_packages(names):
  """The top-level packages that modules of ours import."""
  paths = rooms.modules()
  return {
    imported.split('.')[0] for name in names for imported in rooms.imported_names(paths[name])
  }


def test_workers_and_what_they_import_need_no_jax():
  """They start in an instant, and leave the accelerator alone."""
  starts = {
    'workers.server',
    'grading.worker',
    'grading.rewards',
    'environments.worker',
    'commands.verify',
  }
  edges = rooms.file_edges()
  reached = starts.union(*(rooms.reachable(edges, start) for start in starts))
  assert 'grading.verifier' in reached
  jax_packages = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'}
  assert not imported_packages(reached) & jax_packages, reached


def test_tensorflow_torch_and_transformers_are_never_imported():
  assert not imported_packages(rooms.modules()) & {'tensorflow', 'torch', 'transformers'}


def test_the_package_needs_nothing_of_what_stands_beside_it():
  assert not imported_packages(rooms.modules()) & {'benchmarks', 'studies', 'tests'}


def test_only_sharding_names_mesh_axes():
  naming = {
    name
    for name, path in rooms.modules().items()
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and node.value in ('fsdp', 'tensor')  # 'data' has other uses
  }
  assert naming == {'policy.sharding'}


# ---- Importing the package: it changes the process of our own commands, and no other ----


AT_BEGIN = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(
  lambda: print(
    'XLA_CLIENT_MEM_FRACTION' in os.environ, signal.getsignal(signal.SIGINT) == signal.SIG_DFL
  )
)
"""


@pytest.mark.full
@pytest.mark.parametrize(('module', 'changed'), [('exgrpo_jax', True), ('mylab', False)])
def test_a_package_that_imports_this_one_keeps_its_memory_and_signals(tmp_path, module, changed):
  (tmp_path / 'sitecustomize.py').write_text(AT_BEGIN)  # Python imports it before anything else
  (tmp_path / 'mylab').mkdir()
  (tmp_path / 'mylab' / '__init__.py').write_text('import exgrpo_jax')
  (tmp_path / 'mylab' / '__main__.py').touch()
  environment = {'PYTHONPATH': str(tmp_path), 'PATH': os.environ['PATH']}
  said = subprocess.check_output(
    [sys.executable, '-m', module, 'verify', '--help'], env=environment, text=True
  )
  assert said.endswith(f'{changed} {changed}\n')
