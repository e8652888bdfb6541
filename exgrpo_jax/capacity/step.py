"""Estimates of a training step's time from the programs that the rollout and the learner list.

The programs are not run. cycles.py explains how a program's time is estimated.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.capacity import cycles, lengths
from exgrpo_jax.capacity.cycles import Seconds
from exgrpo_jax.capacity.devices import Chip
from exgrpo_jax.errors import counted
from exgrpo_jax.experiment.experiment import Experiment, model_config, update_spec, with_dtype
from exgrpo_jax.experiment.generation import make_engine
from exgrpo_jax.experiment.settings import RunConfig
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import lora, model, ragged_cache, sharding
from exgrpo_jax.policy.shape import check_meshes
from exgrpo_jax.rollout import programs, scoring
from exgrpo_jax.runtime.compilations import Program

# Assumed times that the device waits for the host; not measured.
SYNC_SECONDS = 0.003  # between two decode calls
HOST_SECONDS = 1.0  # per step, for grading, batching and logging
# Assumed, because no data are available.
PROMPT = 150  # tokens
CANDIDATES = 4  # stored responses of a replayed question
EVALUATED = 2259  # questions in the authors' valid.parquet
# Drafts per row per pass, and the resulting tokens per pass, measured with Qwen2.5-Coder-0.5B on
# GSM8K (eight responses per question, each drafting from the others).
DRAFTS, TOKENS_PER_PASS = '3', 1.7

_TOKENIZER: Any = types.SimpleNamespace(eos_ids=(0,), pad_id=0)  # any token works


@dataclasses.dataclass(frozen=True)
class Step:
  """A config's training step, described only by array shapes, so its devices need not exist."""

  config: RunConfig
  spec: gradients.UpdateSpec
  meshes: sharding.Meshes
  state: optimizer.TrainState  # trained parameters and AdamW's moments; kept for the whole run
  initial: model.Params | None  # LoRA's base or the KL reference policy; kept for the whole run
  policy: model.Params  # input of forward passes: parameters, or LoRA's base and adapters
  decode_params: model.Params  # the policy in the decode layout; kept during a rollout

  @property
  def held(self) -> Any:
    """Return the arrays that exist during the whole run."""
    return self.state, self.initial

  def scoring(self, length_R: Sequence[int] | np.ndarray = ()) -> Iterator[Program]:
    """Yield the programs that score rows of these lengths."""
    spec = self.spec
    score_spec = self.config.rollout.score_spec(spec.model, spec.mesh, spec.microbatch.tokens)
    return scoring.programs(score_spec, self.policy, np.asarray(length_R, int))

  def generating(self, generations: Sequence[programs.Generation] = ()) -> Iterator[Program]:
    """Yield the programs that generate responses, with the longest cache and every slot in use."""
    experiment = Experiment(self.config, '', _TOKENIZER, self.meshes, self.spec.model, '')
    engine = make_engine(experiment, resumes=self.config.rollout.partial)
    for program in programs.of_engine(engine, self.decode_params, generations, only_longest=True):
      if program.name == 'decode' and program.size[0] > engine.spec.slots:
        program.trips /= TOKENS_PER_PASS
      yield program

  def updating(self, minibatch_passes: Sequence[Any] = ()) -> Iterator[Program]:
    """Yield the programs that run the step's updates."""
    empty_batch = programs.empty_batch(self.config.rollout, self.spec.model)
    return gradients.programs(self.spec, self.state, self.initial, empty_batch, minibatch_passes)


def of_config(
  config: RunConfig,
  devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
) -> Step:
  """Return a config's step on `devices`, by default one device, without allocating arrays."""
  config = with_dtype(config, platform='accelerator')
  shape = model_config(config)
  meshes = sharding.make_meshes(config.mesh, devices or jax.devices()[:1])
  check_meshes(shape, meshes)
  spec = update_spec(config, shape, meshes.training)
  trained_shapes, is_frozen = gradients.trained_shapes(spec), spec.lora.rank > 0
  initial = model.shapes(shape, spec.mesh, frozen=is_frozen) if config.keeps_initial else None
  return Step(
    config=config,
    spec=spec,
    meshes=meshes,
    state=optimizer.shapes(spec.optimizer, spec.num_updates, trained_shapes),
    initial=initial,
    policy=lora.joined(spec.lora, initial, trained_shapes),
    # decode_shapes shares shape objects between layers, but here each array needs its own.
    decode_params=jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
      model.decode_shapes(shape, meshes.decoding),
    ),
  )


# ---- Workload ----


@dataclasses.dataclass(frozen=True)
class Workload:
  """The lengths of a step's prompts and responses, in tokens."""

  prompt: int  # length of each prompt
  fresh: np.ndarray  # lengths of a step's generated responses, in starting order
  groups: Sequence[np.ndarray]  # lengths by group, for `programs.num_groups` groups
  replayed: np.ndarray  # lengths of the replayed responses in the update
  candidates: np.ndarray  # lengths of the stored responses scored to choose the replayed ones
  evaluated: np.ndarray  # lengths of an evaluation's responses; empty without evaluation
  evaluation_every: int  # steps


def workload(config: RunConfig, spec: str, num_evaluated: int) -> Workload:
  """Return the workload of a step with full replay; for `spec`, see `lengths.draw`."""
  rollout = config.rollout
  num_replayed = replay.most_replayed(config.replay, rollout.questions)
  counts = (
    rollout.questions * rollout.group_size - num_replayed,
    num_replayed,
    num_replayed * CANDIDATES,
    num_evaluated * config.evaluation.samples * bool(config.data.evaluated),
  )
  samples = lengths.draw(spec, sum(counts), rollout.max_response)
  parts = np.split(samples, np.cumsum(counts)[:-1])
  fresh_lengths, replayed_lengths, candidate_lengths, evaluation_lengths = parts
  # In each step, `num_replayed` groups contain one fewer fresh response.
  num_groups = programs.num_groups(programs.with_partial_rollouts(rollout))
  replays = np.diff(np.arange(num_groups + 1) * num_replayed // rollout.questions)
  sizes = rollout.group_size - replays
  group_lengths = lengths.draw(spec, int(sizes.sum()), rollout.max_response)
  return Workload(
    prompt=min(PROMPT, rollout.max_prompt),
    fresh=fresh_lengths,
    groups=np.split(group_lengths, np.cumsum(sizes)[:-1]),
    replayed=replayed_lengths,
    candidates=candidate_lengths,
    evaluated=evaluation_lengths,
    evaluation_every=config.evaluation.every,
  )


def generations(step: Step, work: Workload) -> list[programs.Step]:
  """Describe generation in a single step or, with partial rollouts, in each steady-state step."""
  rollout, block = step.config.rollout, ragged_cache.BLOCK
  if rollout.partial:
    return programs.steady_steps(work.groups, rollout, work.prompt, block)
  generation = programs.generation_of(
    work.fresh, rollout.questions, work.prompt, rollout.slots, block
  )
  return [programs.Step(generation, [], ages=np.zeros(0, int), carried=0)]


def listed(step: Step, work: Workload) -> list[Program]:
  """Return the `needed` programs of a step with this workload, in execution order."""
  responses = np.concatenate([work.fresh, work.replayed])
  minibatches = np.split(responses, step.spec.optimizer.minibatches)
  passes = [gradients.passes(step.spec, part + work.prompt, part) for part in minibatches]
  convert = model.decode_conversion(step.spec.model, step.meshes)
  return needed(
    [
      Program('reshard', convert, (step.policy,), step.spec.mesh, runs=1),
      *step.generating([rollout_step.generation for rollout_step in generations(step, work)]),
      *step.scoring(work.candidates + work.prompt),
      *step.updating(passes),
    ]
  )


def needed(candidates: Iterable[Program]) -> list[Program]:
  """Drop programs that the step never runs, except the largest program with each name.

  The largest programs are needed to determine peak memory.
  """
  candidates = list(candidates)
  by_size = sorted(candidates, key=lambda program: (np.prod(program.size), program.size[1]))
  largest = {program.name: program for program in by_size}
  return [program for program in candidates if program.runs or program is largest[program.name]]


# ---- Time ----


class Part(NamedTuple):
  """A part of a step."""

  name: str
  seconds: float
  detail: str = ''


class Estimate(NamedTuple):
  """A step's estimated time and rollout statistics."""

  parts: list[Part]  # in the order in which they run
  live: float  # number of busy slots, averaged over decode steps
  ages: np.ndarray  # int, staleness of the trained groups in steps; empty without partial rollouts
  carried: float  # fraction of these groups' tokens that earlier steps generated

  @property
  def seconds(self) -> float:
    """Return the duration of the whole step."""
    return sum(part.seconds for part in self.parts)

  def seconds_of(self, name: str) -> float:
    """Return how long the part `name` takes; 0 if the step has no such part."""
    return sum(part.seconds for part in self.parts if part.name == name)


Modules = Mapping[tuple[str, tuple[int, int]], cycles.Module]  # by program name and size


def estimate(
  step: Step, work: Workload, step_programs: Sequence[Program], modules: Modules, chip: Chip
) -> Estimate:
  """Estimate the time of a step that runs these programs, plus its share of an evaluation."""

  def time_of(program: Program) -> Seconds:
    module, num_chips = modules[program.name, program.size], step.spec.mesh.size
    fixed = cycles.estimate(module, chip, num_chips, trips=0)
    per_trip = cycles.estimate(module, chip, num_chips) - fixed
    # Kernels in loops whose length depends on data read only the filled part of the cache.
    per_trip = dataclasses.replace(per_trip, kernels=per_trip.kernels * program.filled)
    return (fixed + per_trip * program.trips) * program.runs

  rollout_steps = generations(step, work)
  counts = [len(rollout_step.generation.spans) for rollout_step in rollout_steps]
  syncs = sum(counts) / len(counts)
  parts = [
    _part(name, [program for program in step_programs if program.name == name], time_of)
    for name in dict.fromkeys(program.name for program in step_programs if program.runs)
  ]
  parts.append(Part('syncs', syncs * SYNC_SECONDS, f'{syncs:,.0f} with the host'))
  parts.append(Part('host', HOST_SECONDS, 'assumed'))
  if count := len(work.evaluated):
    rollout, every = step.config.rollout, work.evaluation_every
    generation = programs.generation_of(
      work.evaluated, count, work.prompt, rollout.slots, ragged_cache.BLOCK
    )
    seconds = sum(
      time_of(program).total for program in step.generating([generation]) if program.runs
    )
    seconds += len(generation.spans) * SYNC_SECONDS
    detail = f'{count:,} responses in {seconds:.0f} s every {counted(every, "step")}'
    parts.append(Part('evaluation', seconds / every, detail))
  tokens = sum(rollout_step.generation.tokens for rollout_step in rollout_steps)
  num_trained = sum(
    int(group_lengths.sum())
    for rollout_step in rollout_steps
    for group_lengths in rollout_step.trained
  )
  return Estimate(
    parts=parts,
    live=tokens / sum(rollout_step.generation.decode_steps for rollout_step in rollout_steps),
    ages=np.concatenate([rollout_step.ages for rollout_step in rollout_steps]),
    carried=sum(rollout_step.carried for rollout_step in rollout_steps) / max(1, num_trained),
  )


def _part(
  name: str, step_programs: Sequence[Program], time_of: Callable[[Program], Seconds]
) -> Part:
  total, details = Seconds(), list[str]()
  for program in step_programs:
    if program.runs:
      total += (program_time := time_of(program))
      trips, (rows, length) = program.runs * program.trips, program.size
      size = f' of {rows:,} x {length:,} tokens' if rows else ''
      details.append(f'{trips:,.4g} x {1e3 * program_time.total / trips:.4g} ms{size}')
  waits = (total.kernels, 'in kernels'), (total.collectives, 'waiting for other chips')
  shares = [
    f'{100 * part / total.total:.0f}% {words}'
    for part, words in waits
    if total.total and part / total.total > 0.005
  ]
  return Part(name, total.total, '; '.join([', '.join(details), *shares]))
