"""The rollout engine: tokens per second, share of the device's bandwidth, gain from slots."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.frame import Bench, Figure, in_turns
from exgrpo_jax.policy import model, sharding


def measure(bench: Bench) -> list[Figure]:
  """Measure throughput, end to end and in decoding, and gains of refills and shared prefill."""
  rollout, slots = bench.config.rollout, bench.config.rollout.slots
  limits = bench.lengths.tolist()
  rows = min(slots, bench.rows)
  longest = max(2, rollout.max_response // 4)  # equal for all rows, to time decode steps

  def in_batches() -> None:
    """Run each batch of rows until its longest ends, without refilling slots."""
    for start in range(0, len(limits), slots):
      bench.generate(limits[start : start + slots])

  whole, batches, equal, prefill, alone, reshard = in_turns(
    bench.size.repeats,
    lambda: bench.generate(limits),
    in_batches,
    lambda: bench.generate([longest] * rows),
    lambda: bench.generate([1] * rows),
    lambda: bench.generate([1] * rows, samples=1),
    lambda: model.decode_layout(bench.model, bench.params, bench.meshes),
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
    Figure('decode only', rows / step, 'tokens/s', f'{1e3 * step:.3g} ms a step of {rows} rows'),
    Figure(
      'share of bandwidth',
      100 * size / step / bench.bandwidth,
      '%',
      f'of a plain copy; a step reads {size / 1e9:.3g} GB of weights and cache on a device',
    ),
    Figure('prefill', 100 * prefill / whole, '%', 'of the whole, up to the first tokens'),
    Figure('resharding', 100 * reshard / whole, '%', 'of the whole, to the decode layout'),
    Figure('refill', batches / whole, 'x', f'as fast as running each batch of {slots} to its end'),
    Figure('shared prefill', alone / prefill, 'x', f'as fast as {rows} prompts of their own'),
  ]


def _bytes_of_step(bench: Bench, rows: int, positions: float) -> float:
  """Count the bytes that a decode step must read on each device: weights, and cache so far."""
  shape, params = bench.model, bench.decode_params
  weights = sharding.bytes_per_device(params)
  if not shape.tied_embeddings:  # with tied ones the table is the unembedding
    weights -= sharding.bytes_per_device(params['embedding_VD'])
  cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * rows * positions
  with jax.set_mesh(bench.meshes.decoding):
    shards = sharding.num_shards('batch', rows) * sharding.num_shards(
      'kv_heads', shape.num_kv_heads
    )
  return weights + cache * np.dtype(jnp.dtype(shape.dtype)).itemsize / shards
