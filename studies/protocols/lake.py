"""Does replay of whole episodes beat GRPO on frozen lakes, small and large?

python -m studies run lake --workdir=/tmp/lake --parallel=2
python -m studies run lake:6 --workdir=/tmp/lake_6 --parallel=2

Question: does replay of whole episodes give more than GRPO for the same generated tokens?
Two studies, each decided separately: `lake`, maps of 4 by 4; and `lake:6`, maps of 6 by 6, where
successes are rare at first.
Arms, maps, warm start and steps: as in `lake_rates`, each arm at the rate chosen there.
Primary measure: pass@1 on 200 held-out maps, its mean over the first 60 thousand generated tokens.
The environment's tokens do not count. Also reported: turns, distinct maps, and pass@1 after the
last step.
Refuted, if `revisit`, the same maps without the stored episode, does as well.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 3 comparisons.
An arm wins if the whole interval is above 0, and by an amount that matters if it is above .05.
Seeds: five others.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols.episodes_rates import ARMS
from studies.protocols.lake_rates import TOKENS, measure_of, start

RATES = {
  '4': {'grpo': 8e-4, 'exgrpo': 4e-4, 'revisit': 4e-4, 'normalised': 1.6e-3},
  '6': {'grpo': 1.6e-3, 'exgrpo': 8e-4, 'revisit': 4e-4, 'normalised': 1.6e-3},
}


def get_study(side='4'):
  rates = {arm: {'optimizer.learning_rate': rate} for arm, rate in RATES[side].items()}
  return Study(
    config='lake',
    arms=ARMS,
    settings={f'lake_{side}': start(side)},
    seeds=range(5),
    baseline='grpo',
    measure=measure_of(side),
    smallest_difference=0.05,
    tokens=TOKENS,
    tuned={f'lake_{side}': rates},
  )
