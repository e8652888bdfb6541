"""Which cases of a test README's command runs, and which the full tier adds."""

import pytest


def full_after_first(cases):
  """Return the cases for `parametrize`; all but the first are marked `full`."""
  first, *others = cases
  return [first, *map(_marked, others)]


def _marked(case):
  if hasattr(case, 'marks'):  # made by pytest.param
    return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.full))
  return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
