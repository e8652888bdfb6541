"""The architecture as a test: imports go strictly downward."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'exgrpo_jax'

# DESIGN's section 3 from the bottom; its layer 0 has three floors, for a mesh has a Config
# and a Config has errors, and what the verifier stands on has floors of its own.
FLOORS = (
  ('errors', 'types', 'clock', 'compilations', 'rewards', 'answers.units'),
  ('config', 'hosts', 'watchdog', 'answers.tokens', 'answers.extraction'),
  ('sharding', 'preemption', 'answers.cursor'),
  ('answers.atoms', 'answers.number'),
  ('answers.latex', 'answers.quantity'),
  ('answers.answer',),
  ('answers.equality',),
  (
    'objective',
    'logprobs',
    'verifier',
    'replay',
    'stream',
    'rotary',
    'product',
    'prompt',
    'draw',
    'cache',
    'attention',
    'trials',
    'launcher',
  ),
  ('worker',),
  (
    'model',
    'tokenizer',
    'tasks',
    'records',
    'grading',
    'optimizer',
    'metrics',
    'plots',
    'statistics',
  ),
  ('questions', 'architecture', 'slots', 'comparison', 'workdir'),
  ('sampler',),
  ('rollout', 'checkpoint', 'weights', 'update'),
  ('experiment',),
  ('evaluate', 'warm_start', 'export'),
  ('train',),
  ('capacity', 'sweep', 'report', 'benchmark'),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FILES = sorted(
  '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
  for path in PACKAGE.rglob('*.py')
  if path.stem != '__init__'
)
PACKAGES = ('exgrpo_jax', 'exgrpo_jax.answers')


def source(name):
  return PACKAGE.joinpath(*name.split('.')).with_suffix('.py').read_text()


def imported(name):
  """Dotted names of all that a file imports, wherever in it."""
  found = set()
  for node in ast.walk(ast.parse(source(name))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{name}.py imports relatively, which this test does not read'
      found |= (
        {f'{node.module}.{alias.name}' for alias in node.names}
        if node.module in PACKAGES
        else {node.module}
      )
  return found


def own(names):
  return {name.removeprefix('exgrpo_jax.') for name in names if name.startswith('exgrpo_jax.')}


def test_every_file_has_its_floor():
  assert set(FILES) <= set(FLOOR)
  assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} <= {'answers', '__pycache__'}


@pytest.mark.parametrize('name', FILES)
def test_imports_go_strictly_down(name):
  assert [other for other in own(imported(name)) if FLOOR[other] >= FLOOR[name]] == []


@pytest.mark.parametrize('name', FILES)
def test_a_file_fits_into_a_head(name):
  assert len(source(name).splitlines()) <= 400


def test_the_grading_worker_and_all_below_it_need_no_jax():
  reached, waiting = set(), ['worker', 'rewards']
  while waiting:
    name = waiting.pop()
    reached.add(name)
    waiting += own(imported(name)) - reached
  assert 'verifier' in reached
  outside = {name.split('.')[0] for file in reached for name in imported(file)}
  assert not outside & {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'}, reached


def test_tensorflow_torch_and_transformers_are_never_imported():
  outside = {name.split('.')[0] for file in FILES for name in imported(file)}
  assert not outside & {'tensorflow', 'torch', 'transformers'}


@pytest.mark.parametrize('name', [name for name in FILES if name != 'sharding'])
def test_only_sharding_names_mesh_axes(name):
  words = {
    node.value for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.Constant)
  }
  assert not words & {'fsdp', 'tensor'}  # 'data' is also a word
