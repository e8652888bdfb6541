"""The programs that the slot engine calls, at all sizes, and how often a step does.

What is missing here fails tests/capacity/test_rehearsal.py. Forward passes over written responses:
`scoring.programs`. Shape letters as in decode_loop.py.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from exgrpo_jax import packing
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop, filling, routes, scheduler, slots
from exgrpo_jax.rollout.decode_loop import Prompts, State
from exgrpo_jax.rollout.schedule import Generation
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.rollout.slots import forced_of, insertion_of
from exgrpo_jax.runtime.compilations import Program


def of_engine(
  engine: SlotEngine,
  params: model.Params,
  made: Sequence[Generation] = (),
  only_longest: bool = False,
) -> Iterator[Program]:
  """Yield the programs of `SlotEngine.generate`.

  Args:
    engine: its step_key is not used.
    params: in the decode layout, or their shapes.
    made: what some steps generate, for how often a step runs each program.
    only_longest: whether to leave out shorter caches and fewer slots.
  """
  config, spec, mesh = engine.model, engine.spec.at_any_temperature, engine.mesh
  with jax.set_mesh(mesh):
    is_fixed = only_longest or engine.resumes or kv_cache.is_ragged(sharding.platform())
    lengths = scheduler.cache_lengths(spec.longest_row, sharding.platform())
  nothing = insertion_of([], spec.slots, scheduler.rows_per_insert(spec.slots))
  longer: State | None = None
  laid_out: Prompts | None = None
  for length in reversed(lengths[-1:] if is_fixed else lengths):
    empty = Program('empty', decode_loop.empty, (config, spec, length), mesh, runs=1)
    state, prompts = empty.results()
    yield empty._replace(kept=params)
    found, parked = list[Program](), None
    if spec.parked:
      empty = Program('empty_parked', filling.empty_parking, (config, spec), mesh, runs=1)
      yield empty._replace(kept=(params, state, prompts))
      parked = empty.results()
      places = nothing.slot_R, nothing.source_R
      found.append(Program('park', filling.park, (state, parked, *places), mesh))
      found.append(Program('unpark', filling.unpark, (state, parked, nothing), mesh))
    if longer is None:
      found += (fill := list(_prefill(engine, params, prompts, made)))
      # Slots are filled after a prefill, whose shardings have other names: another program.
      laid_out = prompts if only_longest else fill[0].results(exact=True)
    rows = scheduler.rows_per_insert(spec.slots)
    runs = sum(-(-one.begun // rows) for one in made) / max(1, len(made))
    found.append(Program('insert', filling.insert, (state, laid_out, nothing), mesh, runs=runs))
    if longer is None:
      found += _resume(engine, params, state, made) if engine.resumes else ()
    else:
      found += _resize(engine, state, longer, length)
    found += _decode(engine, params, state, length, is_fixed, made)
    kept = params, state, laid_out, parked
    yield from (one._replace(kept=kept) for one in found)
    longer = state


def _prefill(
  engine: SlotEngine, params: model.Params, prompts: Prompts, made: Sequence[Generation]
) -> Iterator[Program]:
  spec, mesh = engine.spec, engine.mesh
  lengths = slots.prefill_lengths(spec.max_prompt)
  for length in lengths:
    count = slots.prefilled_together(length, spec.prompts, mesh)
    number_P = np.ones(count, np.int32)
    args = engine.model, params, prompts, np.zeros((count, length), np.int32), number_P, number_P
    alike = [one for one in made if length == min(x for x in lengths if x >= one.prompt)]
    runs = sum(-(-one.prompts // count) for one in alike) / max(1, len(made))
    yield Program('prefill', filling.prefill, args, mesh, (count, length), runs=runs)


def _resume(
  engine: SlotEngine, params: model.Params, state: State, made: Sequence[Generation]
) -> Iterator[Program]:
  config, spec, mesh = engine.model, engine.spec, engine.mesh
  sizes = spec.longest_row, spec.slots, mesh
  passes = [
    (one.shape, sum(map(len, one.sequences)))
    for each in made
    if len(each.resumed)
    for one in slots.packed_passes(each.resumed, *sizes)
  ]
  _, shards = sharding.split(mesh, 'batch')
  for shape in dict.fromkeys(slots.packed_shapes(*sizes)):
    tokens_PT = np.zeros((shape.count, shape.length), np.int32)
    segments = packing.layout(shape, [], np.zeros(0, int)).segments
    nothing = insertion_of([], spec.slots, slots.packed_rows(shape.count, spec.slots))
    known = routes.unknown(config, *tokens_PT.shape) if spec.keeps_routes else None
    args = config, params, state, tokens_PT, segments, nothing, known
    rows = [count for of, count in passes if of == shape]
    resume = Program('resume', filling.resume, args, mesh, (shape.count, shape.length))
    # The loop copies the rows of a device.
    trips = sum(rows) / max(1, len(rows)) / shards
    yield resume._replace(runs=len(rows) / max(1, len(made)), trips=trips)


def _decode(
  engine: SlotEngine,
  params: model.Params,
  state: State,
  length: int,
  is_fixed: bool,
  made: Sequence[Generation],
) -> Iterator[Program]:
  """Decoding in all slots, and in those that are left once the last rows close up."""
  config, spec, mesh = engine.model, engine.spec, engine.mesh
  forced = forced_of([None] * spec.slots) if spec.parked else None
  spans = [span for one in made for span in one.spans]
  steps = max(1, sum(span.steps for span in spans))
  read = sum(span.steps * span.positions for span in spans) / steps
  runs, trips = len(spans) / max(1, len(made)), steps / max(1, len(spans))
  slots = spec.slots
  while slots:
    args = config, spec.sampling, params, state, 1, 1, 1.0, forced
    decode = Program('decode', decode_loop.decode, args, mesh, (slots, length))
    if slots == spec.slots:
      filled = min(1.0, read / (slots * spec.longest_row))
      decode = decode._replace(runs=runs, trips=trips, filled=filled)
    yield decode
    if spec.keeps_routes:
      slot_R = np.zeros(scheduler.rows_per_insert(spec.slots), np.int32)
      yield Program('routes_of', decode_loop.routes_of, (state, slot_R), mesh)
    slots = 0 if is_fixed else scheduler.compacted_slots(slots)
    if slots:
      args = state, np.arange(slots, dtype=np.int32)
      select = Program('select_slots', decode_loop.select_slots, args, mesh)
      yield select
      state = select.results()


def _resize(engine: SlotEngine, state: State, longer: State, length: int) -> Iterator[Program]:
  """From the cache's length to the next one, and back."""
  pairs = zip(state.cache, longer.cache, engine.model.layer_lengths(length), strict=True)
  for layer, of_longer, size in dict.fromkeys(pairs):
    following = kv_cache.length(of_longer)
    if kv_cache.length(layer) != following:
      for args in ((layer, following), (of_longer, size)):
        yield Program('resize', decode_loop.resize_layer, args, engine.mesh)
