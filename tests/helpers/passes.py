"""How rows are packed into passes, where a test needs it another way."""

from unittest import mock

from exgrpo_jax import packing


def large():
  """A context: passes as large as the budget, in sequences of the longest row at any count."""
  return mock.patch.multiple(packing, _PASSES=1, _PAIRED=0, _GROUPED=0)
