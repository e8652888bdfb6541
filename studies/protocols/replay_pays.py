"""When does replay beat GRPO? Eleven ways of using the past, or not using it, from four starts.

python -m studies run replay_pays --workdir=/tmp/replay_pays --parallel=2

Question: does any way of replaying past successes give more pass@1 than GRPO for the same generated
tokens? From which starts, and which part of the method causes it?
Arms and starts: as in study `replay_pays_rates`, which describes them. Two arms could refute a gain
from the stored row: `revisit`, which draws the same questions without it, and `zero`, which has the
row without weight. `grpo_unclipped` could refute a gain of the paper's ExGRPO over GRPO, because
the paper's ExGRPO has no clip and its GRPO has one.
Learning rate: for each arm and start the best of one grid, chosen by study `replay_pays_rates` on
two seeds that are not in this study.
Primary measure: pass@1 on 500 held-out questions of the same kind, its mean over the first 380,
220, 200 and 150 thousand generated tokens, which is the area under its curve. Also in the tables
and results.csv: pass@1 at the last evaluation, runs that reach .2 and the tokens until then,
distinct questions, entropy, the share of solutions whose steps are all valid, and at every fifth of
a run the alignment of the gradients of its parts with the gradient of 32 held-out questions.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 40
comparisons. An arm wins at a start if the whole interval is above 0, and by an amount that matters
if it is above .05.
Seeds: 8, none of them used for the rates or in study `collapse`. On the two seeds of the rates,
differences to GRPO at an arm's own rate had standard deviations of .01 to .06. Then such an
interval is .02 to .11 to either side, so an effect of .05 may stay undecided. A study of fewer arms
can decide what is found here and left undecided.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols.replay_pays_rates import ARMS, STARTS, TOKENS, measure_of

RATES = {
  'rare': {
    'grpo': 1e-4,
    'grpo_unclipped': 1e-4,
    'exgrpo': 1e-4,
    'exgrpo_clipped': 1e-4,
    'released': 1e-4,
    'revisit': 2e-4,
    'zero': 1e-4,
    'balanced': 1e-4,
    'normalised': 1e-4,
    'normalised_hardest': 2e-4,
    'fifo': 1e-4,
  },
  'weak': {
    'grpo': 2e-4,
    'grpo_unclipped': 2e-4,
    'exgrpo': 2e-4,
    'exgrpo_clipped': 2e-4,
    'released': 2e-4,
    'revisit': 2e-4,
    'zero': 2e-4,
    'balanced': 2e-4,
    'normalised': 4e-4,
    'normalised_hardest': 4e-4,
    'fifo': 2e-4,
  },
  'modest': {
    'grpo': 4e-4,
    'grpo_unclipped': 4e-4,
    'exgrpo': 4e-4,
    'exgrpo_clipped': 4e-4,
    'released': 4e-4,
    'revisit': 4e-4,
    'zero': 4e-4,
    'balanced': 4e-4,
    'normalised': 4e-4,
    'normalised_hardest': 4e-4,
    'fifo': 4e-4,
  },
  'control': {
    'grpo': 4e-4,
    'grpo_unclipped': 2e-4,
    'exgrpo': 2e-4,
    'exgrpo_clipped': 4e-4,
    'released': 2e-4,
    'revisit': 4e-4,
    'zero': 4e-4,
    'balanced': 4e-4,
    'normalised': 4e-4,
    'normalised_hardest': 4e-4,
    'fifo': 2e-4,
  },
}


def get_study():
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings=STARTS,
    seeds=range(10, 18),
    baseline='grpo',
    measure={name: measure_of(name) for name in STARTS},
    smallest_difference=0.05,
    tokens=TOKENS,
    takes_off=0.2,
    align_every={name: start['num_steps'] // 5 for name, start in STARTS.items()},
    tuned={
      start: {arm: {'optimizer.learning_rate': rate} for arm, rate in of_arms.items()}
      for start, of_arms in RATES.items()
    },
  )
