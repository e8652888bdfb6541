"""A still higher learning rate on the largest lake, as the rule of study `lake_rates_large` asks.

exgrpo study --study=lake_rates_large_higher --workdir=/tmp/lake_rates_large_higher --parallel=2

In `lake_rates_large_high` GRPO and `normalised` had their best means at 1.6e-3, so 3.2e-3 is run
for all arms. All else is as in `lake_rates_large`; each arm takes the best of all six rates.
Written after the runs of those studies, before those at this rate.
"""

import dataclasses

from exgrpo_jax.configs.studies import lake_rates, lake_rates_large


def get_study():
  settings = {'6-0.0032': {**lake_rates.start('6'), 'optimizer.learning_rate': 3.2e-3}}
  return dataclasses.replace(lake_rates_large.get_study(), settings=settings)
