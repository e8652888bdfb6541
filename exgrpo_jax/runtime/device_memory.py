"""How much of a GPU's memory JAX takes when it starts, and what to do where it is not enough."""

import contextlib
import os
import re
from collections.abc import Iterator

from exgrpo_jax.errors import InputError

# Of the whole. JAX's own choice, three quarters, leaves 6 GB of a card of 24 GB to nobody; the rest
# is for CUDA, its libraries and a screen.
SHARE = 0.9

# In the words of XLA's platforms.
_EXHAUSTED = re.compile('RESOURCE_EXHAUSTED|out of memory|bad_alloc', re.IGNORECASE)
_CHOSEN = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')


def take_share() -> None:
  """Has JAX take SHARE, where the environment does not say how much.

  To be called before JAX looks for devices.
  """
  if not any(name in os.environ for name in _CHOSEN):
    os.environ[_CHOSEN[0]] = str(SHARE)


@contextlib.contextmanager
def explained() -> Iterator[None]:
  """Turns an error in the block that is due to too little memory into an InputError."""
  try:
    yield
  except (RuntimeError, MemoryError) as error:  # XLA's is a RuntimeError; on a CPU either may come
    if not isinstance(error, MemoryError) and not _EXHAUSTED.search(str(error)):
      raise
    first_line = str(error).strip().partition('\n')[0][:300] or 'MemoryError'
    raise InputError(
      f'the memory is full ({first_line}): lower config.rollout.slots, the responses that decode '
      'at once, or config.gradient.tokens_per_microbatch, those of a forward and backward pass. '
      'They change nothing but memory and time, and a run resumes with other values. For a GPU, '
      '`exgrpo capacity --config=… --device=… --fit` computes how large they may be.'
    ) from error
