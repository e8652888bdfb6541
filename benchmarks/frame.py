"""Shared parts of the benchmarks: sizes, random data, alternating measurements, and figures."""

import ast
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from exgrpo_jax.capacity import lengths
from exgrpo_jax.datatypes import Batch, Response
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.experiment import model_config
from exgrpo_jax.experiment.settings import RunConfig, parse_config
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout.decode_loop import DecodeSpec
from exgrpo_jax.rollout.sampler import Request
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.rollout.token_sampling import Distribution

Result = TypeVar('Result')


# ---- Sizes ----

_SMALL_MODEL: Mapping[str, Any] = {  # 55.3 million parameters
  'vocab_size': 32000,
  'width': 512,
  'num_layers': 8,
  'num_heads': 8,
  'head_size': 64,
  'mlp_width': 1408,
  'attention_bias': False,
  'tied_embeddings': False,
  'dtype': 'float32',
}
_TINY_MODEL = _SMALL_MODEL | {
  'vocab_size': 256,
  'width': 64,
  'num_layers': 1,
  'num_heads': 4,
  'head_size': 16,
  'mlp_width': 128,
}


class Size(NamedTuple):
  """The size of a benchmark."""

  scale: float  # fraction of the paper's questions and responses, in benchmarks of the host
  repeats: int  # of each measurement; the median is reported
  model: Mapping[str, Any]  # config.model, where it differs from Qwen2.5-Math-1.5B
  rollout: Mapping[str, Any]
  tokens_per_microbatch: int


SIZES = {
  'tiny': Size(  # to check that a benchmark runs
    scale=1e-4,
    repeats=1,
    model=_TINY_MODEL,
    rollout=dict(
      questions=2, group_size=2, slots=4, max_prompt=16, max_response=32, logit_chunk=16
    ),
    tokens_per_microbatch=64,
  ),
  'small': Size(  # for a CPU
    scale=0.01,
    repeats=3,
    model=_SMALL_MODEL,
    rollout=dict(
      questions=4, group_size=8, slots=16, max_prompt=64, max_response=256, logit_chunk=512
    ),
    tokens_per_microbatch=2048,
  ),
  'large': Size(  # for an accelerator
    scale=0.1,
    repeats=3,
    model={},
    rollout=dict(
      questions=16, group_size=8, slots=128, max_prompt=512, max_response=2048, logit_chunk=2048
    ),
    tokens_per_microbatch=8192,
  ),
}


@dataclasses.dataclass(frozen=True)
class Bench:
  """The config, model and data of a benchmark."""

  size: Size
  config: RunConfig
  model: model.ShapeConfig
  meshes: sharding.Meshes

  @property
  def rows(self) -> int:
    """Count the responses of a step."""
    return self.config.rollout.questions * self.config.rollout.group_size

  @functools.cached_property
  def params(self) -> Params:
    """Make random parameters in the training layout."""
    return model.init(self.model, jax.random.key(0), self.meshes.training)

  @functools.cached_property
  def decode_params(self) -> Params:
    """Convert the parameters to the decode layout."""
    return jax.block_until_ready(model.decode_layout(self.model, self.params, self.meshes))

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """Draw lognormal response lengths in tokens; 1% are cut at the limit of 8 medians."""
    return lengths.draw('', self.rows, self.config.rollout.max_response)

  @functools.cached_property
  def flops(self) -> float:
    """Measure the FLOP/s that all devices together reach in a plain matrix product."""
    width = 1024 if sharding.platform() == 'cpu' else 8192
    matrix = jnp.ones((width, width), self.model.dtype)
    multiply = jax.jit(jnp.matmul)
    [seconds] = in_turns(3, lambda: multiply(matrix, matrix))
    return jax.device_count() * 2 * width**3 / seconds

  @functools.cached_property
  def bandwidth(self) -> float:
    """Measure the bytes per second that a device reads and writes in a plain copy."""
    size = 2**27 if sharding.platform() == 'cpu' else 2**31
    array = jnp.zeros(size // 4, jnp.int32)
    copy = jax.jit(lambda x: x ^ 1)  # XLA would optimize a plain copy away
    [seconds] = in_turns(3, lambda: copy(array))
    return 2 * size / seconds

  def engine(self, drafts: str = '0', **options: Any) -> SlotEngine:
    """Make a sampler whose responses end only at their limits."""
    rollout = self.config.rollout
    spec = DecodeSpec(
      distribution=Distribution(),
      slots=rollout.slots,
      prompts=rollout.prompts,
      max_prompt=rollout.max_prompt,
      max_response=rollout.max_response,
      eos_ids=(self.model.vocab_size,),  # never sampled
      pad_id=0,
      drafts=drafts,
    )
    return SlotEngine(self.model, spec, self.meshes.decoding, jax.random.key, **options)

  def generate(
    self,
    limits: Sequence[int],
    samples: int = 0,
    drafts: str = '0',
    past: Sequence[Response] = (),
  ) -> list[Response]:
    """Generate responses of the given lengths to random prompts, `samples` per prompt.

    `past` contains earlier responses to draft from, `samples` per prompt.
    """
    samples = samples or self.config.rollout.group_size
    requests = list[Request]()
    for row, limit in enumerate(limits):
      question, sample = divmod(row, samples)
      of_question = past[question * samples : (question + 1) * samples]
      tokens = tuple(response.tokens for response in of_question)
      requests.append(Request(self.prompt(question), question, sample, 0, int(limit), past=tokens))
    responses, _ = self.engine(drafts).generate(self.decode_params, requests)
    return responses

  def prompt(self, question: int) -> np.ndarray:
    """Draw a prompt of random tokens with the maximum length."""
    rng = np.random.default_rng(question)
    shape = self.config.rollout.max_prompt
    return rng.integers(0, self.model.vocab_size, shape).astype(np.int32)

  def batch(self, response_B: np.ndarray) -> Batch:
    """Draw rows with these response lengths. Groups share a prompt; 1 in 8 rows is replayed."""
    rng, prompt, rows = np.random.default_rng(0), self.config.rollout.max_prompt, len(response_B)
    place_T = np.arange(prompt + response_B.max())
    is_response_BT = (place_T >= prompt) & (place_T < prompt + response_B[:, None])
    mask_BT = is_response_BT.astype(np.float32)
    tokens_BT = rng.integers(0, self.model.vocab_size, mask_BT.shape).astype(np.int32)
    samples = self.config.rollout.group_size
    tokens_BT[:, :prompt] = [self.prompt(row // samples) for row in range(rows)]
    return Batch(
      tokens_BT=tokens_BT,
      response_mask_BT=mask_BT,
      old_logp_BT=-np.log(self.model.vocab_size).astype(np.float32) * mask_BT,
      advantage_B=rng.normal(size=rows).astype(np.float32),
      is_replay_B=np.arange(rows) % 8 == 7,
      policy_step_B=np.zeros(rows, np.int32),
      term_weight_BT=np.ones_like(mask_BT),
    )


def open_bench(size: Size, changes: Sequence[str] = ()) -> Bench:
  """Set up a bench of this size; `changes` are settings such as 'rollout.slots=8'."""
  values: Any = config_files.load_config('base')
  values.model.update(size.model)
  values.rollout.update(size.rollout)
  values.microbatch.tokens = size.tokens_per_microbatch
  values.optimizer.minibatches = 1
  values.update_from_flattened_dict(
    {name: _value(text) for name, _, text in (change.partition('=') for change in changes)}
  )
  config = parse_config(values)
  return Bench(size, config, model_config(config), sharding.make_meshes(config.mesh))


def _value(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


# ---- Measuring ----


class Figure(NamedTuple):
  """A value measured by a benchmark."""

  name: str
  value: float
  unit: str
  meaning: str = ''  # details beyond the name and unit
  limit: float | None = None  # highest value that passes, for a check

  @property
  def passes(self) -> bool:
    """Return True if there is no limit or the value is within it. NaN fails any limit."""
    return self.limit is None or self.value <= self.limit

  def __str__(self) -> str:
    value = f'{self.value:,.0f}' if abs(self.value) >= 100 else f'{self.value:.3g}'
    verdict = '' if self.passes else f'FAILED, must be at most {self.limit:g}: '
    return f'{self.name:<28}{value:>10} {self.unit:<12} {verdict}{self.meaning}'.rstrip()


def in_turns(repeats: int, *runs: Callable[[], object]) -> list[float]:
  """Return the median time of each run in seconds.

  The runs take turns, so a temporary slowdown of the machine affects all of them alike. The first
  round compiles and is not counted.
  """
  seconds: list[list[float]] = [[] for _ in runs]
  for repeat in range(1 + repeats):
    for run, of_run in zip(runs, seconds):
      start = time.perf_counter()
      jax.block_until_ready(run())
      if repeat:
        of_run.append(time.perf_counter() - start)
  return [statistics.median(of_run) for of_run in seconds]


def difference(found: object, expected: object) -> float:
  """Compute the largest difference between two trees, relative to each array's largest value."""
  return max(
    float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)) / jnp.max(jnp.abs(y)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  )


# Limits of `difference`, by the dtype of the computation.
LIMITS = {'bfloat16': 2e-2, 'float32': 1e-4}


def in_own_process(function: Callable[..., Result], *args: object) -> Result:
  """Run a function in a fresh process, so that its peak memory includes nothing else."""
  with concurrent.futures.ProcessPoolExecutor(
    1,
    multiprocessing.get_context('spawn'),
    logging.set_verbosity,  # below ERROR, orbax and TFDS log every detail
    (logging.ERROR,),
  ) as pool:
    return pool.submit(function, *args).result()


def peak_bytes() -> int:
  """Return the peak memory of this process in bytes. Works only on Linux."""
  status = pathlib.Path('/proc/self/status').read_text()
  [line] = [line for line in status.splitlines() if line.startswith('VmHWM:')]
  return 1024 * int(line.split()[1])
