"""Does replay of whole episodes beat GRPO on frozen lakes, small and large?

python -m studies run lake --workdir=/tmp/lake --parallel=2
python -m studies run lake:6 --workdir=/tmp/lake_6 --parallel=2

Question: does replay of whole episodes gain more than GRPO from the same number of generated
tokens?
There are two studies, each decided separately: `lake` has maps of 4 by 4. `lake:6` has maps of 6 by
6, where successes are rare at first.
Arms, maps, warm start and steps: as in `lake_rates`. Each arm uses the rate chosen there.
Primary measure: the mean of pass@1 on 200 held-out maps over the first 60 thousand generated
tokens. The environment's tokens do not count. Also reported: turns, distinct maps, and pass@1 after
the last step.
Refutation: if `revisit`, which draws the same maps without the stored episode, does as well, the
stored episode is not the reason for a gain.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 3
comparisons. An arm wins if the whole interval is above 0. The gain matters if the whole interval is
above .05.
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
