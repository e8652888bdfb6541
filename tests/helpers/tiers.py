"""Which cases of a test README's command runs, and which the full tier adds."""

from collections.abc import Iterable
from typing import Any

import pytest


def full_after_first(cases: Iterable[Any]) -> list[Any]:
  """Return the cases for `parametrize`; all but the first are marked `full`."""
  first, *others = cases
  return [first, *(_marked(case) for case in others)]


def _marked(case: Any) -> Any:
  values = case if isinstance(case, tuple) else (case,)
  return pytest.param(*values, marks=pytest.mark.full)
