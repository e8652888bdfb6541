r"""Run the full method, and variants with one part removed.

exgrpo sweep --sweep=components \
    --config=arithmetic --workdir=/tmp/components
15 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.listed(
    {
      'exgrpo': {},
      'any_question': {'replay.question_selection': 'uniform'},
      'any_trajectory': {'replay.trajectory_selection': 'random'},
      'no_shaping': {'objective.shaping': 'none'},
      'no_replay': {'replay.ratio': 0.0},
    },
    {'seed': range(3)},
  )
