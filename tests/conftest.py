"""One real run, written down stage by stage, for the tests of what it is made of."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from exgrpo_jax import experiment, train
from exgrpo_jax.algorithm import replay
from exgrpo_jax.grading import pool
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime.workdir import claim_workdir
from tests.helpers import stand_ins, tiny

# Read when the first program is compiled, also by the processes that tests start. Most of a
# test's time is compilation, and its programs run for an instant.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'


@dataclasses.dataclass
class Step:
  """What one turn of the loop read and wrote."""

  plan: Any = None
  cursor: Any = None  # behind the plan's fresh questions
  buffer: Any = None  # that the plan was drawn from
  params: Any = None  # NumPy, of the policy that acted
  replays: Any = None
  responses: Any = None
  verdicts: Any = None
  batch: Any = None
  after: Any = None  # the buffer that was recorded


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
def data(tmp_path_factory):
  """Data specs of the recorded run, and where they are prepared."""
  folder = tmp_path_factory.mktemp('data')
  return types.SimpleNamespace(
    train=tiny.write_questions(folder / 'train.jsonl'),
    evaluation=tiny.write_questions(folder / 'evaluation.jsonl', 4),
    cache=str(folder / 'cache'),
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
def recorded(values, tmp_path_factory):
  """A whole run through train.run: .steps (number -> Step), .experiment, .rollout, .workdir.

  .cache is where others find what it compiled, in this process within .compiling().
  """
  workdir = tmp_path_factory.mktemp('runs') / 'recorded'
  cache = tmp_path_factory.mktemp('compiled')
  run = types.SimpleNamespace(
    workdir=workdir,
    steps={},
    rollout=None,
    cache=cache,
    compiling=functools.partial(_compiling, cache),
  )
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(pool, 'COMMAND', tiny.WORKER)
    _listen(patch, run)
    run.experiment = experiment.open_experiment(values, str(workdir))
    rollout = train.rollout_of(run.experiment)
    params = train.initial_params(run.experiment)
    claim_workdir(values, str(workdir))
    train.run(run.experiment, rollout, params)
  del run.steps[tiny.NUM_STEPS + 1]  # planned ahead, never taken
  return run


@contextlib.contextmanager
def _compiling(folder):
  """Looks in `folder` before compiling, and keeps there what it compiles."""
  kept = {
    'jax_compilation_cache_dir': str(folder),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  before = {name: getattr(jax.config, name) for name in kept}
  for name, value in kept.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def _listen(patch, run):
  """Makes the stages of a step write what they read and return into `run.steps`."""

  def at(plan):
    return run.steps.setdefault(plan.step, Step())

  def hear(owner, name, note):
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
      result = original(*args, **kwargs)
      note(args, result)
      return result

    patch.setattr(owner, name, wrapped)

  def planned(args, result):
    run.rollout, step = args[0], at(result[0])
    step.buffer, (step.plan, step.cursor) = args[1], result

  def picked(args, result):
    step = at(args[2])
    step.replays = result
    step.params = jax.tree.map(np.array, args[1])

  hear(stages.Rollout, 'plan', planned)
  hear(stages.Rollout, 'pick_replays', picked)
  hear(stages.Rollout, 'generate', lambda a, found: setattr(at(a[2]), 'responses', found))
  hear(stages.Rollout, 'grade', lambda a, found: setattr(at(a[1]), 'verdicts', found))
  hear(stages.Rollout, 'assemble', lambda a, found: setattr(at(a[1]), 'batch', found))
  hear(replay, 'record_step', lambda a, found: setattr(at(a[2]), 'after', found))
