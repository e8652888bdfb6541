r"""The method whole, and with one part at a time taken out.

exgrpo sweep --sweep=components \
    --config=arithmetic --workdir=/tmp/components
15 runs of up to ten minutes on two cores; not yet run as a whole.
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
