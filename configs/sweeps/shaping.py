r"""Replayed rows weigh f(w) = w / (w + beta), or their importance ratio w as it is.

exgrpo sweep --sweep=shaping \
    --config=arithmetic --workdir=/tmp/shaping
6 runs of up to ten minutes on two cores; not yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'objective.shaping': ['policy_shaping', 'none'], 'seed': range(3)})
