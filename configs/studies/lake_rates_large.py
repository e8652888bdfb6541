"""The learning rates of study `lake_large`, chosen on seeds that it does not report.

exgrpo study --study=lake_rates_large --workdir=/tmp/lake_rates_large --parallel=2

Question: which learning rate suits each arm on the largest lake, where successes are rare at first?
All else is as in `lake_rates`, but for the maps: 6 by 6, in at most 12 turns, with pass@1 .02 after
the warm start.
Looked at before: GRPO at 8e-4, seed 200: .03 at first, .22 after 40 steps, .075 after 60.
"""

from exgrpo_jax.configs.studies import lake_rates


def get_study():
  return lake_rates.get_study('6')
