"""Does replay hold up a weak policy at half the rate of study `collapse`?

exgrpo study --study=collapse_lower --workdir=/tmp/collapse_lower --parallel=2

Question, arms, start, seeds, measure, what would refute it and when it stops: those of `collapse`.
There the learning rate is 8e-4, four times GRPO's best; here it is 4e-4, at which in the search
some runs of most arms took off and others did not.
"""

from exgrpo_jax.configs.studies import collapse


def get_study():
  return collapse.get_study(learning_rate=4e-4)
