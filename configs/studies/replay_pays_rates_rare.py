"""A lower learning rate for the start `rare` of study `replay_pays_rates`, whose rule asks for it.

exgrpo study --study=replay_pays_rates_rare --workdir=/tmp/replay_pays_rates_rare --parallel=2

Question: from this start most arms of that study were best at 1e-4, the lowest of its grid; are
they at half of it? Arms, start, measure, seeds and rule are those of that study; 5e-5 joins its
grid.
Primary measure: as there, pass@1 on 500 held-out questions, its mean over the first 380 thousand
generated tokens.
Stopping rule: every run takes all of its steps, and no run is left out.
"""

from exgrpo_jax.configs.studies.replay_pays_rates import ARMS, STARTS, TOKENS, measure_of
from exgrpo_jax.studies.protocol import Study


def get_study():
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={'rare-5e-05': {**STARTS['rare'], 'optimizer.learning_rate': 5e-5}},
    seeds=(100, 101),
    baseline='grpo',
    measure=measure_of('rare'),
    smallest_difference=0.05,
    tokens=TOKENS['rare'],
  )
