"""ExGRPO and GRPO on larger frozen lakes: does the replay of whole episodes pay where few succeed?

exgrpo study --study=lake_large --workdir=/tmp/lake_large --parallel=2

Question: does the replay of whole episodes give more than GRPO for as many generated tokens, where
successes are rare at first?
Arms, maps, warm start and steps: those of `lake_rates_large`, maps of 6 by 6, each arm at the rate
chosen there, in `lake_rates_large_high` and in `lake_rates_large_higher`.
Primary measure: pass@1 on 200 held-out maps, its mean over the first 60 thousand generated tokens;
those of the environment are not counted. Beside it are reported turns, distinct maps, and pass@1
after the last step.
What would refute that the stored episode does it: `revisit`, the same maps without it, does as
well.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 3 comparisons.
An arm wins if all of it lies above 0, and by what matters if above .05.
Seeds: five others.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from exgrpo_jax.configs.studies.episodes_rates import ARMS
from exgrpo_jax.configs.studies.lake_rates import TOKENS, measure_of, start
from exgrpo_jax.studies.protocol import Study

RATES = {'grpo': 1.6e-3, 'exgrpo': 8e-4, 'revisit': 4e-4, 'normalised': 1.6e-3}


def get_study():
  return Study(
    config='lake',
    arms=ARMS,
    settings={'lake_6': start('6')},
    seeds=range(5),
    baseline='grpo',
    measure=measure_of('6'),
    smallest_difference=0.05,
    tokens=TOKENS,
    tuned={'lake_6': {arm: {'optimizer.learning_rate': rate} for arm, rate in RATES.items()}},
  )
