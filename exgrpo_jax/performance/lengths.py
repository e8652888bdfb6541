"""The lengths of responses for which a step's time is estimated: drawn, or those of a run."""

import math
import os
import pathlib
import re

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records

_NORMAL_99 = 2.3263  # the 99th percentile of the standard normal distribution
_SPREAD = 8  # that of lengths, in medians

_ALLOWED = (
  'lognormal:MEDIAN or lognormal:MEDIAN,LIMIT in tokens, such as lognormal:1000,8192, or the '
  'workdir of a run whose records are taken'
)


def draw(spec: str, count: int, limit: int) -> np.ndarray:
  """So many lengths in tokens, int [count], the same on every call; longer ones are cut at a limit.

  Args:
    spec: 'lognormal:MEDIAN' or 'lognormal:MEDIAN,LIMIT', whose 99th percentile before the cut is
      8 times the median and the mean 1.5 times; or a run's workdir, from whose generated responses
      they are drawn with replacement. '' has the median at an eighth of the limit.
    count: how many.
    limit: of a response, in tokens; that of `spec` may be lower.

  Raises:
    InputError: `spec` is none of these, or the run has no records.
  """
  rng = np.random.default_rng(0)
  name, _, numbers = spec.partition(':')
  if name == 'lognormal' or not spec:
    median, limit = _parse(spec, numbers, limit) if spec else (limit / _SPREAD, limit)
    normal = rng.normal(size=count)
    drawn = np.round(median * np.exp(math.log(_SPREAD) / _NORMAL_99 * normal))
  else:
    drawn = rng.choice(_of_run(spec), size=count)
  return np.clip(drawn.astype(int), 1, limit)


def describe(spec: str, limit: int) -> str:
  """Where the lengths are from, in words."""
  if spec and not spec.startswith('lognormal'):
    return f'drawn from the generated responses of {spec}'
  median, limit = _parse(spec, spec.partition(':')[2], limit) if spec else (limit / _SPREAD, limit)
  return f'lognormal of median {median:,.0f}, 99th percentile {_SPREAD} medians, cut at {limit:,}'


def _parse(spec: str, numbers: str, limit: int) -> tuple[int, int]:
  """(median, limit)."""
  if not re.fullmatch(r'[1-9]\d*(,[1-9]\d*)?', numbers):
    raise InputError(f'--lengths={spec} must be {_ALLOWED}.')
  median, own_limit = ([int(number) for number in numbers.split(',')] + [limit])[:2]
  if own_limit > limit:
    raise InputError(
      f'--lengths={spec}: its limit must be at most config.rollout.max_response={limit}, where '
      'responses end.'
    )
  return median, own_limit


def _of_run(workdir: str) -> np.ndarray:
  """The lengths of all responses that a run generated."""
  if not os.path.isdir(pathlib.Path(workdir) / step_records.FOLDER):
    raise InputError(
      f'--lengths={workdir} has no folder {step_records.FOLDER}: it must be {_ALLOWED}.'
    )
  responses = step_records.read(workdir).responses
  generated = responses['length'].to_numpy()[~responses['is_replay'].to_numpy()]
  if not len(generated):
    raise InputError(f'--lengths={workdir}: the run has no recorded response yet.')
  return generated
