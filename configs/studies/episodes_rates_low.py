"""Two lower learning rates in each environment, as the rule of study `episodes_rates` asks.

exgrpo study --study=episodes_rates_low --workdir=/tmp/episodes_rates_low --parallel=2

There most arms had their best mean at the lowest rate tried, in `guess` 4e-4 and in `calculator`
2e-4, so the next ones beyond are run for all arms: half of it, and a quarter at once, which the
rule might ask for next. Seeds, measure and all else are those of `episodes_rates`; each arm takes
the best of all six rates.
Written after the runs of that study up to `calculator` at 4e-4, before those at these rates.
"""

from exgrpo_jax.configs.studies.episodes_rates import ARMS, TOKENS, measure_of, start
from exgrpo_jax.studies.protocol import Study

_RATES = {'guess': (1e-4, 2e-4), 'calculator': (5e-5, 1e-4)}


def get_study():
  settings = {f'{name}-{rate:g}': (name, rate) for name in _RATES for rate in _RATES[name]}
  return Study(
    config='guess',
    arms=ARMS,
    settings={
      setting: {**start(name, 200), 'optimizer.learning_rate': rate}
      for setting, (name, rate) in settings.items()
    },
    seeds=(100, 101),
    baseline='grpo',
    measure={setting: measure_of(name, 200) for setting, (name, _) in settings.items()},
    smallest_difference=0.05,
    tokens={setting: TOKENS[name] for setting, (name, _) in settings.items()},
  )
