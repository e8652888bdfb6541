"""One real run, recorded stage by stage, for the tests of the loop and of its stages."""

import contextlib
import dataclasses
import pathlib
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from exgrpo_jax.algorithm import replay
from exgrpo_jax.experiment import experiment, warm_start
from exgrpo_jax.grading import worker_slot
from exgrpo_jax.learner import checkpoint, gradients
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations
from exgrpo_jax.runtime.workdir import claim_workdir
from exgrpo_jax.training import prior_experience, session
from tests.helpers import tiny


@dataclasses.dataclass
class Update:
  """What one optimiser update of a step was computed from, and its sums."""

  params: Any  # NumPy, before it
  batch: Any
  clip: bool
  is_first: bool
  sums: Any  # floats by name


@dataclasses.dataclass
class Step:
  """What the stages of one step read and returned."""

  plan: Any = None  # of all groups in flight
  trained: Any = None  # of those that the step trained, without carry the same
  carried: Any = None  # what it left to the next step
  cursor: Any = None  # after the plan's fresh questions
  buffer: Any = None  # from which the plan was drawn
  params: Any = None  # NumPy, of the policy that generated
  replays: Any = None
  scores: Any = None
  responses: Any = None
  verdicts: Any = None
  batch: Any = None
  updates: list[Update] = dataclasses.field(default_factory=list)
  after: Any = None  # the buffer after the step


@dataclasses.dataclass
class Recording:
  """A whole run through session.train, and its experiment, data and rollout."""

  workdir: pathlib.Path
  compiled: pathlib.Path  # JAX's compilation cache, which this process uses within .compiling()
  values: Any  # the ConfigDict
  steps: dict[int, Step]

  def __post_init__(self):
    self.experiment = experiment.open_experiment(self.values, str(self.workdir))
    config = self.experiment.config
    self.data = experiment.load_questions(self.experiment, config.data.train)
    self.evaluations = experiment.load_evaluations(self.experiment)
    self.rollout = experiment.make_rollout(self.experiment, self.data)

  def values_of(self, params, prompt, tokens):
    """(log-probability, entropy) of each token of a response, float64, from all logits."""
    sequence_T = np.concatenate([prompt, tokens])
    logp_TV = tiny.full_log_probabilities(params, self.experiment.model, sequence_T)
    logp_TV = logp_TV[len(prompt) - 1 :]
    return logp_TV[np.arange(len(tokens)), tokens], -(np.exp(logp_TV) * logp_TV).sum(-1)

  @contextlib.contextmanager
  def compiling(self):
    """Uses the compilation cache in the block, for programs of any size."""
    settings = {
      'jax_compilation_cache_dir': str(self.compiled),
      'jax_persistent_cache_min_compile_time_secs': 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
      jax.config.update(name, value)
    try:
      yield
    finally:
      for name, value in before.items():
        jax.config.update(name, value)
      compilation_cache.reset_cache()


def record(values, folder, compiled, draws=False):
  """Trains in folder/recorded, and writes the steps beside it.

  Args:
    values: the run's ConfigDict.
    folder: an empty one.
    compiled: the folder of JAX's compilation cache.
    draws: as for `run_training`.
  """
  run = Recording(folder / 'recorded', compiled, values, steps={})
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(worker_slot, 'COMMAND', tiny.WORKER)
    _listen(patch, run.steps)
    run_training(run.experiment, values=values, draws=draws)
  del run.steps[values.num_steps + 1]  # planned ahead, never taken
  (folder / 'steps.pickle').write_bytes(pickle.dumps(run.steps))


def load(values, folder, compiled):
  """The run that `record` made in `folder`."""
  steps = pickle.loads((folder / 'steps.pickle').read_bytes())
  return Recording(folder / 'recorded', compiled, values, steps)


def run_training(opened, params=None, values=None, draws=False):
  """train.main without its checks: trains the opened experiment in its workdir, in this process.

  Starts from `params`, or from the initial ones, and claims the workdir for `values`, if given.
  In the end it `draws` curves and report, or leaves them out, for they take seconds.
  """
  config = opened.config
  data = experiment.load_questions(opened, config.data.train)
  evaluations = experiment.load_evaluations(opened)
  rollout = experiment.make_rollout(opened, data)
  done = max(checkpoint.steps(opened.workdir), default=0)
  successes = () if done else prior_experience.load(opened, data)
  with (
    jax.set_mesh(opened.meshes.training),
    compilations.counted() as compiled,
    pytest.MonkeyPatch.context() as patch,
  ):
    if not draws:
      tiny.leave_out_pictures(patch.setattr)
    params = params or warm_start.initial_params(opened, data)
    if values is not None:
      claim_workdir(values, opened.workdir)
      session.keep_tokenizer(opened)
    loaded = session.Loaded(opened, rollout, evaluations, successes, done)
    session.train(loaded, params, compiled)


def _listen(patch, steps):
  """Makes the stages note in `steps` what they read and returned."""

  def step_of(plan):
    return steps.setdefault(plan.step, Step())

  def wrap(owner, name, note):
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
      result = original(*args, **kwargs)
      note(args, result)
      return result

    patch.setattr(owner, name, wrapped)

  def note_plan(args, result):
    step = step_of(result[0])
    step.buffer, (step.plan, step.cursor) = args[1], result

  def note_replays(args, result):
    step = step_of(args[2])
    step.replays, step.scores = result
    step.params = jax.tree.map(np.array, args[1])

  def note_split(args, result):
    step = step_of(args[1])
    step.trained, step.responses, step.verdicts, step.carried = result

  def note_update(args, result):
    _, params, batch, clip, is_first, _ = args
    latest = max(number for number, step in steps.items() if step.batch is not None)
    sums = {name: float(value) for name, value in result[1].items()}
    update = Update(jax.tree.map(np.array, params), batch, clip, is_first, sums)
    steps[latest].updates.append(update)

  wrap(stages.Rollout, 'plan', note_plan)
  wrap(stages.Rollout, 'pick_replays', note_replays)
  wrap(stages.Rollout, 'split', note_split)
  wrap(stages.Rollout, 'assemble', lambda args, out: setattr(step_of(args[1]), 'batch', out))
  wrap(gradients, 'minibatch_gradient', note_update)
  wrap(replay, 'record_step', lambda args, out: setattr(step_of(args[2]), 'after', out))
