"""The sampler's log-probabilities beside the trainer's: how far they differ, and which are used."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from exgrpo_jax.algorithm import terms
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Response
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Config:
  """How far the sampler's log-probabilities may be from the trainer's."""

  every: int = setting('[1, inf)', 'steps between comparisons; the first step always has one')
  rows: int = setting('[1, inf)', 'responses that are compared')
  max: float = setting(
    '(0, inf)', 'largest difference of any token, in nats; beyond it the run stops'
  )


def differences(trainer: Iterable[np.ndarray], responses: Iterable[Response]) -> dict[str, float]:
  """Mean and largest absolute difference over all tokens, in nats, as metrics.

  `trainer` are the trainer's log-probabilities [T] of each response, in the same order.
  """
  gap = np.abs(np.concatenate([t - response.logp for t, response in zip(trainer, responses)]))
  return {'parity/mean': float(gap.mean()), 'parity/max': float(gap.max())}


def check(config: Config, step: int, measured: Mapping[str, float]) -> None:
  """InputError where the `differences` of a step are too large, or not a number."""
  largest = measured['parity/max']
  if not largest <= config.max:
    raise InputError(
      f"step {step}: the sampler's log-probabilities differ from the trainer's by up to "
      f'{largest:.2g} nats (mean {measured["parity/mean"]:.2g}), more than '
      f'config.parity.max={config.max}, so importance weights would be wrong. Raise the '
      'limit if the model computes in bfloat16 and this is rounding, or set '
      "config.objective.old_logprobs='recompute'."
    )


def recomputed(
  responses: Sequence[Sequence[Response]], trainer: Iterable[np.ndarray], tis_limit: float
) -> list[list[Response]]:
  """The responses with the trainer's log-probabilities, one after the other.

  Where `tis_limit` is above 0, with the weights of truncated importance sampling too.
  """
  logps = iter(trainer)

  def with_trainers(response: Response) -> Response:
    logp = next(logps)
    weight = terms.tis_weight(logp, response.logp, tis_limit) if tis_limit else None
    return dataclasses.replace(response, logp=logp, tis_weight=weight)

  return [[with_trainers(response) for response in group] for group in responses]
