"""The rollout engine: tokens per second, share of the device's bandwidth, gains from slots.

Drafts are measured in the worst case (random prompts, so no draft is accepted) and in the best case
(the same responses are passed as `past`, so all drafts are accepted). A run's speedup is about
its tokens per pass divided by the slowdown in the worst case.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.frame import Bench, Figure, in_turns
from exgrpo_jax.capacity import memory
from exgrpo_jax.policy import model, sharding

_DRAFTS = ('1', '3', '7')  # of `rollout.drafts`


def measure(bench: Bench) -> list[Figure]:
  """Measure throughput, overall and in decoding, and the gains from refills and shared prefill."""
  rollout, slots = bench.config.rollout, bench.config.rollout.slots
  limits = bench.lengths.tolist()
  rows = min(slots, bench.rows)
  longest = max(2, rollout.max_response // 4)  # equal for all rows, to time decode steps

  def in_batches() -> None:
    """Run each batch of rows until its longest ends, without refilling slots."""
    for start in range(0, len(limits), slots):
      bench.generate(limits[start : start + slots])

  same = bench.generate([longest] * rows)
  whole, batches, equal, prefill, alone, reshard, *drafted = in_turns(
    bench.size.repeats,
    lambda: bench.generate(limits),
    in_batches,
    lambda: bench.generate([longest] * rows),
    lambda: bench.generate([1] * rows),
    lambda: bench.generate([1] * rows, samples=1),
    lambda: model.decode_layout(bench.model, bench.params, bench.meshes),
    *(
      functools.partial(bench.generate, [longest] * rows, drafts=drafts, past=past)
      for drafts in _DRAFTS
      for past in ((), same)
    ),
  )
  step = (equal - prefill) / (longest - 1)
  size = _bytes_of_step(bench, rows, rollout.max_prompt + longest / 2)
  return [
    Figure(
      'end to end',
      sum(limits) / whole,
      'tokens/s',
      f'{whole:.2f} s for {len(limits)} responses of {min(limits)} to {max(limits)} tokens in '
      f'{slots} slots',
    ),
    Figure('decode only', rows / step, 'tokens/s', f'{1e3 * step:.3g} ms per step of {rows} rows'),
    Figure(
      'share of bandwidth',
      100 * size / step / bench.bandwidth,
      '%',
      f'of a plain copy; a step reads {size / 1e9:.3g} GB of weights and cache per device',
    ),
    Figure('prefill', 100 * prefill / whole, '%', 'of the total time, until the first tokens'),
    Figure('resharding', 100 * reshard / whole, '%', 'of the total time, to the decode layout'),
    Figure('refill', batches / whole, 'x', f'as fast as running each batch of {slots} to its end'),
    Figure('shared prefill', alone / prefill, 'x', f'as fast as {rows} separate prompts'),
    *_of_drafts(equal, drafted, rows),
  ]


def _of_drafts(plain: float, drafted: Sequence[float], rows: int) -> Iterator[Figure]:
  """Yield the slowdown and speedup from drafts; `plain` is the time without drafts in seconds."""
  for drafts, rejected, accepted in zip(_DRAFTS, drafted[::2], drafted[1::2]):
    name = f'{drafts} drafts'
    yield Figure(f'{name}, all rejected', rejected / plain, 'x', f'as slow as without, {rows} rows')
    yield Figure(f'{name}, all accepted', plain / accepted, 'x', f'as fast as without, {rows} rows')


def _bytes_of_step(bench: Bench, rows: int, positions: float) -> float:
  """Count the bytes that a decode step reads on each device: the weights and the filled cache."""
  shape, params = bench.model, bench.decode_params
  weights = memory.size_of(params)
  if not shape.tied_embeddings:  # tied embeddings are read as the unembedding
    weights -= memory.size_of(params['embedding_VD'])
  cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * rows * positions
  with jax.set_mesh(bench.meshes.decoding):
    shards = sharding.num_shards('batch', rows) * sharding.num_shards(
      'kv_heads', shape.num_kv_heads
    )
  return weights + cache * np.dtype(jnp.dtype(shape.dtype)).itemsize / shards
