"""What tests of several rooms share: a mesh, some questions, and one real run."""

import copy
import fcntl
import json
import os
import shutil
import types

import jax
import pytest

from exgrpo_jax.policy import sharding
from tests.helpers import losses, recording, stand_ins, tabs, tiny

# Read when the first program is compiled, also by the processes that tests start. Most of a
# test's time is compilation, and its programs run for an instant.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'
if jax.version.__version_info__ < (0, 11):  # XLA ends a process for a flag that it does not know
  os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'  # half the time to compile
  # A program in one piece takes a tenth less than in pieces for several cores, which are busy.
  os.environ['XLA_FLAGS'] += ' --xla_cpu_parallel_codegen_split_count=1'


@pytest.fixture(scope='session', autouse=True)
def one_device():
  """Model code needs a mesh in context; tests that enter no other mesh run on this one."""
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    yield mesh


@pytest.fixture
def large_passes():
  """See `losses.large_passes`."""
  with losses.large_passes():
    yield


@pytest.fixture
def place(tmp_path):
  """A folder of stand-ins that replace gcloud and xpk."""
  yield from stand_ins.folder(tmp_path)


@pytest.fixture
def jsonl(tmp_path):
  """Writes lines, objects or text, to a file in the test's folder; returns its path."""

  def write(*lines, name='train.jsonl'):
    path = tmp_path / name
    path.write_text(
      '\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)

  return write


@pytest.fixture
def write_sweep(tmp_path):
  """Writes a sweep file whose get_sweep returns an expression; returns its path."""

  def write(expression):
    path = tmp_path / 'sweep.py'
    path.write_text(
      'import numpy as np\nfrom exgrpo_jax.sweeps import trials\n'
      f'def get_sweep():\n  return {expression}\n'
    )
    return str(path)

  return write


@pytest.fixture(scope='session')
def session_folder(tmp_path_factory):
  """A folder that all workers of the session share."""
  base = tmp_path_factory.getbasetemp()
  folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'session'
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope='session')
def make_once(session_folder):
  """A function of (name, make): a folder that make(folder) fills in one worker, for all of them.

  The others wait for it. Where it fails, or its worker dies, the next one starts from nothing.
  """

  def make_in_one_worker(name, make):
    folder, complete = session_folder / name, session_folder / f'{name}.complete'
    with open(session_folder / f'{name}.lock', 'w') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder)
        complete.touch()
    return folder

  return make_in_one_worker


@pytest.fixture(scope='session')
def compiled(pytestconfig):
  """The folder of a compilation cache, which the next call of pytest uses too."""
  return pytestconfig.cache.mkdir('compiled')


@pytest.fixture(scope='session')
def data(make_once):
  """Data specs of the recorded run, and where they are prepared."""

  def write(folder):
    tiny.write_questions(folder / 'train.jsonl')
    tiny.write_questions(folder / 'evaluation.jsonl', 4)

  folder = make_once('data', write)
  return types.SimpleNamespace(
    train=str(folder / 'train.jsonl'),
    evaluation=str(folder / 'evaluation.jsonl'),
    cache=str(folder / 'cache'),
  )


@pytest.fixture(scope='session')
def values(data):
  """The ConfigDict of the recorded run; copy it before changing it."""
  config = tiny.values(data.train, data.evaluation)
  config.data.cache_dir = data.cache
  return config


@pytest.fixture
def config(values):
  """A copy of it, which the test may change."""
  return copy.deepcopy(values)


@pytest.fixture(scope='session')
def recorded(values, make_once, compiled):
  """The recording.Recording of a run from its first step to its last."""
  folder = make_once('recording', lambda place: recording.record(values, place, compiled, True))
  return recording.load(values, folder, compiled)


@pytest.fixture(scope='module')  # it runs an event loop, which other tests do not expect
def chromium():
  """A headless Chromium; the test is skipped where there is none."""
  if why := tabs.missing():
    pytest.skip(why)
  with tabs.opened() as opened:
    yield opened


@pytest.fixture
def tab(chromium):
  """A tab of 1280 pixels; whatever its console complains of fails the test."""
  with tabs.open_tab(chromium) as opened:
    yield opened
