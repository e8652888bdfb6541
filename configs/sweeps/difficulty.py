r"""On-policy training on easy, medium or hard questions alone, by their group's correctness.

exgrpo sweep --sweep=difficulty \
    --config=arithmetic --workdir=/tmp/difficulty
12 runs of up to ten minutes on two cores; not yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid(
    {
      'replay.difficulty': ['all', 'easy', 'medium', 'hard'],
      'replay.ratio': [0.0],
      'seed': range(3),
    }
  )
