"""One real run, written down stage by stage, for the tests of what it is made of."""

import contextlib
import dataclasses
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from exgrpo_jax import experiment, train, warm_start
from exgrpo_jax.algorithm import replay
from exgrpo_jax.grading import pool
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations
from exgrpo_jax.runtime.workdir import claim_workdir
from tests.helpers import tiny


@dataclasses.dataclass
class Step:
  """What one turn of the loop read and wrote."""

  plan: Any = None
  cursor: Any = None  # after the plan's fresh questions
  buffer: Any = None  # that the plan was drawn from
  params: Any = None  # NumPy, of the policy that acted
  replays: Any = None
  responses: Any = None
  verdicts: Any = None
  batch: Any = None
  after: Any = None  # the buffer that was recorded


@dataclasses.dataclass
class Recording:
  """A whole run through train.start_or_resume, and what it was made with."""

  workdir: Any
  cache: Any  # where others find what it compiled, in this process within .compiling()
  values: Any
  steps: dict  # number -> Step

  def __post_init__(self):
    self.experiment = experiment.open_experiment(self.values, str(self.workdir))
    config = self.experiment.config
    self.data = experiment.load_questions(self.experiment, config.data.train)
    self.evaluations = tuple(
      experiment.load_questions(self.experiment, spec) for spec in config.data.evaluation
    )
    self.rollout = experiment.make_rollout(self.experiment, self.data)

  @contextlib.contextmanager
  def compiling(self):
    """Looks in the cache before compiling, and keeps there what it compiles."""
    kept = {
      'jax_compilation_cache_dir': str(self.cache),
      'jax_persistent_cache_min_compile_time_secs': 0.0,
    }
    before = {name: getattr(jax.config, name) for name in kept}
    for name, value in kept.items():
      jax.config.update(name, value)
    yield
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


def record(values, folder):
  """Makes the run in `folder` and writes it down there."""
  run = Recording(folder / 'run' / 'recorded', folder / 'compiled', values, {})
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(pool, 'COMMAND', tiny.WORKER)
    _listen(patch, run.steps)
    run_training(run.experiment, values=values)
  del run.steps[tiny.NUM_STEPS + 1]  # planned ahead, never taken
  (folder / 'steps.pickle').write_bytes(pickle.dumps(run.steps))


def load(values, folder):
  """The run that `record` made in `folder`."""
  steps = pickle.loads((folder / 'steps.pickle').read_bytes())
  return Recording(folder / 'run' / 'recorded', folder / 'compiled', values, steps)


def run_training(opened, params=None, values=None):
  """train.main without its checks: a run of the experiment in its workdir, in this process."""
  config = opened.config
  data = experiment.load_questions(opened, config.data.train)
  evaluations = tuple(experiment.load_questions(opened, spec) for spec in config.data.evaluation)
  rollout = experiment.make_rollout(opened, data)
  with jax.set_mesh(opened.mesh), compilations.counted() as compiled:
    params = params or warm_start.initial_params(opened, data)
    if values is not None:
      claim_workdir(values, opened.workdir)
    train.start_or_resume(opened, rollout, evaluations, params, compiled)


def _listen(patch, steps):
  """Makes the stages of a step write what they read and return into `steps`."""

  def at(plan):
    return steps.setdefault(plan.step, Step())

  def hear(owner, name, note):
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
      result = original(*args, **kwargs)
      note(args, result)
      return result

    patch.setattr(owner, name, wrapped)

  def planned(args, result):
    step = at(result[0])
    step.buffer, (step.plan, step.cursor) = args[1], result

  def picked(args, result):
    step = at(args[2])
    step.replays = result
    step.params = jax.tree.map(np.array, args[1])

  hear(stages.Rollout, 'plan', planned)
  hear(stages.Rollout, 'pick_replays', picked)
  hear(stages.Rollout, 'generate', lambda a, result: setattr(at(a[2]), 'responses', result))
  hear(stages.Rollout, 'grade', lambda a, result: setattr(at(a[1]), 'verdicts', result))
  hear(stages.Rollout, 'assemble', lambda a, result: setattr(at(a[1]), 'batch', result))
  hear(replay, 'record_step', lambda a, result: setattr(at(a[2]), 'after', result))
