r"""Which questions are replayed: half-solved ones above all, or any alike.

python -m exgrpo_jax.sweep --sweep=question_selection \
    --config=arithmetic --workdir=/tmp/question_selection
6 runs of up to ten minutes on two cores; not yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'replay.question_selection': ['gaussian', 'uniform'], 'seed': range(3)})
