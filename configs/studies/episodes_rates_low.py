"""Two lower learning rates for `guess`, as the rule of study `episodes_rates` asks.

exgrpo study --study=episodes_rates_low --workdir=/tmp/episodes_rates_low --parallel=2

There most arms had their best mean at the lowest rate tried, 4e-4, so the next ones beyond are run
for all arms: 2e-4, and 1e-4 at once, which the rule would ask for next. Seeds, measure and all else
are those of `episodes_rates`; each arm takes the best of all six rates.
Written after the runs of `guess` in that study, before those at these rates.
"""

from exgrpo_jax.configs.studies.episodes_rates import ARMS, TOKENS, measure_of, start
from exgrpo_jax.studies.protocol import Study


def get_study():
  settings = {f'guess-{rate:g}': rate for rate in (1e-4, 2e-4)}
  return Study(
    config='guess',
    arms=ARMS,
    settings={
      name: {**start('guess', 200), 'optimizer.learning_rate': rate}
      for name, rate in settings.items()
    },
    seeds=(100, 101),
    baseline='grpo',
    measure=measure_of('guess', 200),
    smallest_difference=0.05,
    tokens=TOKENS['guess'],
  )
