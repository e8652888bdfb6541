"""Does replay with stored rows at full weight beat GRPO from a weak start? Sixteen other seeds.

python -m studies run replay_pays_again --workdir=/tmp/replay_pays_again --parallel=2

Question: does replay with normalized slopes gain more than GRPO from the two weak starts of study
`replay_pays`? That study left this undecided. Over 8 seeds, the gain was +.027 from `rare` and
+.125 from `weak`. The intervals extended .03 and .17 to either side, because they were corrected
for 40 comparisons.
Chosen after looking at these results: the two starts and the arm. No seed of that study is used.
Arms, at the rates of `replay_pays`: grpo, exgrpo (as in the paper, unclipped), exgrpo_clipped,
revisit, normalised. From `weak`, normalised had twice GRPO's rate. So there is also grpo_faster:
GRPO at 4e-4, and from `rare` at 2e-4.
Refutation: if revisit, which draws the same questions without the stored row, or GRPO at either
rate does as well, the stored row is not the reason for the gain. If exgrpo_clipped does as well,
the row's slope does not matter. It differs from normalised only in the slope (from `weak` also in
the rate).
Primary measure: as in `replay_pays`, the mean of pass@1 on 500 held-out questions of the same kind
over the first 380 and 220 thousand generated tokens.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 10
comparisons. An arm wins from a start if the whole interval is above 0. The gain matters if the
whole interval is above .05.
Seeds: 16. With the standard deviations of `replay_pays`, .02 from `rare` and .13 from `weak`, an
interval extends .02 and .11 to either side.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols.replay_pays import RATES
from studies.protocols.replay_pays_rates import ARMS, STARTS, TOKENS, measure_of

_STARTS = ('rare', 'weak')
_AGAIN = ('grpo', 'exgrpo', 'exgrpo_clipped', 'revisit', 'normalised')
_FASTER = {'rare': 2e-4, 'weak': 4e-4}


def get_study():
  rates = {
    start: {**{arm: RATES[start][arm] for arm in _AGAIN}, 'grpo_faster': _FASTER[start]}
    for start in _STARTS
  }
  return Study(
    config='chains_from_scratch',
    arms={**{arm: ARMS[arm] for arm in _AGAIN}, 'grpo_faster': ARMS['grpo']},
    settings={start: STARTS[start] for start in _STARTS},
    seeds=range(20, 36),
    baseline='grpo',
    measure={start: measure_of(start) for start in _STARTS},
    smallest_difference=0.05,
    tokens={start: TOKENS[start] for start in _STARTS},
    takes_off=0.2,
    align_every={start: STARTS[start]['num_steps'] // 5 for start in _STARTS},
    tuned={
      start: {arm: {'optimizer.learning_rate': rate} for arm, rate in of_arms.items()}
      for start, of_arms in rates.items()
    },
  )
