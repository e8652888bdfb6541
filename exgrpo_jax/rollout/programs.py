"""The programs that generate responses, each at all sizes that a run calls it with.

The slot engine (scheduler.py) calls them; one that it calls and that is missing here fails
tests/capacity/test_rehearsal.py. Forward passes over written responses: `scoring.programs`.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import (
  decode_loop,
  filling,
  parking,
  prefilled,
  resumption,
  routes,
  scheduler,
)
from exgrpo_jax.rollout.decode_loop import DecodeSpec, State
from exgrpo_jax.rollout.schedule import Generation
from exgrpo_jax.rollout.slots import forced_of, insertion_of
from exgrpo_jax.runtime.compilations import Program


def programs(
  config: model.Config,
  spec: DecodeSpec,
  mesh: Mesh,
  params: model.Params,
  *,
  resumes: bool,
  is_fixed: bool,
  made: Sequence[Generation] = (),
) -> Iterator[Program]:
  """Yield the programs of `SlotEngine.generate`.

  Args:
    config: the model's shape.
    spec: how it samples.
    mesh: of decoding.
    params: in the decode layout, or their shapes.
    resumes: whether some responses may have begun.
    is_fixed: whether the cache always has its full length and no slots close up.
    made: what some steps generate, for how often a step runs each program.
  """
  spec = spec.at_any_temperature
  with jax.set_mesh(mesh):
    is_fixed |= kv_cache.is_ragged(sharding.platform())
    lengths = scheduler.cache_lengths(spec.longest_row, sharding.platform())
  syncs = sum(len(one.spans) for one in made) / max(1, len(made))
  nothing = insertion_of([], spec.slots, scheduler.rows_per_insert(spec.slots))
  following: State | None = None  # with the next longer cache
  for length in reversed(lengths[-1:] if is_fixed else lengths):
    empty = Program('empty', decode_loop.empty, (config, spec, length), mesh)
    state, prompts = empty.results()
    parked = Program('empty_parked', parking.empty, (config, spec), mesh) if spec.parked else None
    kept = params, state, prompts, parked and parked.results()
    found = [
      empty._replace(runs=1.0),
      *([parked._replace(runs=1.0)] if parked else []),
      *([] if following else _prefill(config, spec, mesh, params, prompts, made)),
      Program('insert', filling.insert, (state, prompts, nothing), mesh, runs=syncs),
      *(_resume(config, spec, mesh, params, state, made) if resumes and not following else ()),
      *_decode(config, spec, mesh, params, state, length, is_fixed, made),
      *(_parking(spec, mesh, state, kept[-1]) if parked else ()),
      *(_resize(config, mesh, state, following, length) if following else ()),
    ]
    yield from (one._replace(kept=kept) for one in found)
    following = state


def _prefill(
  config: model.Config,
  spec: DecodeSpec,
  mesh: Mesh,
  params: model.Params,
  prompts: decode_loop.Prompts,
  made: Sequence[Generation],
) -> Iterator[Program]:
  lengths = prefilled.prefill_lengths(spec.max_prompt)
  for length in lengths:
    count = prefilled.prefilled_together(length, spec.prompts, mesh)
    number_P = np.ones(count, np.int32)
    args = config, params, prompts, np.zeros((count, length), np.int32), number_P, number_P
    alike = [one for one in made if length == min(x for x in lengths if x >= one.prompt)]
    runs = sum(-(-one.prompts // count) for one in alike) / max(1, len(made))
    yield Program('prefill', filling.prefill, args, mesh, (count, length), runs=runs)


def _resume(
  config: model.Config,
  spec: DecodeSpec,
  mesh: Mesh,
  params: model.Params,
  state: State,
  made: Sequence[Generation],
) -> Iterator[Program]:
  sizes = spec.longest_row, spec.slots, mesh
  passes = [
    (one.shape, sum(map(len, one.sequences)))
    for each in made
    if len(each.resumed)
    for one in prefilled.packed_passes(each.resumed, *sizes)
  ]
  _, shards = sharding.split(mesh, 'batch')
  for shape in dict.fromkeys(prefilled.packed_shapes(*sizes)):
    tokens_PT = np.zeros((shape.count, shape.length), np.int32)
    segments = packing.layout(shape, [], np.zeros(0, int)).segments
    nothing = insertion_of([], spec.slots, prefilled.packed_rows(shape.count, spec.slots))
    known = routes.unknown(config, *tokens_PT.shape) if spec.keeps_routes else None
    args = config, params, state, tokens_PT, segments, nothing, known
    rows = [count for of, count in passes if of == shape]
    yield Program(
      'resume',
      resumption.resume,
      args,
      mesh,
      (shape.count, shape.length),
      runs=len(rows) / max(1, len(made)),
      trips=sum(rows) / max(1, len(rows)) / shards,  # rows that a device copies in a pass
    )


def _decode(
  config: model.Config,
  spec: DecodeSpec,
  mesh: Mesh,
  params: model.Params,
  state: State,
  length: int,
  is_fixed: bool,
  made: Sequence[Generation],
) -> Iterator[Program]:
  """Decoding in all slots, and in those that are left once the last rows close up."""
  forced = forced_of([None] * spec.slots) if spec.parked else None
  spans = [span for one in made for span in one.spans]
  steps = max(1, sum(span.steps for span in spans))
  read = sum(span.steps * span.positions for span in spans) / steps
  slots = spec.slots
  while slots:
    args = config, spec.sampling, params, state, 1, 1, 1.0, forced
    decode = Program('decode', decode_loop.decode, args, mesh, (slots, length))
    if slots == spec.slots:
      runs = len(spans) / max(1, len(made))
      trips = steps / max(1, len(spans))
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


def _parking(
  spec: DecodeSpec, mesh: Mesh, state: State, parked: kv_cache.Cache
) -> Iterator[Program]:
  nothing = insertion_of([], spec.slots, scheduler.rows_per_insert(spec.slots))
  args = state, parked, nothing.slot_R, nothing.source_R
  yield Program('park', parking.park, args, mesh)
  yield Program('unpark', parking.unpark, (state, parked, nothing), mesh)


def _resize(
  config: model.Config, mesh: Mesh, state: State, longer: State, length: int
) -> Iterator[Program]:
  """From the cache's length to the next one, and back."""
  pairs = zip(state.cache, longer.cache, config.layer_lengths(length), strict=True)
  for layer, of_longer, size in dict.fromkeys(pairs):
    following = kv_cache.length(of_longer)
    if size != following:
      yield Program('resize', decode_loop.resize_layer, (layer, following), mesh)
      yield Program('resize', decode_loop.resize_layer, (of_longer, size), mesh)
