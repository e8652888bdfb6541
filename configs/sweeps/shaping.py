r"""Weight replayed rows by f(w) = w / (w + beta), or by their importance ratio w.

exgrpo sweep --sweep=shaping \
    --config=arithmetic --workdir=/tmp/shaping
6 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'objective.shaping': ['policy_shaping', 'none'], 'seed': range(3)})
