"""The rollout engine: tokens per second, what its parts cost, and what its scheduling gains."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.padding import length_bucket
from exgrpo_jax.performance.products import decode_products
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import Workload, random_params, response_lengths
from exgrpo_jax.policy import model
from exgrpo_jax.policy.kv_cache import Cache
from exgrpo_jax.rollout import scheduler, token_sampling
from exgrpo_jax.rollout.decode_loop import DecodeSpec

_PRODUCT_STEPS = 64  # decode steps in one measurement of the matrix products
_ATTENTION_STEPS = 16  # tokens in one measurement of attention
_SAMPLING_STEPS = 16  # draws in one measurement of sampling


@dataclasses.dataclass(frozen=True)
class _Engine:
  """The rollout engine on random weights and prompts."""

  workload: Workload
  mesh: Mesh
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
    rng = np.random.default_rng(1)
    rows = range(first, first + len(lengths))
    questions = [row // samples for row in rows]
    prompts = {
      question: rng.integers(0, config.vocab_size, prompt or self.workload.prompt).astype(np.int32)
      for question in dict.fromkeys(questions)
    }
    spec = DecodeSpec(
      distribution=token_sampling.Distribution(),
      slots=self.workload.slots,
      prompts=min(self.workload.questions, self.workload.slots),
      max_prompt=prompt or self.workload.prompt,
      max_response=max_response or max(lengths),
      eos_ids=(config.vocab_size,),  # never sampled, so only the limits end responses
      pad_id=0,
    )
    scheduler.generate(
      config,
      self.params,
      [prompts[question] for question in questions],
      questions,
      [row % samples for row in rows],
      jax.random.key(0),
      spec,
      self.mesh,
      limits=lengths,
    )


def run(workload: Workload, mesh: Mesh, shape_name: str) -> None:
  """Prints the engine's throughput, compares it with a roofline, and splits up its time.

  Call it inside `jax.set_mesh(mesh)`.
  """
  stored = random_params(workload, mesh)
  params = jax.block_until_ready(model.decode_layout(workload.model, stored, mesh))
  engine, lengths = _Engine(workload, mesh, params), response_lengths(workload)
  print(
    f'{shape_name} on {jax.device_count()} {jax.devices()[0].device_kind}: {len(lengths)} '
    f'responses of {min(lengths)} to {max(lengths)} tokens in {workload.slots} slots, prompts of '
    f'{workload.prompt}'
  )
  total, prefill = _print_throughput(engine, lengths)
  _print_shares(engine, stored, lengths, total, prefill)
  _print_scheduling(engine, lengths)


def _print_throughput(engine: _Engine, lengths: Sequence[int]) -> tuple[float, float]:
  """Returns the seconds of the whole rollout, and up to the first token of every response."""
  workload = engine.workload
  run_products, flops = decode_products(
    workload.model, engine.params, engine.num_live, _PRODUCT_STEPS
  )
  total, prefill, products = median_seconds(
    workload.repeats,
    lambda: engine.generate(lengths),
    lambda: engine.generate([1] * len(lengths)),  # prefill and one token
    run_products,
  )
  decode, product_step = total - prefill, products / _PRODUCT_STEPS
  decoded = sum(lengths) - len(lengths)
  print(f'end to end   {sum(lengths) / total:10,.0f} tokens/s   {total:.2f} s')
  print(f'decode only  {decoded / decode:10,.0f} tokens/s   {decode:.2f} s')
  print(
    f'roofline     {100 * product_step * decoded / engine.num_live / decode:9.0f}%   of the rate '
    f"at which the model's matrix products alone run: {flops / product_step / 1e9:.0f} GFLOP/s, "
    f'{1e3 * product_step:.1f} ms a step'
  )
  return total, prefill


def _print_shares(
  engine: _Engine,
  stored: model.Params,
  lengths: Sequence[int],
  total: float,
  prefill: float,
) -> None:
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
    lambda: jax.block_until_ready(model.decode_layout(config, stored, engine.mesh)),
  )
  for name, seconds in (
    ('prefill', prefill),
    ('sampling', draws / _SAMPLING_STEPS * steps),
    ('attention', (with_attention - without) / _ATTENTION_STEPS * steps),
    ('resharding', resharding),
  ):
    print(f'{name:<12} {100 * seconds / total:9.0f}%   {seconds:.3f} s')


def _print_scheduling(engine: _Engine, lengths: Sequence[int]) -> None:
  """What refilling slots, sharing prefills and growing the cache gain."""
  workload, slots = engine.workload, engine.workload.slots

  def generate_in_batches() -> None:
    for start in range(0, len(lengths), slots):
      engine.generate(lengths[start : start + slots], first=start)

  refilled, in_batches = median_seconds(
    workload.repeats, lambda: engine.generate(lengths), generate_in_batches
  )
  print(
    f'refill       {in_batches / refilled:9.2f}x   the throughput of running each batch of {slots} '
    'to its longest row'
  )
  eight, one = median_seconds(
    workload.repeats,
    *(functools.partial(engine.generate, [1] * count, prompt=512, samples=8) for count in (8, 1)),
  )
  print(
    f'shared       {eight / one:9.2f}x   the time of one sample, for 8 samples of one prompt of '
    '512 tokens, up to the first token'
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
  print(
    f'cache limit  {high / low:9.2f}x   the time at a limit of 256 tokens, for a limit of 4,096, '
    'while responses have 64'
  )


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
