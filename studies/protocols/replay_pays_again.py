"""Does replay with stored rows at full weight beat GRPO from a weak start? Sixteen other seeds.

python -m studies run replay_pays_again --workdir=/tmp/replay_pays_again --parallel=2

Question: study `replay_pays` left undecided if slope-normalised replay gives more than GRPO from
its two weak starts. Over 8 seeds it gained +.027 from `rare` and +.125 from `weak`, with intervals
of .03 and .17 to either side, which are wide because they are corrected for 40 comparisons. Does it
give more?
Chosen after looking at these results: the two starts and the arm. No seed of that study is used.
Arms, at the rates of `replay_pays`: grpo, exgrpo (the paper's, unclipped), exgrpo_clipped, revisit,
normalised. From `weak`, normalised had twice GRPO's rate, so there is also grpo_faster: GRPO at
4e-4, and from `rare` at 2e-4.
Refuted: that the stored row gives the gain, if revisit, which draws the same questions without it,
or GRPO at one of two rates does as well; that the row's slope matters, if exgrpo_clipped does as
well, which differs from normalised only in the slope (from `weak` also in the rate).
Primary measure: as in `replay_pays`, pass@1 on 500 held-out questions of the same kind, its mean
over the first 380 and 220 thousand generated tokens.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 10
comparisons. An arm wins at a start if the whole interval is above 0, and by an amount that matters
if it is above .05.
Seeds: 16. With the standard deviations of `replay_pays`, .02 from `rare` and .13 from `weak`, such
an interval is .02 and .11 to either side.
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
