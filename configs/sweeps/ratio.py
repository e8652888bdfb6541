r"""Vary the fraction of replayed questions in a step; 0 is plain GRPO.

exgrpo sweep --sweep=ratio \
    --config=arithmetic --workdir=/tmp/ratio
12 runs of up to ten minutes on two cores. The whole sweep has not been run yet. For separate
runs with 0 and 0.5, see docs/results.md.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'replay.ratio': [0.0, 0.25, 0.5, 0.75], 'seed': range(3)})
