"""Which way a metric should go, and so which of a run's values is its best."""

import math
import re
from collections.abc import Iterable

_FALLING = re.compile(
  r'(.+/)?(truncated|wrong|no_answer|timed_out|crashed|zero_variance|skipped_updates|loss'
  r'|solved_by_none)'
)


def falls(name: str) -> bool:
  """Whether less of the metric is better, as of 'eval/gsm8k/truncated'."""
  return _FALLING.fullmatch(name) is not None


def best(name: str, values: Iterable[float]) -> float:
  """The highest finite value, of a metric that should fall the lowest; NaN if there is none."""
  finite = filter(math.isfinite, values)
  return min(finite, default=math.nan) if falls(name) else max(finite, default=math.nan)
