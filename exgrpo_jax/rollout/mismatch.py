"""Sampler–trainer mismatch: how far log-probabilities differ, and which of them are used."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from exgrpo_jax.algorithm import losses
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Response
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class LogprobCheckConfig:
  """Sampler–trainer mismatch: how far their log-probabilities may be apart."""

  every: int = setting(50, '[1, inf)', 'steps between comparisons; the first step always has one')
  rows: int = setting(64, '[1, inf)', 'responses that are compared')
  max: float = setting(
    1.0,
    '(0, inf)',
    'largest difference of any token, in nats; beyond it the run stops; 1 suits bfloat16, and '
    'float32 keeps within 1e-4',
  )


def differences(
  trainer: Iterable[np.ndarray], responses: Iterable[Response], step: int = 0
) -> dict[str, float]:
  """Compute the mean and largest absolute difference over the tokens of `step`, in nats.

  Returns them as metrics. `trainer` has the trainer's log-probabilities [T] of each response, in
  the same order.
  """
  gaps = []
  for logp, response in zip(trainer, responses):
    new = slice(response.tokens_before(step), None)
    gaps.append((logp - response.logp)[new][response.own[new]])
  gap = np.abs(np.concatenate(gaps))
  return {
    'rollout_mismatch/logprob_mean': float(gap.mean()),
    'rollout_mismatch/logprob_max': float(gap.max()),
  }


def check(config: LogprobCheckConfig, step: int, measured: Mapping[str, float]) -> None:
  """Raise InputError if the `differences` of a step are too large or not a number."""
  largest = measured['rollout_mismatch/logprob_max']
  if not largest <= config.max:
    raise InputError(
      f"step {step}: the sampler's log-probabilities differ from the trainer's by up to "
      f'{largest:.2g} nats (mean {measured["rollout_mismatch/logprob_mean"]:.2g}), more than '
      f'config.logprob_check.max={config.max}, so importance weights would be wrong. Raise the '
      'limit if the model computes in bfloat16 and this is rounding, or set '
      "config.objective.old_logprobs='recompute'."
    )


def recomputed(
  responses: Sequence[Sequence[Response]],
  trainer: Iterable[np.ndarray],
  tis_limit: float,
  step: int,
) -> list[list[Response]]:
  """Replace the log-probabilities of the tokens that `step` wrote by the trainer's.

  If `tis_limit` is above 0, also add the weights of truncated importance sampling. `trainer` has
  the log-probabilities [T] of each response that has such tokens, one after the other.
  """
  logps = iter(trainer)

  def with_trainers(response: Response) -> Response:
    start = response.tokens_before(step)
    if start == len(response.tokens):
      return response
    logp, weight = (next(logps) * response.own)[start:], None
    if tis_limit:
      earlier = [] if response.tis_weight is None else [response.tis_weight]
      weight = np.concatenate([*earlier, losses.tis_weight(logp, response.logp[start:], tis_limit)])
    whole = np.concatenate([response.logp[:start], logp])
    return dataclasses.replace(response, logp=whole, tis_weight=weight)

  return [[with_trainers(response) for response in group] for group in responses]
