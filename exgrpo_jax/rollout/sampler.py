"""The seam between the loop and whatever writes responses: requests in, responses out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from exgrpo_jax.datatypes import Question, Response

UNBEGUN = Response(
  tokens=np.zeros(0, np.int32),
  logp=np.zeros(0, np.float32),
  entropy=np.zeros(0, np.float32),
  truncated=False,
  is_complete=False,
)


@dataclasses.dataclass(frozen=True)
class Request:
  """A response that is wanted.

  Its tokens are seeded by step, question and sample, so they depend neither on the other requests
  nor on the order.
  """

  prompt: np.ndarray  # [T] int32
  question: int  # row in its data source
  sample: int  # which of the question's responses
  step: int  # in which the response began
  limit: int  # of the response, in tokens, the end token included
  begun: Response = UNBEGUN  # what is written of it; only a sampler that resumes takes any
  asked: Question | None = None  # for an environment; None of a single turn
  # Of the same call, the request whose tokens it begins with, followed by an observation.
  follows: int | None = None


# Called with a request's index and its complete response. True stops the sampler.
OnFinish = Callable[[int, Response], bool | None]


# Gives further requests as they become known; None stops the sampler. It is told whether nothing
# else is left to do, and then waits for some if there are any to come.
More = Callable[[bool], Sequence[Request] | None]


def ignore(_index: int, _response: Response) -> None:
  """The OnFinish that waits for all responses."""


def nothing_more(_is_idle: bool) -> Sequence[Request]:
  """The More that has none."""
  return ()


class Sampler(Protocol):
  """Writes responses: the slot engine (scheduler.py), or `ScriptedSampler`."""

  def generate(
    self, params: Any, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """The response to each request, in order, and how it went, as metrics.

    Args:
      params: the policy's, in the decode layout (`model.decode_layout`).
      requests: what is wanted; equal prompts should follow one another.
      on_finish: called as responses finish, while others are still being written. Once it returns
        True, what is unfinished is returned as it is, not complete.
    """
    ...


def requests_for(
  prompts: Sequence[np.ndarray],
  questions: Sequence[int],
  samples: int,
  step: int,
  limit: int,
  asked: Sequence[Question] = (),
) -> list[Request]:
  """Requests for `samples` responses to each prompt, one prompt after the other.

  `questions` are their rows; `asked` the same for an environment.
  """
  return [
    Request(prompt, row, sample, step, limit, asked=question)
    for prompt, row, question in zip(
      prompts, questions, asked or [None] * len(prompts), strict=True
    )
    for sample in range(samples)
  ]


# ---- A sampler without a model ----


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
