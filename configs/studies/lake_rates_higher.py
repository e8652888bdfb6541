"""A still higher learning rate on the small lake, as the rule of study `lake_rates` asks.

exgrpo study --study=lake_rates_higher --workdir=/tmp/lake_rates_higher --parallel=2

In `lake_rates_high` arm `normalised` had its best mean at 1.6e-3, so 3.2e-3 is run for all arms.
All else is as in `lake_rates`; each arm takes the best of all six rates.
Written after the runs of that study, before those at this rate.
"""

import dataclasses

from exgrpo_jax.configs.studies import lake_rates


def get_study():
  settings = {'4-0.0032': {**lake_rates.start('4'), 'optimizer.learning_rate': 3.2e-3}}
  return dataclasses.replace(lake_rates.get_study(), settings=settings)
