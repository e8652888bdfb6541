"""Does replay beat GRPO on a language model? SmolLM2-135M-Instruct solves .02 of these sums.

python -m studies run replay_pays_smollm2 --workdir=/tmp/replay_pays_smollm2 --parallel=2

Question: if stored rows have the weight of fresh rows, does replay give a language model a higher
avg@4 than GRPO with the same number of generated tokens? At first, the model solves almost none of
the questions.
Setting: as in `replay_pays_smollm2_rates`, evaluated every ten steps.
Arms: `grpo`, and from `replay_pays_rates` the arms `exgrpo` (clipped here, like all arms),
`normalised` and `normalised_hardest`. Two arms could refute that a gain comes from the stored row:
`revisit` draws the same questions without it, and `grpo_same_rate` is GRPO at the rate of the
normalised arms.
Learning rate: for each arm, the best of 5e-6 to 4e-5 (`grpo`, `exgrpo`) or of 1e-5 to 8e-5 (the
others). `smollm2_rates` and `replay_pays_smollm2_rates` chose it on two seeds that this study does
not use. No chosen rate is at the edge of its grid.
Primary measure: the mean of avg@4 at temperature 1 on 74 held-out sums over the first 40 thousand
generated tokens, which is the area under the curve. Also reported: the last value, distinct
questions, and entropy.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 5
comparisons. An arm wins if the whole interval is above 0. The gain matters if the whole interval is
above .05.
Seeds: 3, none of them used before. In study `smollm2`, differences from GRPO over five seeds had a
standard deviation of .05 in this setting. With three seeds, an interval then extends about .2 to
either side. So the study can only find a large effect, and it says which effects it cannot exclude.
Stopping rule: every run takes 30 steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols import smollm2
from studies.protocols.replay_pays_rates import ARMS

CHOSEN = {  # the arm of `replay_pays_rates`, and its learning rate
  'grpo': ('grpo', 2e-5),
  'grpo_same_rate': ('grpo', 4e-5),
  'exgrpo': ('exgrpo_clipped', 1e-5),
  'revisit': ('revisit', 4e-5),
  'normalised': ('normalised', 4e-5),
  'normalised_hardest': ('normalised_hardest', 4e-5),
}


def get_study():
  of_methods = smollm2.get_study()
  return Study(
    config='smollm2',
    arms={
      name: {**ARMS[arm], 'optimizer.learning_rate': rate} for name, (arm, rate) in CHOSEN.items()
    },
    settings={'mixture': {**of_methods.settings['mixture'], 'evaluation.every': 10}},
    seeds=(200, 201, 202),
    baseline='grpo',
    measure=of_methods.measure_of('mixture'),
    smallest_difference=0.05,
    tokens=40_000,
  )
