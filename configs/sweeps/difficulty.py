r"""Train on-policy with only easy, medium or hard questions, judged by their groups' correctness.

exgrpo sweep --sweep=difficulty \
    --config=arithmetic --workdir=/tmp/difficulty
12 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
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
