r"""How much of a step is replayed; 0 is plain GRPO.

exgrpo sweep --sweep=ratio \
    --config=arithmetic --workdir=/tmp/ratio
12 runs of up to ten minutes on two cores. docs/results.md has the two ends, 0 and 0.5, from runs of
their own; this sweep has not been run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'replay.ratio': [0.0, 0.25, 0.5, 0.75], 'seed': range(3)})
