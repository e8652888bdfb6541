r"""Vary how replayed questions are drawn: mostly half-solved ones, by other weights, or uniformly.

exgrpo sweep --sweep=question_selection \
    --config=arithmetic --workdir=/tmp/question_selection
15 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid(
    {
      'replay.question_selection': ['gaussian', 'linear', 'linear_clip', 'square_root', 'uniform'],
      'seed': range(3),
    }
  )
