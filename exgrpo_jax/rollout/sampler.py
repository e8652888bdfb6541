"""The interface between the loop and the samplers: requests in, responses out."""

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
  """A request for one response.

  Its tokens are seeded by step, question and sample, so they depend neither on the other requests
  nor on the order.
  """

  prompt: np.ndarray  # [T] int32
  question: int  # row in its data source
  sample: int  # which of the question's responses
  step: int  # the step in which the response began
  limit: int  # longest response, in tokens, the end token included
  begun: Response = UNBEGUN  # its tokens so far; only a sampler that resumes accepts any
  asked: Question | None = None  # for an environment; None for a single turn
  # Index of a request in the same call. This one begins with its tokens and an observation.
  follows: int | None = None
  past: tuple[np.ndarray, ...] = ()  # earlier responses to the question, to draft from


# Called with a request's index and its complete response. True stops the sampler.
OnFinish = Callable[[int, Response], bool | None]


# Returns further requests as they become known; None stops the sampler. Its argument says whether
# nothing else is left to do. It then waits for requests if any are to come.
More = Callable[[bool], Sequence[Request] | None]


def ignore(_index: int, _response: Response) -> None:
  """Ignore a finished response: an `OnFinish` callback that never stops early."""


def nothing_more(_is_idle: bool) -> Sequence[Request]:
  """Return no requests: a `More` callback that never adds any."""
  return ()


class Sampler(Protocol):
  """A writer of responses: the slot engine (scheduler.py) or `ScriptedSampler`."""

  def generate(
    self, params: Any, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """Return the response to each request, in order, and metrics.

    Args:
      params: the policy's, in the decode layout (`model.decode_layout`).
      requests: the responses to write; equal prompts should follow one another.
      on_finish: called as responses finish, while others are still being written. Once it returns
        True, unfinished responses are returned incomplete.
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
  """Request `samples` responses to each prompt, one prompt after the other.

  `questions` are the prompts' rows. `asked` are the questions themselves, for an environment.
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
  """A `Sampler` that writes the tokens of `script`, one response after the other."""

  script: Callable[[Request], Sequence[int] | np.ndarray]  # the tokens of a response
  logp: float = 0.0  # of each token, in nats

  def generate(
    self, params: Any, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """See `Sampler.generate`. Tokens beyond a request's limit are cut off."""
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
