"""How much of a GPU's memory JAX takes when it starts."""

import os

# Of the whole. JAX's own choice, three quarters, leaves 6 GB of a card of 24 GB to nobody; the rest
# is for CUDA, its libraries and a screen.
SHARE = 0.9

_CHOSEN = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')


def take_share() -> None:
  """Has JAX take SHARE, where the environment does not say how much.

  To be called before JAX looks for devices.
  """
  if not any(name in os.environ for name in _CHOSEN):
    os.environ[_CHOSEN[0]] = str(SHARE)
