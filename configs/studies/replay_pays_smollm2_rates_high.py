"""Twice the highest rate of `replay_pays_smollm2_rates`, which was the best of two arms there.

exgrpo study --study=replay_pays_smollm2_rates_high --workdir=/tmp/replay_pays_smollm2_rates_high \
    --parallel=2

Question: is 8e-5 better than 4e-5, for `revisit`, `normalised` and `normalised_hardest`?
Known when this was written: at 1e-5, 2e-5 and 4e-5 `revisit` has .049, .084 and .088, `normalised`
.073, .093 and .118, and `normalised_hardest` .054 and .020 at the first two. GRPO and ExGRPO, whose
grid goes from 5e-6 to 4e-5, had .052 and .017 at 4e-5 and more below it.
Setting, measure, seeds and rule are those of that study; 8e-5 joins its grid.
Stopping rule: every run takes 30 steps, and no run is left out.
"""

import dataclasses

from exgrpo_jax.configs.studies import replay_pays_smollm2_rates
from exgrpo_jax.configs.studies.replay_pays_rates import ARMS
from exgrpo_jax.configs.studies.replay_pays_smollm2_rates import CHOSEN


def get_study(rate=8e-5):
  arms = {f'{arm}_{rate:g}': {**ARMS[arm], 'optimizer.learning_rate': rate} for arm in CHOSEN}
  return dataclasses.replace(
    replay_pays_smollm2_rates.get_study(), arms=arms, baseline=f'normalised_{rate:g}'
  )
