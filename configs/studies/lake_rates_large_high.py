"""A higher learning rate on the largest lake, as the rule of study `lake_rates_large` asks.

exgrpo study --study=lake_rates_large_high --workdir=/tmp/lake_rates_large_high --parallel=2

There every arm but `revisit` had its best mean at the highest rate tried, 8e-4, so the next one
beyond is run for all arms: 1.6e-3. All else is as in `lake_rates_large`; each arm takes the best of
all five rates.
Written after the runs of that study, before those at this rate.
"""

import dataclasses

from exgrpo_jax.configs.studies import lake_rates, lake_rates_large


def get_study():
  settings = {'6-0.0016': {**lake_rates.start('6'), 'optimizer.learning_rate': 1.6e-3}}
  return dataclasses.replace(lake_rates_large.get_study(), settings=settings)
