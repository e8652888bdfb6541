"""ExGRPO and GRPO on multi-turn episodes: guess a number, or add with a calculator.

python -m studies run episodes --workdir=/tmp/episodes --parallel=2

Question: does replay of whole episodes gain more than GRPO from the same number of generated
tokens?
Arms, environments, warm starts and steps: as in `episodes_rates`. Each arm uses the rate chosen
there.
Primary measure: the mean of pass@1 on 500 held-out questions over the first 60 thousand (guess) or
100 thousand (calculator) generated tokens. The environment's tokens do not count. Also reported:
turns, distinct questions, and pass@1 after the last step.
Refutation: if `revisit`, which draws the same questions without the stored episode, does as well,
the stored episode is not the reason for a gain.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 6
comparisons. An arm wins in an environment if the whole interval is above 0. The gain matters if the
whole interval is above .05.
Seeds: eight others. In `episodes_rates`, runs with the same arm and rate differ between seeds by
about .03. With five seeds, intervals would extend .06 to either side. With eight, they extend .04.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols.episodes_rates import ARMS, CONFIGS, TOKENS, measure_of, start

RATES = {
  'guess': {'grpo': 4e-4, 'exgrpo': 4e-4, 'revisit': 4e-4, 'normalised': 8e-4},
  'calculator': {'grpo': 2e-4, 'exgrpo': 2e-4, 'revisit': 2e-4, 'normalised': 2e-4},
}


def get_study():
  return Study(
    config='guess',
    arms=ARMS,
    settings={name: start(name, 500) for name in CONFIGS},
    seeds=range(8),
    baseline='grpo',
    measure={name: measure_of(name, 500) for name in CONFIGS},
    smallest_difference=0.05,
    tokens=TOKENS,
    tuned={
      name: {arm: {'optimizer.learning_rate': rate} for arm, rate in of_arms.items()}
      for name, of_arms in RATES.items()
    },
  )
