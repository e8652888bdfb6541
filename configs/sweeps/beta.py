r"""The constant of policy shaping: the smaller, the more a rare replayed token is lifted.

exgrpo sweep --sweep=beta \
    --config=arithmetic --workdir=/tmp/beta
The paper's value is 0.1; the others, a factor of about 3 apart, are ours. 12 runs of up to ten
minutes on two cores; not yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'objective.beta': [0.03, 0.1, 0.3, 1.0], 'seed': range(3)})
