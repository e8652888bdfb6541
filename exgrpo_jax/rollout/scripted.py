"""A sampler without a model: its responses come from a script."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.datatypes import Response
from exgrpo_jax.rollout.sampler import OnFinish, Request, ignore


@dataclasses.dataclass(frozen=True)
class ScriptedSampler:
  """A `Sampler` that writes what `script` says, one response after the other."""

  script: Callable[[Request], Sequence[int] | np.ndarray]  # the tokens of a response
  logp: float = 0.0  # of each token, in nats

  def generate(
    self, params: Any, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """See `Sampler.generate`; what exceeds a request's limit is cut off."""
    del params
    responses = [request.begun for request in requests]
    for index, request in enumerate(requests):
      tokens = np.asarray(self.script(request), np.int32)
      length = min(len(tokens), request.limit)
      responses[index] = Response(
        tokens=tokens[:length],
        logp=np.full(length, self.logp, np.float32),
        entropy=np.zeros(length, np.float32),
        truncated=length < len(tokens),
      )
      if on_finish(index, responses[index]):
        break
    return responses, {}
