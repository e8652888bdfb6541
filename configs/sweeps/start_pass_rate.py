r"""Vary the pass rate that a step must exceed before replay starts.

exgrpo sweep --sweep=start_pass_rate \
    --config=arithmetic --workdir=/tmp/start_pass_rate
The paper's value is 0.35. With 0, the first success starts replay. The warm start of arithmetic
ends with a quarter of the answers correct, which is above the first two values.
12 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'replay.start_pass_rate': [0.0, 0.2, 0.35, 0.5], 'seed': range(3)})
