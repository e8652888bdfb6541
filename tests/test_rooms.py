"""The architecture as a test: the code is held to the table of rooms in docs/architecture.md."""

import ast
import sys

from tests.helpers import rooms
from tests.helpers.paths import REPOSITORY

ARCHITECTURE = REPOSITORY / 'docs' / 'architecture.md'
MAX_FILE, MAX_FUNCTION = 350, 60  # lines


def listed():
  table = rooms.table(ARCHITECTURE)
  assert len(table) > 10
  return table


def functions(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node.name, node.end_lineno - node.lineno + 1


def test_every_room_and_every_file_is_in_the_table():
  files = {room: set() for room in listed()}
  for name in rooms.modules():
    room = rooms.room_of(name)
    inside = name.removeprefix(f'{room}.')
    if '.' not in inside:  # of packages within a room the table names the package
      files[room].add(f'{inside}.py')
  assert files == {room: set(names) for room, (_, names) in listed().items()}


def test_no_room_imports_one_above_it():
  order = {room: place for place, room in enumerate(listed())}
  upward = [
    f'{name} imports {other}'
    for name, others in rooms.file_edges().items()
    for other in others
    if order[rooms.room_of(other)] < order[rooms.room_of(name)]
  ]
  assert upward == []


def test_no_file_imports_itself_through_others():
  edges, done, path = rooms.file_edges(), set(), []

  def visit(name):
    assert name not in path, ' -> '.join([*path[path.index(name) :], name])
    if name not in done:
      path.append(name)
      for other in sorted(edges[name]):
        visit(other)
      done.add(path.pop())

  for name in edges:
    visit(name)


def test_the_diagram_of_rooms_is_that_of_the_code():
  """To renew it: python -m tests.helpers.rooms."""
  assert rooms.mermaid() in ARCHITECTURE.read_text()


def test_the_readme_has_the_same_rooms_and_purposes():
  in_readme = rooms.table(REPOSITORY / 'README.md')
  assert [(room, purpose) for room, (purpose, _) in in_readme.items()] == [
    (room, purpose) for room, (purpose, _) in listed().items()
  ]


def test_tests_mirror_the_rooms():
  folders = {path.name for path in (REPOSITORY / 'tests').iterdir() if path.is_dir()}
  others = {'checkpoints', 'docs', 'helpers', 'processes', 'tpu_scripts', '__pycache__'}
  assert folders - others == set(listed()) - {'commands', 'foundation'}


def test_a_file_and_a_function_fit_into_a_head():
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
  wrong = [
    name
    for name, path in rooms.modules().items()
    if (leaf := name.rpartition('.')[2]) in sys.stdlib_module_names
    or leaf in {function for function, _ in functions(path)}
  ]
  assert wrong == []


def test_grading_and_what_it_imports_need_no_jax():
  """Its workers start in an instant, and leave the accelerator alone."""
  edges, reached = rooms.file_edges(), set()
  waiting = ['grading.worker', 'grading.rewards', 'verify']
  while waiting:
    name = waiting.pop()
    reached.add(name)
    waiting += edges[name] - reached
  assert 'grading.verifier' in reached
  outside = {
    library.split('.')[0] for name in reached for library in rooms.imported(rooms.modules()[name])
  }
  assert not outside & {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'}, reached


def test_tensorflow_torch_and_transformers_are_never_imported():
  outside = {
    library.split('.')[0] for path in rooms.modules().values() for library in rooms.imported(path)
  }
  assert not outside & {'tensorflow', 'torch', 'transformers'}


def test_only_sharding_names_mesh_axes():
  naming = [
    name
    for name, path in rooms.modules().items()
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and node.value in ('fsdp', 'tensor')  # 'data' is also a word
  ]
  assert set(naming) == {'policy.sharding'}
