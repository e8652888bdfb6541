"""Does replay beat GRPO on a language model? Sums; SmolLM2-135M-Instruct solves .02 of them.

python -m studies run replay_pays_smollm2 --workdir=/tmp/replay_pays_smollm2 --parallel=2

Question: does replay with stored rows at the weight of fresh ones give a language model more avg@4
than GRPO for the same generated tokens, where it solves next to nothing at first?
Setting: as in `replay_pays_smollm2_rates`, evaluated every ten steps.
Arms: `grpo`; from `replay_pays_rates` `exgrpo` (clipped here, as all are), `normalised` and
`normalised_hardest`. Two arms could refute a gain from the stored row: `revisit`, which draws the
same questions without it, and `grpo_same_rate`, GRPO at the rate of the normalised arms.
Learning rate: for each arm the best of 5e-6 to 4e-5 (`grpo`, `exgrpo`) or of 1e-5 to 8e-5 (the
others), on two seeds that are not in this study: `smollm2_rates`, `replay_pays_smollm2_rates`. None
is at the edge of its grid.
Primary measure: avg@4 at temperature 1 on 74 held-out sums, its mean over the first 40 thousand
generated tokens, which is the area under its curve. Also reported: the last value, distinct
questions, entropy.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 5 comparisons.
An arm wins if the whole interval is above 0, and by an amount that matters if it is above .05.
Seeds: 3, none of them used before. In study `smollm2` differences to GRPO over five seeds had a
standard deviation of .05 in this setting, so three seeds give an interval of about .2 to either
side. The study finds a large effect or none, and says which effects it cannot exclude.
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
