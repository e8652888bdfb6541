"""Decoding in the form of another platform."""

import contextlib
from unittest import mock

from exgrpo_jax.policy import kv_cache
from exgrpo_jax.rollout import decode_loop


@contextlib.contextmanager
def decoding_by(backend):
  """Caches made meanwhile are those of this one of kv_cache.DECODE_BACKENDS."""
  # Their arguments do not tell which cache they make, so what was compiled before must go.
  programs = decode_loop.empty, decode_loop.prefill
  with mock.patch.object(kv_cache, 'backend_for', return_value=backend):
    try:
      for program in programs:
        program.clear_cache()
      yield
    finally:
      for program in programs:
        program.clear_cache()
