"""A training run: its objects, its first snapshot, and the checks that stop it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import orbax.checkpoint as ocp

from exgrpo_jax.algorithm import replay
from exgrpo_jax.algorithm.replay import Bucketed, Buffer
from exgrpo_jax.datatypes import Cursor, Experience, QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import Experiment, param_shapes, state_shapes
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import checkpoint, gradients, optimizer, storage
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import alarms, metrics, step_records
from exgrpo_jax.rollout import scoring, seeding
from exgrpo_jax.rollout.stages import RolloutSetup
from exgrpo_jax.runtime import activity, compilations, console, hosts, randomness
from exgrpo_jax.runtime.clock import Clock, Pace
from exgrpo_jax.runtime.randomness import Purpose


@dataclasses.dataclass
class Run:
  """A training run open in this process."""

  # These never change during a run.
  experiment: Experiment
  rollout: RolloutSetup  # the stages that collect experience
  evaluations: tuple[QuestionSet, ...]
  update: gradients.UpdateSpec
  initial: model.Params | None  # with LoRA or a KL term; see `gradients.minibatch_gradient`
  base_sums: Mapping[str, int]  # with LoRA; see `checkpoint.save`
  grader: pool.Grader
  writer: metrics.Writer
  records: step_records.Writer
  checkpoints: ocp.CheckpointManager
  clock: Clock
  compiled: compilations.Counter
  told_to_stop: Callable[[], str]  # the signal's name, or ''
  # `report` changes these; a resumed run rebuilds them from metrics.jsonl and the buffer.
  pace: Pace
  bucketed: Bucketed  # the buffer after the last reported step
  scores: dict[int, float]  # step -> validation score
  history: alarms.History
  callbacks: Sequence['Callback'] = ()  # called in this order in each step

  @property
  def last_step(self) -> int:
    """Return the step after which the run ends, given the scores so far."""
    config = self.experiment.config
    return alarms.last_step(self.scores, config.num_steps, config.evaluation.patience)

  def policy(self, params: model.Params) -> model.Params:
    """Return the policy's parameters: `params` or, with LoRA, the base plus these adapters."""
    return lora.joined(self.experiment.config.lora, self.initial, params)


# A function that is called on every host with the run, the parameters before the step's update, and
# the step's experience. It returns metrics for the step, or None, and must not change anything.
Callback = Callable[[Run, model.Params, Experience], Mapping[str, float] | None]


def bucketed(experiment: Experiment, buffer: Buffer) -> Bucketed:
  """Return the buffer together with its buckets, which depend on the run's config."""
  config = experiment.config
  return Bucketed(buffer, replay.buckets(config.replay, buffer, config.rollout.group_size))


def warn(run: Run, experience: Experience, step_metrics: Mapping[str, float]) -> None:
  """Print warnings about this step or recent steps. `step_metrics` contains the step's metrics."""
  step = experience.plan.step
  setup, record = alarm_setup(run.experiment, run.rollout), {**step_metrics, 'step': step}
  run.history, warnings = alarms.observe(setup, run.history, record)
  grading = alarms.grading(step, experience.verdicts)
  for warning in filter(None, (grading, *warnings)):
    hosts.warn(warning)


def check_step(run: Run, experience: Experience, step_metrics: Mapping[str, float]) -> None:
  """Raise InputError if training has broken down. Called before the step is written or saved."""
  record = {**step_metrics, 'step': experience.plan.step}
  records = (*run.history.recent, record)
  if why := alarms.breakdown(run.experiment.config.optimizer, records):
    raise InputError(f'step {experience.plan.step}: {why} {_newest_checkpoint(run)}')


def check_policy(run: Run, snapshot: Snapshot) -> None:
  """Raise InputError if the policy's probabilities aren't finite. Called before each save.

  A step's metrics describe the parameters before its last update. This check scores one token
  after a prompt, using the parameters after that update.
  """
  rollout, policy = run.rollout, run.policy(snapshot.state.params)
  row = rollout.data.prompts[0], np.array(rollout.tokenizer.eos_ids[:1], np.int32)
  _, (entropy_T,) = scoring.score(rollout.score_spec, policy, [row])
  if not np.isfinite(entropy_T).all():
    why = alarms.no_probabilities(run.experiment.config.optimizer)
    raise InputError(f'step {snapshot.step}: after the update, {why} {_newest_checkpoint(run)}')


def _newest_checkpoint(run: Run) -> str:
  run.checkpoints.wait_until_finished()
  newest_step = run.checkpoints.latest_step()
  if newest_step is None:
    return 'Nothing has been saved yet.'
  workdir = run.experiment.workdir
  out = f'--out={workdir}/export/step_{newest_step}'
  words = [*console.program(), 'export', f'--checkpoint={workdir}', out]
  return (
    f'This step has not been saved. The newest checkpoint is from step {newest_step}. To export '
    f'its policy, run: {console.to_copy(words)}'
  )


def alarm_setup(experiment: Experiment, rollout: RolloutSetup) -> alarms.Setup:
  """Return the facts, other than the metrics, that a run's warnings depend on."""
  config = experiment.config
  return alarms.Setup(
    num_steps=config.num_steps,
    pool=len(rollout.data.questions),
    questions=config.rollout.questions_at_once,
    max_response=config.rollout.max_response,
  )


def begin(
  experiment: Experiment,
  rollout: RolloutSetup,
  manager: ocp.CheckpointManager,
  params: model.Params | None,
  successes: Sequence[seeding.Candidate],
) -> tuple[Snapshot, model.Params | None, Mapping[str, int]]:
  """Restore the newest snapshot, or create a new run's snapshot at step 0.

  `params` are the initial parameters, or None for a resumed run that does not keep its initial
  parameters. Updates donate `params` unless the run keeps them. A new run's buffer starts with
  `successes`. Returns the snapshot, `Run.initial` and `Run.base_sums`.
  """
  config = experiment.config
  initial, base_sums = params if config.keeps_initial else None, checkpoint.NO_BASE
  if config.lora.rank and initial is not None:
    base_sums = storage.base_checksums(initial)
  with activity.doing('reading the newest checkpoint'):
    snapshot = checkpoint.restore_newest(manager, state_shapes(experiment), base_sums)
  if snapshot:
    print(f'resumed after step {snapshot.step} from {manager.directory}', flush=True)
    return snapshot, initial, base_sums
  assert params is not None
  _, trained_params = first_params(experiment, params)
  policy = lora.joined(config.lora, initial, trained_params)
  snapshot = Snapshot(
    step=0,
    state=optimizer.init(config.optimizer, config.num_updates, trained_params),
    buffer=seeding.seeded(rollout, policy, successes, config.experience.missing_logprobs),
    cursor=Cursor(),
  )
  return snapshot, initial, base_sums


def first_params(
  experiment: Experiment, params: model.Params
) -> tuple[model.Params | None, model.Params]:
  """Return the (initial, trained) parameters of a run that starts from `params`.

  The initial parameters never change; they are None if the run does not need them. The trained
  parameters are LoRA's adapters or all parameters, and updates donate them.
  """
  config = experiment.config
  if config.lora.rank:
    key = randomness.key(config.seed, Purpose.LORA)
    return params, lora.init(param_shapes(experiment), key)
  return (params, model.copied(params)) if config.keeps_initial else (None, params)
