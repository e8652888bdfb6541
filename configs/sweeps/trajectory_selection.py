r"""Vary which of a question's stored successes is replayed.

exgrpo sweep --sweep=trajectory_selection \
    --config=arithmetic --workdir=/tmp/trajectory_selection
18 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid(
    {
      'replay.trajectory_selection': [
        'lowest_entropy',
        'random',
        'highest_entropy',
        'lowest_perplexity',
        'highest_perplexity',
        'newest',
      ],
      'seed': range(3),
    }
  )
