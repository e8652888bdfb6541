"""All programs of the slot engine, in every size, and how often a step runs each of them.

tests/capacity/test_step.py fails if a program is missing here. For the forward passes over finished
responses, see `scoring.programs`. Shape letters as in decode_loop.py.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import chex
import jax
import numpy as np

from exgrpo_jax import packing
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.policy.model import ShapeConfig
from exgrpo_jax.rollout import (
  decode_loop,
  drafts,
  partial,
  resuming,
  routes,
  scheduler,
  settings,
  slots,
)
from exgrpo_jax.rollout.decode_loop import Prompts, State
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.rollout.slots import insertion_of, rows_per_insert, text_length, texts_of
from exgrpo_jax.runtime.compilations import Program

# ---- Simulating the generation of a step ----

# `decoded_in` simulates scheduler.py with ragged attention, in NumPy. `partial_rollouts` also
# simulates partial.py. Tests compare both simulations with the real scheduler, sync by sync.


# Steps to simulate with partial rollouts: first a warm-up, until the schedule no longer depends on
# the start, then the steps to average over.
_FIRST_STEPS, _STEADY_STEPS = 12, 16


class Span(NamedTuple):
  """The decode steps between two host syncs."""

  steps: int
  positions: float  # cache positions that attention reads in all slots, averaged over steps


class Generation(NamedTuple):
  """The device work needed to generate one step's responses."""

  spans: list[Span]
  prompt: int  # tokens per prompt
  tokens: int  # tokens decoded
  prompts: int  # prompts whose first response begins in this step
  begun: int  # responses that get their first token
  resumed: np.ndarray  # int, tokens of each row prefilled again, including its prompt

  @property
  def decode_steps(self) -> int:
    """Return the number of decode steps."""
    return sum(span.steps for span in self.spans)


class Step(NamedTuple):
  """One training step with partial rollouts."""

  generation: Generation
  trained: list[np.ndarray]  # response lengths in tokens, one array per trained group
  ages: np.ndarray  # int, steps since each trained group's first token
  carried: int  # tokens of the trained groups from earlier steps


class _Group(NamedTuple):
  """A group in flight."""

  lengths: np.ndarray  # int [K], final length of each response, in tokens
  tokens: np.ndarray  # int [K], tokens generated so far
  first_step: int  # the step that generated its first token; 0 if it has no tokens


def generation_of(
  lengths: np.ndarray, num_prompts: int, prompt: int, slots: int, block: int
) -> Generation:
  """Simulate a rollout until all responses are complete. For the arguments, see `decoded_in`."""
  simulation = decoded_in(lengths, np.zeros_like(lengths), prompt, slots, block, to_the_end=True)
  spans = [span for span, _ in simulation]
  return Generation(spans, prompt, int(lengths.sum()), num_prompts, len(lengths), np.zeros(0, int))


def decoded_in(
  lengths_N: np.ndarray,
  initial_N: np.ndarray,
  prompt: int,
  slots: int,
  block: int,
  *,
  to_the_end: bool,
) -> Iterator[tuple[Span, np.ndarray]]:
  """Yield each span, and the length of each response after the span, in tokens: int [N].

  `lengths_N` are the final lengths of the responses in queue order, and `initial_N` are their
  lengths at the start; complete responses get no slot. Each prompt has `prompt` tokens. Attention
  reads `block` cache positions at a time; even a free slot costs one block. Once the queue is
  empty, `to_the_end` lets a span end early only when all rows have finished.
  """
  chex.assert_equal_shape([lengths_N, initial_N])
  current_N = initial_N.copy()
  waiting_N = np.flatnonzero(current_N < lengths_N)
  row_B = np.full(slots, -1)  # the response in each slot; -1 if it is free
  while len(waiting_N) or (row_B >= 0).any():
    free_slots = np.flatnonzero(row_B < 0)[: len(waiting_N)]
    row_B[free_slots], waiting_N = waiting_N[: len(free_slots)], waiting_N[len(free_slots) :]
    is_live_B = row_B >= 0
    remaining_B = np.where(is_live_B, lengths_N[row_B] - current_N[row_B], 0)
    position_B = prompt + np.where(is_live_B, current_N[row_B], 0)
    num_live = is_live_B.sum()
    min_finished = num_live if to_the_end and not len(waiting_N) else rows_per_insert(slots)
    # Steps until enough have finished.
    steps_to_sync = np.sort(remaining_B[is_live_B])[min(min_finished, num_live) - 1]
    steps = int(min(steps_to_sync, decode_loop.TOKENS_PER_SYNC))
    grown_B = np.minimum(remaining_B, steps)
    # To decode a token, attention reads it and all earlier tokens of its row.
    blocks_B = _blocks_up_to(position_B + grown_B, block) - _blocks_up_to(position_B, block)
    blocks = (blocks_B + steps - grown_B).sum()
    current_N[row_B[is_live_B]] += grown_B[is_live_B]
    row_B[remaining_B <= steps] = -1
    yield Span(steps, block * float(blocks) / steps), current_N.copy()


def with_partial_rollouts(rollout: settings.RolloutConfig) -> settings.RolloutConfig:
  """Return the config with partial rollouts turned on."""
  if rollout.partial:
    return rollout
  return dataclasses.replace(rollout, partial=True, max_groups_in_flight=0)


def num_groups(rollout: settings.RolloutConfig) -> int:
  """Return the number of groups that `steady_steps` draws."""
  return rollout.groups_in_flight + rollout.questions * (_FIRST_STEPS + _STEADY_STEPS - 1)


def steady_steps(
  groups: Sequence[np.ndarray], rollout: settings.RolloutConfig, prompt: int, block: int
) -> list[Step]:
  """Simulate `num_groups` groups and return the steady-state steps; see `partial_rollouts`."""
  return list(partial_rollouts(groups, rollout, prompt, block))[_FIRST_STEPS:]


def partial_rollouts(
  groups: Iterable[np.ndarray], rollout: settings.RolloutConfig, prompt: int, block: int
) -> Iterator[Step]:
  """Simulate and yield training steps until the groups run out.

  `groups` are int arrays with the response lengths of each group in tokens, in draw order. `prompt`
  is the number of tokens per prompt. For `block`, see `decoded_in`.
  """
  new_groups = (_Group(lengths, np.zeros_like(lengths), 0) for lengths in groups)
  in_flight: list[_Group] = []
  for step in itertools.count(1):
    in_flight += itertools.islice(new_groups, rollout.groups_in_flight - len(in_flight))
    if len(in_flight) < rollout.groups_in_flight:
      return
    simulated_step, in_flight = _simulate_step(in_flight, step, rollout, prompt, block)
    yield simulated_step


def _simulate_step(
  groups: list[_Group], step: int, rollout: settings.RolloutConfig, prompt: int, block: int
) -> tuple[Step, list[_Group]]:
  """Simulate one step. Returns the step and the groups that are still in flight."""
  starts = np.cumsum([0] + [len(group.lengths) for group in groups[:-1]])
  lengths_N = np.concatenate([group.lengths for group in groups])
  before_N = current_N = np.concatenate([group.tokens for group in groups])
  first_steps = [group.first_step or step for group in groups]
  simulation = decoded_in(lengths_N, before_N, prompt, rollout.slots, block, to_the_end=False)
  spans = []
  while True:
    complete = np.logical_and.reduceat(current_N == lengths_N, starts).tolist()
    indices = partial.trained(first_steps, complete, step, rollout.questions, rollout.max_staleness)
    if indices is not None:
      break
    span, current_N = next(simulation)
    spans.append(span)
  grew_N = current_N > before_N
  simulated_step = Step(
    generation=Generation(
      spans=spans,
      prompt=prompt,
      tokens=int(current_N.sum() - before_N.sum()),
      prompts=int(np.logical_or.reduceat(grew_N & (before_N == 0), starts).sum()),
      begun=int((grew_N & (before_N == 0)).sum()),
      resumed=prompt + before_N[grew_N & (before_N > 0)],
    ),
    trained=[groups[index].lengths for index in indices],
    ages=step - np.array([first_steps[index] for index in indices]),
    carried=sum(int(groups[index].tokens.sum()) for index in indices),
  )
  remaining = [
    _Group(group.lengths, tokens, first_step if tokens.any() else 0)
    for group, tokens, first_step in zip(groups, np.split(current_N, starts[1:]), first_steps)
  ]
  return simulated_step, [group for index, group in enumerate(remaining) if index not in indices]


def _blocks_up_to(length_B: np.ndarray, block: int) -> np.ndarray:
  """Sum the number of blocks needed for n positions, over n = 1 … `length_B`."""
  whole_B, rest_B = np.divmod(length_B, block)
  return block * whole_B * (whole_B + 1) // 2 + rest_B * (whole_B + 1)


def of_engine(
  engine: SlotEngine,
  params: model.Params,
  generations: Sequence[Generation] = (),
  only_longest: bool = False,
) -> Iterator[Program]:
  """Yield the programs of `SlotEngine.generate`.

  `params` are in the decode layout and may be given as shapes. `generations` describes the work
  of several steps, which determines how often each program runs in an average step.
  `only_longest` leaves out the programs for shorter caches or fewer slots.
  """
  config, spec, mesh = engine.model, engine.spec.at_any_temperature, engine.mesh
  with jax.set_mesh(mesh):
    is_fixed = only_longest or engine.resumes or kv_cache.is_ragged(sharding.platform())
    lengths = scheduler.cache_lengths(spec.longest_row, sharding.platform())
  empty_insertion = insertion_of([], spec.slots, rows_per_insert(spec.slots))
  longer_state: State | None = None
  laid_out: Prompts | None = None
  for length in reversed(lengths[-1:] if is_fixed else lengths):
    args = config, spec, length
    empty = Program('empty', decode_loop.empty, args, mesh, kept=params, runs=1)
    state, prompts = empty.results()
    yield empty
    programs, parked_cache = list[Program](), None
    if longer_state is None:
      programs += (prefill_programs := list(_prefill(engine, params, prompts, generations)))
      # A prefill returns equivalent shardings in another form, so compile for that form.
      laid_out = prompts if only_longest else prefill_programs[0].results(exact=True)
    rows = rows_per_insert(spec.slots)
    inserts = sum(-(-generation.begun // rows) for generation in generations)
    args, runs = (state, laid_out, empty_insertion), inserts / max(1, len(generations))
    programs.append(Program('insert', decode_loop.insert, args, mesh, runs=runs))
    if longer_state is not None:
      programs += _resize(engine, state, longer_state, length)
    programs += (
      decode_programs := list(_decode(engine, params, state, length, is_fixed, generations))
    )
    if engine.resumes:
      # Like a prefill, decoding changes the form of the shardings.
      decoded = state if only_longest else decode_programs[0].results(exact=True)[0]
      programs += _resume(engine, params, decoded, generations)
      if spec.parked:
        args, kept = (config, spec), (params, state, prompts)
        empty = Program('empty_parked', resuming.empty_parking, args, mesh, kept=kept, runs=1)
        yield empty
        places = empty_insertion.slot_R, empty_insertion.source_R
        park = Program('park', resuming.park, (decoded, empty.results(), *places), mesh)
        parked_cache = empty.results() if only_longest else park.results(exact=True)
        programs += (
          park,
          Program('unpark', resuming.unpark, (decoded, parked_cache, empty_insertion), mesh),
        )
    for program in programs:
      program.kept = params, state, laid_out, parked_cache
      yield program
    longer_state = state


def _prefill(
  engine: SlotEngine, params: model.Params, prompts: Prompts, generations: Sequence[Generation]
) -> Iterator[Program]:
  spec, mesh = engine.spec, engine.mesh
  lengths = slots.prefill_lengths(spec.max_prompt)
  for length in lengths:
    count = slots.prefilled_together(length, spec.prompts, mesh)
    number_P = np.ones(count, np.int32)
    args = engine.model, params, prompts, np.zeros((count, length), np.int32), number_P, number_P
    matches = [
      generation
      for generation in generations
      if length == min(x for x in lengths if x >= generation.prompt)
    ]
    runs = sum(-(-generation.prompts // count) for generation in matches) / max(1, len(generations))
    yield Program('prefill', decode_loop.prefill, args, mesh, (count, length), runs=runs)


def _resume(
  engine: SlotEngine, params: model.Params, state: State, generations: Sequence[Generation]
) -> Iterator[Program]:
  config, spec, mesh = engine.model, engine.spec, engine.mesh
  sizes = spec.longest_row, spec.slots, mesh
  passes = [
    (shape, sum(map(len, sequences)))
    for generation in generations
    if len(generation.resumed)
    for shape, sequences in resuming.packed_passes(generation.resumed, *sizes, engine.packs_resumed)
  ]
  _, shards = sharding.split(mesh, 'batch')
  for shape in dict.fromkeys(resuming.packed_shapes(*sizes)):
    tokens_PT = np.zeros((shape.count, shape.length), np.int32)
    segments = packing.layout(shape, [], np.zeros(0, int)).segments
    empty_insertion = insertion_of([], spec.slots, resuming.packed_rows(shape.count, spec.slots))
    routes_PTLC = routes.unknown(config, *tokens_PT.shape) if spec.keeps_routes else None
    args = config, params, state, tokens_PT, segments, empty_insertion, routes_PTLC
    rows = [count for pass_shape, count in passes if pass_shape == shape]
    runs = len(rows) / max(1, len(generations))
    trips = sum(rows) / max(1, len(rows)) / shards  # the loop copies one device's rows
    size = shape.count, shape.length
    yield Program('resume', resuming.resume, args, mesh, size, runs=runs, trips=trips)


def _decode(
  engine: SlotEngine,
  params: model.Params,
  state: State,
  length: int,
  is_fixed: bool,
  generations: Sequence[Generation],
) -> Iterator[Program]:
  """Yield the program that decodes in all slots, and those for fewer slots after compaction."""
  config, spec, mesh = engine.model, engine.spec, engine.mesh
  max_text = text_length(config, spec, state)
  spans = [span for generation in generations for span in generation.spans]
  steps = max(1, sum(span.steps for span in spans))
  positions = sum(span.steps * span.positions for span in spans) / steps
  runs, trips = len(spans) / max(1, len(generations)), steps / max(1, len(spans))
  slots = spec.slots
  while slots:
    width = drafts.width(spec.drafts, slots, mesh)
    forced = resuming.forced_of([None] * slots, width) if spec.parked else None
    limits, function, args = (1, 1, 1.0, forced), decode_loop.decode, (config, spec.sampling)
    if width:
      function = drafts.decode
      args = *args, width, params, state, texts_of([None] * slots, {}, max_text), *limits
    else:
      args = *args, params, state, *limits
    decode = Program('decode', function, args, mesh, (slots * (width + 1), length))
    if slots == spec.slots:
      decode.runs, decode.trips = runs, trips
      decode.filled = min(1.0, positions / (slots * spec.longest_row))
    yield decode
    if spec.keeps_routes:
      slot_R = np.zeros(rows_per_insert(spec.slots), np.int32)
      yield Program('routes_of', decode_loop.routes_of, (state, slot_R), mesh)
    slots = 0 if is_fixed else scheduler.compacted_slots(slots)
    if slots:
      args = state, np.arange(slots, dtype=np.int32)
      select = Program('select_slots', decode_loop.select_slots, args, mesh)
      yield select
      state = select.results()


def _resize(
  engine: SlotEngine, state: State, longer_state: State, length: int
) -> Iterator[Program]:
  """Yield the programs that resize the cache to the next length and back."""
  pairs = zip(state.cache, longer_state.cache, engine.model.layer_lengths(length), strict=True)
  for layer, longer_layer, size in dict.fromkeys(pairs):
    longer_length = kv_cache.length(longer_layer)
    if kv_cache.length(layer) != longer_length:
      for args in ((layer, longer_length), (longer_layer, size)):
        yield Program('resize', decode_loop.resize_layer, args, engine.mesh)


def empty_batch(config: RolloutConfig, shape: ShapeConfig) -> Batch:
  """Return an empty batch with as many rows as a step's batch, each of the maximum length."""
  B, T = config.questions * config.group_size, config.longest_row
  routes_BTLC = None
  if config.router_replay:
    routes_BTLC = np.zeros((B, T, *shape.route_shape), np.dtype(shape.route_dtype))
  return Batch(
    tokens_BT=np.zeros((B, T), np.int32),
    response_mask_BT=np.zeros((B, T), np.float32),
    old_logp_BT=np.zeros((B, T), np.float32),
    advantage_B=np.zeros(B, np.float32),
    is_replay_B=np.zeros(B, bool),
    policy_step_B=np.zeros(B, np.int32),
    term_weight_BT=np.ones((B, T), np.float32),
    is_carried_BT=np.zeros((B, T), bool) if config.keeps_groups else None,
    routes_BTLC=routes_BTLC,
  )
