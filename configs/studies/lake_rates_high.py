"""A higher learning rate on the small lake, as the rule of study `lake_rates` asks.

exgrpo study --study=lake_rates_high --workdir=/tmp/lake_rates_high --parallel=2

There GRPO had its best mean at the highest rate tried, 8e-4, so the next one beyond is run for all
arms: 1.6e-3. All else is as in `lake_rates`; each arm takes the best of all five rates.
Written after the runs of that study, before those at this rate.
"""

import dataclasses

from exgrpo_jax.configs.studies import lake_rates


def get_study():
  settings = {'4-0.0016': {**lake_rates.start('4'), 'optimizer.learning_rate': 1.6e-3}}
  return dataclasses.replace(lake_rates.get_study(), settings=settings)
