r"""Which questions are replayed: half-solved ones above all, by other weights, or any alike.

exgrpo sweep --sweep=question_selection \
    --config=arithmetic --workdir=/tmp/question_selection
15 runs of up to ten minutes on two cores; not yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid(
    {
      'replay.question_selection': ['gaussian', 'linear', 'linear_clip', 'square_root', 'uniform'],
      'seed': range(3),
    }
  )
