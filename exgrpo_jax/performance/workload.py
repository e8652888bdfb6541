"""What the benchmarks of rollout, update and loss work on: a size, and random data of that size."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import lora, model
from exgrpo_jax.rollout import token_sampling
from exgrpo_jax.rollout.decode_loop import DecodeSpec

LENGTHS = ('equal', 'lognormal')  # how response lengths are distributed

# The objective of configs/base.py; which one it is hardly matters for speed.
OBJECTIVE = objective.Config(
  clip='until_replay',
  clip_epsilon=0.2,
  clip_epsilon_high=0.2,
  dual_clip=float('inf'),
  surrogate='ppo',
  ratio='token',
  shaping='fraction',
  beta=0.1,
  shaping_exponent=0.5,
  shaping_weight=0.1,
  importance_correction=True,
  baseline='group',
  normalize_std='off',
  aggregation='constant',
  entropy_bonus=1e-4,
  kl_coefficient=0.0,
  old_logprobs='sampler',
  tis_limit=0.0,
)
OPTIMIZER = optimizer.Config(
  minibatches=1,
  learning_rate=1e-6,
  schedule='constant',
  warmup_updates=0,
  b1=0.9,
  b2=0.999,
  epsilon=1e-8,
  weight_decay=0.01,
  moments='float32',
  clip_norm=1.0,
  skip_norm=float('inf'),
)

NO_LORA = lora.Config(rank=0, alpha=1.0, targets=tuple(lora.TARGETS))

_NORMAL_99 = 2.3263  # the 99th percentile of the standard normal distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The size of a benchmark; each benchmark reads the fields that concern it."""

  model: model.Config
  slots: int  # rows that decode together
  questions: int
  samples: int  # responses to each question
  prompt: int  # tokens of each prompt
  response: int  # tokens of each response, or their median if lengths are lognormal
  lengths: str  # one of LENGTHS
  microbatch: int  # tokens of one forward and backward pass
  remat: str  # one of model.REMAT
  chunk: int  # tokens whose logits exist at once
  repeats: int  # of each measurement; the median counts

  @property
  def num_rows(self) -> int:
    """Responses in all."""
    return self.questions * self.samples


def response_lengths(workload: Workload) -> list[int]:
  """The length of every response in tokens; the same on every call.

  If lognormal, the 99th percentile is 8 times the median.
  """
  if workload.lengths == 'equal':
    return [workload.response] * workload.num_rows
  normal = np.random.default_rng(0).normal(size=workload.num_rows)
  spread = np.log(8) / _NORMAL_99
  lengths = np.maximum(1, np.round(workload.response * np.exp(spread * normal)))
  return lengths.astype(int).tolist()


def random_params(workload: Workload, mesh: Mesh) -> model.Params:
  """Random parameters in the training layout."""
  return model.init(workload.model, jax.random.key(0), mesh)


def random_prompts(vocab_size: int, count: int, length: int) -> list[np.ndarray]:
  """`count` prompts of `length` random tokens."""
  rng = np.random.default_rng(1)
  return list(rng.integers(0, vocab_size, (count, length)).astype(np.int32))


def decode_spec(workload: Workload, max_prompt: int, max_response: int) -> DecodeSpec:
  """Sampling in which only the limits end responses."""
  return DecodeSpec(
    distribution=token_sampling.Distribution(),
    slots=workload.slots,
    prompts=min(workload.questions, workload.slots),
    max_prompt=max_prompt,
    max_response=max_response,
    eos_ids=(workload.model.vocab_size,),  # never sampled
    pad_id=0,
  )


def random_batch(workload: Workload, lengths: Sequence[int] | np.ndarray) -> Batch:
  """Random rows with responses of these lengths in tokens, every eighth of them replayed."""
  prompt, vocab_size = workload.prompt, workload.model.vocab_size
  rng = np.random.default_rng(0)
  response_B = np.array(lengths)
  rows = len(response_B)
  place_T = np.arange(prompt + response_B.max())
  is_response_BT = (place_T >= prompt) & (place_T < prompt + response_B[:, None])
  mask_BT = is_response_BT.astype(np.float32)
  return Batch(
    tokens_BT=rng.integers(0, vocab_size, mask_BT.shape).astype(np.int32),
    response_mask_BT=mask_BT,
    behaviour_logp_BT=-np.log(vocab_size).astype(np.float32) * mask_BT,
    advantage_B=rng.normal(size=rows).astype(np.float32),
    is_replay_B=np.arange(rows) % 8 == 7,
    policy_step_B=np.zeros(rows, np.int32),
    tis_weight_BT=np.ones_like(mask_BT),
  )
