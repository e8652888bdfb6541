"""Response lengths for estimating a step's time: lognormal, or sampled from a run."""

import math
import os
import pathlib
import re

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records

_NORMAL_99 = 2.3263  # the 99th percentile of the standard normal distribution
_SPREAD = 8  # the 99th percentile of the lengths divided by their median

_ALLOWED = (
  'lognormal:MEDIAN or lognormal:MEDIAN,LIMIT in tokens, such as lognormal:1000,8192, or the '
  'workdir of a run with recorded responses'
)


def draw(spec: str, count: int, limit: int) -> np.ndarray:
  """Draw `count` response lengths in tokens, int [count]; every call returns the same lengths.

  `spec` may be 'lognormal:MEDIAN' or 'lognormal:MEDIAN,LIMIT': a distribution whose mean is
  1.5 * MEDIAN and whose 99th percentile is 8 * MEDIAN (before truncation). It may also be a run's
  workdir: lengths are then sampled with replacement from the responses that the run has generated.
  '' means a lognormal distribution whose median is `limit` / 8. Responses are truncated at `limit`
  tokens; the LIMIT in `spec` may be lower. Raises InputError if `spec` has none of these forms, or
  if the run has no records.
  """
  rng = np.random.default_rng(0)
  if lognormal := _parse(spec, limit):
    median, limit = lognormal
    normal = rng.normal(size=count)
    samples = np.round(median * np.exp(math.log(_SPREAD) / _NORMAL_99 * normal))
  else:
    samples = rng.choice(_read_lengths(spec), size=count)
  return np.clip(samples.astype(int), 1, limit)


def describe(spec: str, limit: int) -> str:
  """Return a phrase that describes where the lengths come from."""
  if not (lognormal := _parse(spec, limit)):
    return f'drawn from the generated responses of {spec}'
  median, limit = lognormal
  return f'lognormal, median {median:,.0f}, 99th percentile {_SPREAD} medians, limit {limit:,}'


def _parse(spec: str, limit: int) -> tuple[float, int] | None:
  """Return (median, limit) for '' or 'lognormal:…'; None for other specs."""
  if not spec:
    return limit / _SPREAD, limit
  if spec.partition(':')[0] != 'lognormal':
    return None
  match = re.fullmatch(r'lognormal:([1-9]\d*)(?:,([1-9]\d*))?', spec)
  if not match:
    raise InputError(f'--lengths={spec}: the value must be {_ALLOWED}.')
  spec_limit = int(match[2] or limit)
  if spec_limit > limit:
    raise InputError(
      f'--lengths={spec}: the limit exceeds config.rollout.max_response={limit}, the length at '
      'which responses are truncated. Lower the limit.'
    )
  return int(match[1]), spec_limit


def _read_lengths(workdir: str) -> np.ndarray:
  """Read the lengths of all responses that a run has generated."""
  if not os.path.isdir(pathlib.Path(workdir) / step_records.FOLDER):
    raise InputError(
      f'--lengths={workdir}: this folder contains no {step_records.FOLDER}/. The value must be '
      f'{_ALLOWED}.'
    )
  responses = step_records.read(workdir).responses
  generated_lengths = responses['length'].to_numpy()[~responses['is_replay'].to_numpy()]
  if not len(generated_lengths):
    raise InputError(
      f'--lengths={workdir}: the run has no recorded responses yet. Wait until its first '
      'step has finished.'
    )
  return generated_lengths
