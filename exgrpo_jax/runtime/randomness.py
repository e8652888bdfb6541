"""Random numbers keyed by seed, purpose and place.

All random numbers in a run come from here. Each number depends only on the seed, the purpose and
the place (step, update or epoch; question row, sample and position), not on earlier draws, hosts,
slots or batches. So a resumed run continues as if it had never stopped, a manual evaluation
reproduces the run's evaluation, and no two purposes share a stream.
"""

import enum
import functools

import chex
import jax
import numpy as np


class Purpose(enum.IntEnum):
  """A use of random numbers. Never change a member's value, because it determines the streams."""

  INIT = 0  # initial parameters of a model trained from scratch
  ROLLOUT = 1  # responses to train on; by step
  EVALUATION = 2  # evaluation responses; by step
  WARM_START_CHECK = 3  # responses that decide whether a warm start is enough; by update
  STOCHASTIC_ROUNDING = 4  # rounding of the optimizer's moments; by update
  PLAN = 5  # which questions are replayed, and the order of groups; by step
  TRAJECTORY = 6  # which stored success is replayed, if that is random; by step
  QUESTION_STREAM = 7  # the order of questions; by epoch
  WARM_START_ORDER = 8  # the order of worked solutions; by epoch
  SAMPLES = 9  # which responses samples/ shows; by step
  ALIGNMENT = 10  # held-out questions in studies/ and their responses; by step
  RECORDED_GROUPS = 11  # groups whose responses are recorded token by token; by question row
  LORA = 12  # initial LoRA adapters
  GENERATE = 13  # responses to the user's own prompts
  PREFILTER = 14  # responses that measure how hard the training questions are
  TRAINED_ORDER = 15  # order of a step's trained groups if other groups are carried over; by step
  ENVIRONMENT = 16  # seeds of episodes; by purpose, step, question and sample
  DEMONSTRATION = 17  # episodes to warm-start on; by question row
  EPOCH_ORDER = 18  # order of a step's groups after the first epoch; by step and epoch


def key(seed: int, purpose: Purpose, place: int | jax.Array = 0) -> jax.Array:
  """Return the JAX key for a purpose and a point in the run, such as a step.

  `place` may be traced.
  """
  # Use int64, as JAX does for an untraced seed; bits beyond 32 are dropped.
  return _key(np.int64(seed), int(purpose), place)


@functools.cache
def key_size() -> int:
  """Return X, the number of integers in a key's data."""
  return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size


@jax.jit  # one program for all keys
def _key(seed: int, purpose: int, place: int | jax.Array) -> jax.Array:
  return functools.reduce(jax.random.fold_in, (purpose, place), jax.random.key(seed))


def generator(seed: int, purpose: Purpose, place: int = 0, *more: int) -> np.random.Generator:
  """Return the NumPy generator for a purpose and a point in the run.

  `place` and `more` give the point, for example a step, or a step and a question.
  """
  # Use a spawn key, because SeedSequence ignores trailing zeros in an entropy tuple.
  return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(purpose), place, *more)))


def ranks(seed: int, purpose: Purpose, place_N: np.ndarray) -> np.ndarray:
  """Return pseudo-random uint64 [N] for int [N] places; distinct places get distinct values.

  Uses the output function of SplitMix64 (Steele et al., Fast splittable pseudorandom number
  generators, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195). Creating a generator
  per place would take a hundred times as long. With JAX, the host would wait for the device.
  """
  start = np.random.SeedSequence(seed, spawn_key=(int(purpose),)).generate_state(1, np.uint64)
  rank_N = start + place_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
  rank_N = (rank_N ^ (rank_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  rank_N = (rank_N ^ (rank_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return rank_N ^ (rank_N >> np.uint64(31))


def row_keys(
  step_key: jax.Array, question_row_B: jax.Array, sample_index_B: jax.Array
) -> jax.Array:
  """Derive each response's key from its step key, question row and sample index.

  `step_key` is [B], or a single key for all responses.
  """
  chex.assert_equal_shape([question_row_B, sample_index_B])
  in_axes = 0 if step_key.ndim else None, 0
  question_key_B = jax.vmap(jax.random.fold_in, in_axes)(step_key, question_row_B)
  return jax.vmap(jax.random.fold_in)(question_key_B, sample_index_B)


def uniforms(key_B: jax.Array, position_B: jax.Array) -> jax.Array:
  """Draw two numbers in [0, 1) per response, from its key and position: float32 [B, 2]."""
  chex.assert_equal_shape([key_B, position_B])

  def uniform(key: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))

  return jax.vmap(uniform)(key_B, position_B)
