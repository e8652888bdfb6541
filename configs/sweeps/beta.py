r"""Vary the policy-shaping constant; smaller values give rare replayed tokens more weight.

exgrpo sweep --sweep=beta \
    --config=arithmetic --workdir=/tmp/beta
The paper's value is 0.1. The others, a factor of about 3 apart, are ours.
12 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'objective.beta': [0.03, 0.1, 0.3, 1.0], 'seed': range(3)})
