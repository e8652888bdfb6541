"""When does replay beat GRPO? Eleven ways of using past responses or not, from four starts.

python -m studies run replay_pays --workdir=/tmp/replay_pays --parallel=2

Question: does any way of replaying past successes reach a higher pass@1 than GRPO with the same
number of generated tokens? From which starts, and which part of the method causes it?
Arms and starts: as in study `replay_pays_rates`, which describes them. Two arms could refute that a
gain comes from the stored row: `revisit` draws the same questions without the row, and `zero` gives
the row no weight. `grpo_unclipped` could refute a gain of the paper's ExGRPO over GRPO, because the
paper's ExGRPO has no clip and its GRPO has one.
Learning rate: the best rate of a grid for each arm and start. Study `replay_pays_rates` chose it on
two seeds that this study does not use.
Primary measure: the mean of pass@1 on 500 held-out questions of the same kind over the first 380,
220, 200 and 150 thousand generated tokens, which is the area under the curve. The tables and
results.csv also contain pass@1 at the last evaluation, the runs that reach .2 and their tokens
until then, distinct questions, entropy, and the share of solutions whose steps are all valid. At
every fifth of a run, they contain the alignment of the gradients of a step's parts with the
gradient of 32 held-out questions.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 40
comparisons. An arm wins from a start if the whole interval is above 0. The gain matters if the
whole interval is above .05.
Seeds: 8, none of them used for the rates or in study `collapse`. On the two seeds of the rates,
differences from GRPO at an arm's own rate had standard deviations of .01 to .06. An interval then
extends .02 to .11 to either side, so an effect of .05 may stay undecided. A study with fewer arms
can decide what this study finds but leaves undecided.
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
