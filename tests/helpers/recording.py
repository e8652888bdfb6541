"""One real run, recorded stage by stage, for the tests of the loop and of its stages."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from exgrpo_jax.algorithm import replay
from exgrpo_jax.experiment import experiment, generation, warm_start
from exgrpo_jax.grading import programs
from exgrpo_jax.learner import checkpoint, gradients
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import compilations
from exgrpo_jax.training import session
from tests.helpers import tiny


@dataclasses.dataclass
class Update:
  """The inputs of one optimizer update, and its sums."""

  params: Any  # NumPy, before it
  batch: Any
  clip: bool
  is_first: bool
  sums: Any  # floats by name


@dataclasses.dataclass
class Step:
  """What the stages of one step read and returned."""

  plan: Any = None  # of all groups in flight
  trained: Any = None  # of those that finished; without carry or dynamic sampling the same
  partial_groups: Any = None  # to the next step
  buffer: Any = None  # from which the plan was drawn
  params: Any = None  # NumPy, of the policy that generated
  replays: Any = None
  scores: Any = None
  responses: Any = None
  verdicts: Any = None
  num_dropped: int = 0  # of the last groups, which are not trained
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
    self.rollout = generation.make_rollout(self.experiment, self.data)

  def values_of(self, params, prompt, tokens, routes=None):
    """(log-probability, entropy) of each token of a response, float64, from all logits."""
    sequence_T = np.concatenate([prompt, tokens])
    logp_TV = tiny.full_log_probabilities(
      params, self.experiment.model, sequence_T, routes_TLC=routes
    )
    logp_TV = logp_TV[len(prompt) - 1 :]
    return logp_TV[np.arange(len(tokens)), tokens], -(np.exp(logp_TV) * logp_TV).sum(-1)

  def last_snapshot(self, workdir):
    """The newest checkpoint of a run of this experiment."""
    with checkpoint.open_manager(str(workdir)) as manager:
      return checkpoint.restore_newest(manager, experiment.state_shapes(self.experiment))

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
  """Trains in folder/recorded, and writes the steps beside it; `draws` as for `run_training`."""
  run = Recording(folder / 'recorded', compiled, values, steps={})
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(programs, 'COMMAND', tiny.WORKER)
    _listen(patch, run.steps)
    run_training(run.experiment, values=values, draws=draws)
  del run.steps[values.num_steps + 1]  # planned ahead, never taken
  (folder / 'steps.pickle').write_bytes(pickle.dumps(run.steps))


def load(values, folder, compiled):
  """The run that `record` made in `folder`."""
  steps = pickle.loads((folder / 'steps.pickle').read_bytes())
  return Recording(folder / 'recorded', compiled, values, steps)


def run_training(opened, params=None, values=None, draws=False, callbacks=()):
  """The train command without its checks: trains the opened experiment in its workdir.

  Starts from `params`, or from the initial ones, and claims the workdir for `values`, if given.
  In the end it `draws` the report, or leaves it out, which takes seconds.
  """
  os.makedirs(opened.workdir, exist_ok=True)
  data = experiment.load_questions(opened, opened.config.data.train)
  rollout, evaluations = generation.make_rollout(opened, data), experiment.load_evaluations(opened)
  with (
    jax.set_mesh(opened.meshes.training),
    compilations.counted() as compiled,
    pytest.MonkeyPatch.context() as patch,
  ):
    if not draws:
      tiny.leave_out_pictures(patch.setattr)
    if params is not None:
      patch.setattr(warm_start, 'initial_params', lambda *_: params)
    if values is None:
      patch.setattr(session, 'claim_workdir', lambda *_: None)
      patch.setattr(session, 'keep_tokenizer', lambda _: None)
    start = session.claim(values or tiny.values('', ''), opened, rollout)
    session.train(opened, rollout, evaluations, start, compiled, callbacks)


def resume(run, workdir, step):
  """Copies the workdir of a whole run as it was after `step`, and trains to the end."""
  shutil.copytree(run.workdir, workdir)
  shutil.rmtree(workdir / 'checkpoints' / str(run.values.num_steps))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  kept = [line for line in lines if json.loads(line)['step'] <= step]
  (workdir / 'metrics.jsonl').write_text(''.join(line + '\n' for line in kept))
  opened = experiment.open_experiment(run.values, str(workdir))
  with run.compiling(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(programs, 'COMMAND', tiny.WORKER)
    run_training(opened)


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
    step = step_of(result)
    step.buffer, step.plan = args[1], result

  def note_replays(args, result):
    step = step_of(args[2])
    step.replays, step.scores = result
    step.params = jax.tree.map(np.array, args[1])

  def note_trained(args, result):
    step = step_of(args[1])
    step.trained, step.responses, step.verdicts, step.partial_groups, step.num_dropped = result

  def note_update(args, result):
    _, params, batch, clip, is_first, *_ = args
    latest = max(number for number, step in steps.items() if step.batch is not None)
    sums = {name: np.asarray(value).tolist() for name, value in result[1].items()}
    update = Update(jax.tree.map(np.array, params), batch, clip, is_first, sums)
    steps[latest].updates.append(update)

  wrap(stages, 'plan_step', note_plan)
  wrap(stages, 'collect_verdicts', note_trained)
  wrap(stages, 'pick_replays', note_replays)
  wrap(stages, 'assemble', lambda args, out: setattr(step_of(args[1].plan), 'batch', out))
  wrap(gradients, 'minibatch_gradient', note_update)
  wrap(replay, 'record_step', lambda args, out: setattr(step_of(args[2]), 'after', out))
