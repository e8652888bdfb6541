"""Decoding in the form of another platform."""

import contextlib
from unittest import mock

from exgrpo_jax.policy import dense_cache, kv_cache, ragged_cache
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


@contextlib.contextmanager
def plain_kernel():
  """Attention to pages is computed by plain JAX, in place of the TPU's kernel."""

  def attend(query_BGRH, position_B, pair_BSCH):
    B, G, R, H = query_BGRH.shape
    layer = dense_cache.dense_from_sequence(pair_BSCH[:, :, ::2], pair_BSCH[:, :, 1::2])
    query_BNH = query_BGRH.reshape(B, G * R, H)
    return dense_cache.attend_dense(query_BNH, position_B, layer).reshape(B, G, R, H)

  with mock.patch.object(ragged_cache, '_attend', attend):
    yield
