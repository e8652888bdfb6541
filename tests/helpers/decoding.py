"""The slot engine on lists of prompts, and decoding in the form of another platform."""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import jax.numpy as jnp
import numpy as np

from exgrpo_jax.datatypes import Response
from exgrpo_jax.policy import dense_cache, kv_cache, ragged_cache
from exgrpo_jax.rollout import decode_loop, resuming, sampler
from exgrpo_jax.rollout.scheduler import SlotEngine


def generated(
  config,
  params,
  prompts,
  question_rows,
  sample_indices,
  key,
  spec,
  mesh,
  *,
  limits=None,
  begun=None,
  on_finish=sampler.ignore,
  **engine,
):
  """The responses of a `SlotEngine` whose random numbers come from `key`.

  `limits` and `begun` are those of each request; `engine` are further fields of the engine.
  """
  limits = [spec.max_response] * len(prompts) if limits is None else limits
  begun = [sampler.EMPTY_RESPONSE] * len(prompts) if begun is None else begun
  parts = zip(prompts, question_rows, sample_indices, limits, begun, strict=True)
  requests = [sampler.Request(p, row, k, 0, limit, one) for p, row, k, limit, one in parts]
  responses, _ = SlotEngine(config, spec, mesh, lambda _: key, **engine).generate(
    params, requests, on_finish
  )
  return responses


@dataclasses.dataclass(frozen=True)
class ScriptedSampler:
  """A `Sampler` whose responses are what `script` returns for a request, cut at its limit."""

  script: Callable

  def generate(self, _params, requests, on_finish=sampler.ignore):
    responses = [request.prefix for request in requests]
    for index, request in enumerate(requests):
      tokens = np.asarray(self.script(request), np.int32)
      zeros = np.zeros(min(len(tokens), request.limit), np.float32)
      responses[index] = Response(
        tokens=tokens[: len(zeros)],
        logp=zeros,
        entropy=zeros,
        truncated=len(zeros) < len(tokens),
      )
      if on_finish(index, responses[index]):
        break
    return responses, {}


def scripted(monkeypatch, module, script):
  """Lets what `module` samples come from a script: (request) -> tokens; returns the requests."""
  asked = []

  def answer(request):
    asked.append(request)
    return script(request)

  monkeypatch.setattr(module, 'make_sampler', lambda *_, **__: ScriptedSampler(answer))
  return asked


@contextlib.contextmanager
def decoding_by(backend):
  """Caches made meanwhile are those of this one of kv_cache.DECODE_BACKENDS."""
  # Their arguments do not tell which cache they make, so what was compiled before must go.
  programs = decode_loop.empty, decode_loop.prefill, resuming.empty_parking
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

  def attend(cap, T, query, position_B, pair_BSCH):
    layer = dense_cache.dense_from_sequence(pair_BSCH[:, :, ::2], pair_BSCH[:, :, 1::2])
    query_BTNH = query.reshape(len(query), T, -1, query.shape[-1])
    mixed = [dense_cache.attend(query_BTNH[:, t], position_B + t, layer, cap) for t in range(T)]
    return jnp.stack(mixed, axis=1).reshape(query.shape)

  with mock.patch.object(ragged_cache, '_call_kernel', attend):
    yield
