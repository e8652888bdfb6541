r"""Vary the measure of a question's difficulty: few successes, a long text or long responses.

exgrpo sweep --sweep=difficulty_metric \
    --config=arithmetic --workdir=/tmp/difficulty_metric
9 runs of up to ten minutes on two cores. The whole sweep has not been run yet.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid(
    {'replay.bucket_by': ['correctness', 'question_length', 'response_length'], 'seed': range(3)}
  )
