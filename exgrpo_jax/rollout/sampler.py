"""The interface between the training loop and the samplers: requests in, responses out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from exgrpo_jax.datatypes import Question, Response

EMPTY_RESPONSE = Response(
  tokens=np.zeros(0, np.int32),
  logp=np.zeros(0, np.float32),
  entropy=np.zeros(0, np.float32),
  truncated=False,
  is_complete=False,
)


@dataclasses.dataclass(frozen=True)
class Request:
  """A request for one response.

  Sampling is seeded by step, question and sample, so the tokens don't depend on the other requests
  or their order.
  """

  prompt: np.ndarray  # [T] int32
  question: int  # the question's row in its data source
  sample: int  # index among the question's responses
  step: int  # the step that began the response
  limit: int  # maximum response tokens, including the end token
  prefix: Response = EMPTY_RESPONSE  # the tokens so far; empty unless the sampler can resume
  episode_question: Question | None = None  # the question, for an environment; None if single-turn
  # Index of an earlier request in this call that this request continues after an observation.
  follows: int | None = None
  past: tuple[np.ndarray, ...] = ()  # earlier responses to the question, to draft from


# Called with a request's index and its complete response. Returning True stops the sampler.
OnFinish = Callable[[int, Response], bool | None]


# Returns new requests as they become known, or None to stop the sampler. The argument is True if
# the sampler is idle. If more requests are expected, the callback then blocks until some arrive.
More = Callable[[bool], Sequence[Request] | None]


def ignore(_index: int, _response: Response) -> None:
  """Ignore a finished response: an `OnFinish` callback that never stops early."""


def nothing_more(_is_idle: bool) -> Sequence[Request]:
  """Return no requests: a `More` callback that never adds requests."""
  return ()


class Sampler(Protocol):
  """A generator of responses, such as `SlotEngine` (scheduler.py) or `EpisodeSampler`."""

  def generate(
    self, params: Any, requests: Sequence[Request], on_finish: OnFinish = ignore
  ) -> tuple[list[Response], dict[str, float]]:
    """Return one response per request, in request order, and metrics.

    Args:
      params: the policy's parameters in the decode layout (`model.decode_layout`).
      requests: one per response; requests with equal prompts should be adjacent.
      on_finish: called when a response finishes, while others are still being decoded. Once it
        returns True, unfinished responses are returned incomplete.
    """
    ...


def requests_for(
  prompts: Sequence[np.ndarray],
  questions: Sequence[int],
  samples: int,
  step: int,
  limit: int,
  episode_questions: Sequence[Question] = (),
) -> list[Request]:
  """Build `samples` requests for each prompt, in prompt order.

  `questions` contains the row number of each prompt's question. `episode_questions` are the
  questions themselves, which environments need.
  """
  return [
    Request(prompt, row, sample, step, limit, episode_question=question)
    for prompt, row, question in zip(
      prompts, questions, episode_questions or [None] * len(prompts), strict=True
    )
    for sample in range(samples)
  ]
