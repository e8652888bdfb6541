"""What tests of several rooms share: a mesh, some questions, and one real run."""

import contextlib
import copy
import fcntl
import json
import os
import types

import jax
import pytest

from exgrpo_jax.policy import sharding
from tests.helpers import recording, stand_ins, tiny

# Read when the first program is compiled, also by the processes that tests start. Most of a
# test's time is compilation, and its programs run for an instant.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'


@pytest.fixture(scope='session', autouse=True)
def one_device():
  """Model code needs a mesh in context; tests that bring no other run on this one."""
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    yield mesh


@pytest.fixture
def place(tmp_path):
  """Where stand-ins take the place of gcloud and xpk."""
  yield from stand_ins.folder(tmp_path)


@pytest.fixture
def jsonl(tmp_path):
  """Writes lines, objects or text, to a file of the test's own; gives its path."""

  def write(*lines, name='train.jsonl'):
    path = tmp_path / name
    path.write_text(
      '\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)

  return write


@pytest.fixture(scope='session')
def shared(tmp_path_factory):
  """A folder that all workers of this session share, and a lock on it."""
  base = tmp_path_factory.getbasetemp()
  folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'shared'
  folder.mkdir(exist_ok=True)

  @contextlib.contextmanager
  def locked():
    with open(folder / 'lock', 'w') as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      yield

  return types.SimpleNamespace(folder=folder, locked=locked)


@pytest.fixture(scope='session')
def data(shared):
  """Data specs of the recorded run, and where they are prepared."""
  with shared.locked():
    return types.SimpleNamespace(
      train=tiny.write_questions(shared.folder / 'train.jsonl'),
      evaluation=tiny.write_questions(shared.folder / 'evaluation.jsonl', 4),
      cache=str(shared.folder / 'cache'),
    )


@pytest.fixture(scope='session')
def values(data):
  """The ConfigDict of the recorded run; copy before changing it."""
  config = tiny.values(data.train, data.evaluation)
  config.data.cache_dir = data.cache
  return config


@pytest.fixture
def config(values):
  """The same, to spoil."""
  return copy.deepcopy(values)


@pytest.fixture(scope='session')
def recorded(values, shared):
  """A recording.Recording of a whole run, which one of the workers makes for all."""
  with shared.locked():
    if not (shared.folder / 'steps.pickle').exists():
      recording.record(values, shared.folder)
  return recording.load(values, shared.folder)
