"""The rollout engine: tokens per second, what its parts cost, and what its scheduling gains."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.padding import length_bucket
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.memory import bytes_per_chip
from exgrpo_jax.performance.peaks import Peaks
from exgrpo_jax.performance.products import decode_products
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import (
  Workload,
  decode_spec,
  random_params,
  random_prompts,
  response_lengths,
)
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.kv_cache import Cache
from exgrpo_jax.rollout import scheduler, token_sampling

_PRODUCT_STEPS = 64  # decode steps in one measurement of the matrix products
_ATTENTION_STEPS = 16  # tokens in one measurement of attention
_SAMPLING_STEPS = 16  # draws in one measurement of sampling


@dataclasses.dataclass(frozen=True)
class _Engine:
  """The rollout engine on random weights and prompts."""

  workload: Workload
  meshes: sharding.Meshes
  params: model.Params  # in the decode layout

  @property
  def num_live(self) -> int:
    """Rows that decode together."""
    return min(self.workload.slots, self.workload.num_rows)

  def generate(
    self,
    lengths: Sequence[int],
    *,
    first: int = 0,
    prompt: int | None = None,
    samples: int | None = None,
    max_response: int | None = None,
  ) -> None:
    """Generates responses of the given lengths.

    Args:
      lengths: of the responses, in tokens.
      first: how many rows come before the first of these; each question has `samples` rows.
      prompt: tokens of a prompt; the workload's by default.
      samples: rows of one question; the workload's by default.
      max_response: the engine's limit in tokens; by default the longest of `lengths`.
    """
    config = self.workload.model
    samples = samples or self.workload.samples
    prompt = prompt or self.workload.prompt
    questions = [row // samples for row in range(first, first + len(lengths))]
    distinct = list(dict.fromkeys(questions))
    prompts = dict(zip(distinct, random_prompts(config.vocab_size, len(distinct), prompt)))
    scheduler.generate(
      config,
      self.params,
      [prompts[question] for question in questions],
      questions,
      [row % samples for row in range(first, first + len(lengths))],
      jax.random.key(0),
      decode_spec(self.workload, prompt, max_response or max(lengths)),
      self.meshes.decoding,
      limits=lengths,
    )


def measure(
  workload: Workload, meshes: sharding.Meshes, peaks: Peaks, scheduling: bool
) -> list[Measurement]:
  """The engine's throughput, how close it is to the device's bandwidth, and where its time goes.

  With `scheduling` also what the scheduler gains. Call it inside
  `jax.set_mesh(meshes.decoding)`.
  """
  stored = random_params(workload, meshes.training)
  params = jax.block_until_ready(model.decode_layout(workload.model, stored, meshes))
  engine, lengths = _Engine(workload, meshes, params), response_lengths(workload)
  total, prefill, throughput = _throughput(engine, lengths, peaks)
  found = [*throughput, *_shares(engine, stored, lengths, total, prefill)]
  return found + (_gains(engine, lengths) if scheduling else [])


def _throughput(
  engine: _Engine, lengths: Sequence[int], peaks: Peaks
) -> tuple[float, float, list[Measurement]]:
  """Seconds of the whole rollout, those up to the first token of every response, and the rates."""
  workload = engine.workload
  rows_of_device = engine.num_live // sharding.num_shards('batch', engine.num_live)
  run_products, flops = decode_products(
    workload.model, engine.params, rows_of_device, _PRODUCT_STEPS
  )
  total, prefill, products = median_seconds(
    workload.repeats,
    lambda: engine.generate(lengths),
    lambda: engine.generate([1] * len(lengths)),  # prefill and one token
    run_products,
  )
  decode, product_step = total - prefill, products / _PRODUCT_STEPS
  decoded = sum(lengths) - len(lengths)
  steps = decoded / engine.num_live
  size = _bytes_of_step(engine, lengths)
  return (
    total,
    prefill,
    [
      Measurement(
        'end to end',
        sum(lengths) / total,
        'tokens/s',
        f'{total:.2f} s for {len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens in '
        f'{workload.slots} slots, prompts of {workload.prompt}',
      ),
      Measurement('decode only', decoded / decode, 'tokens/s', f'{decode:.2f} s'),
      Measurement('decode step', 1e3 * decode / steps, 'ms', f'{engine.num_live} rows together'),
      Measurement(
        'products alone',
        100 * product_step * steps / decode,
        '%',
        "of the time; the model's matrix products alone run at "
        f'{flops / product_step / 1e9:,.0f} GFLOP/s, {1e3 * product_step:.3g} ms a step',
      ),
      Measurement(
        'share of bandwidth',
        100 * size * steps / decode / peaks.bandwidth,
        '%',
        f'of {peaks.note}; a step must read {size / 1e9:.3g} GB of weights and cache on a device',
      ),
    ],
  )


def _bytes_of_step(engine: _Engine, lengths: Sequence[int]) -> float:
  """What a decode step must read on each device: all weights, and the keys and values so far."""
  config = engine.workload.model
  weights = bytes_per_chip(engine.params)
  if not config.tied_embeddings:  # else the table is the unembedding
    weights -= bytes_per_chip(engine.params['embedding_VD'])
  rows = engine.num_live
  tokens = np.average(
    engine.workload.prompt + np.array(lengths) / 2, weights=np.array(lengths)
  )  # of a row, on average over steps
  cache = 2 * config.num_layers * config.num_kv_heads * config.head_size * rows * tokens
  shards = sharding.num_shards('batch', rows) * sharding.num_shards('kv_heads', config.num_kv_heads)
  return weights + cache * jnp.dtype(config.dtype).itemsize / shards


def _shares(
  engine: _Engine,
  stored: model.Params,
  lengths: Sequence[int],
  total: float,
  prefill: float,
) -> list[Measurement]:
  """What prefill, sampling, attention and the conversion to the decode layout take of the total."""
  workload, config, rows = engine.workload, engine.workload.model, engine.num_live
  steps = (sum(lengths) - len(lengths)) / rows
  cache_length = length_bucket(workload.prompt + int(np.mean(lengths)))
  with_attention, without = median_seconds(
    workload.repeats, *(_tokens(engine, length) for length in (cache_length, 1))
  )
  draws, resharding = median_seconds(
    workload.repeats,
    _draws(config, rows),
    lambda: jax.block_until_ready(model.decode_layout(config, stored, engine.meshes)),
  )
  return [
    Measurement(name, 100 * seconds / total, '%', f'of the whole, {seconds:.3f} s')
    for name, seconds in (
      ('prefill', prefill),
      ('sampling', draws / _SAMPLING_STEPS * steps),
      ('attention', (with_attention - without) / _ATTENTION_STEPS * steps),
      ('resharding', resharding),
    )
  ]


def _gains(engine: _Engine, lengths: Sequence[int]) -> list[Measurement]:
  """What refilling slots, sharing prefills and growing the cache gain."""
  workload, slots = engine.workload, engine.workload.slots

  def generate_in_batches() -> None:
    for start in range(0, len(lengths), slots):
      engine.generate(lengths[start : start + slots], first=start)

  refilled, in_batches = median_seconds(
    workload.repeats, lambda: engine.generate(lengths), generate_in_batches
  )
  eight, one = median_seconds(
    workload.repeats,
    *(functools.partial(engine.generate, [1] * count, prompt=512, samples=8) for count in (8, 1)),
  )
  low, high = median_seconds(
    workload.repeats,
    *(
      functools.partial(
        engine.generate, [64] * engine.num_live, max_response=limit - workload.prompt
      )
      for limit in (256, 4096)
    ),
  )
  return [
    Measurement(
      'refill',
      in_batches / refilled,
      'x',
      f'the throughput of running each batch of {slots} to its longest row',
    ),
    Measurement(
      'shared',
      eight / one,
      'x',
      'the time of one sample, for 8 samples of one prompt of 512 tokens, up to the first token',
    ),
    Measurement(
      'cache limit',
      high / low,
      'x',
      'the time at a limit of 256 tokens, for a limit of 4,096, while responses have 64',
    ),
  ]


def _tokens(engine: _Engine, cache_length: int) -> Callable[[], object]:
  """_ATTENTION_STEPS tokens of each row without logits, at the end of the cache."""
  config, num_rows = engine.workload.model, engine.num_live

  @jax.jit
  def decode(params: model.Params, cache: Cache) -> tuple[jax.Array, Cache]:
    def decode_token(_: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
      hidden_BD, cache = carry
      token_B = (hidden_BD[:, 0] > 0).astype(jnp.int32)
      return model.decode(config, params, token_B, jnp.full(num_rows, cache_length - 1), cache)

    start = jnp.zeros((num_rows, config.width), config.dtype), cache
    return jax.lax.fori_loop(0, _ATTENTION_STEPS, decode_token, start)

  cache = model.init_cache(config, num_rows, cache_length)
  return lambda: jax.block_until_ready(decode(engine.params, cache))


def _draws(config: model.Config, num_rows: int) -> Callable[[], object]:
  """_SAMPLING_STEPS draws of a token for each row."""
  sample = jax.jit(token_sampling.sample_token, static_argnums=0)
  logits_BV = jax.random.normal(jax.random.key(0), (num_rows, config.vocab_size))
  uniform_B2 = jax.random.uniform(jax.random.key(1), (num_rows, 2))

  def draw() -> None:
    for _ in range(_SAMPLING_STEPS):
      jax.block_until_ready(sample(token_sampling.Distribution(), logits_BV, uniform_B2))

  return draw
