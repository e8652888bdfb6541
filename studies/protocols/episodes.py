"""ExGRPO and GRPO on episodes of several turns: a number to be found, and sums with a calculator.

python -m studies run episodes --workdir=/tmp/episodes --parallel=2

Question: does the replay of whole episodes give more than GRPO for as many generated tokens?
Arms, environments, warm starts and steps: those of `episodes_rates`, each arm at the rate chosen
there.
Primary measure: pass@1 on 500 held-out questions, its mean over the first 60 thousand (guess) and
100 thousand (calculator) generated tokens; those of the environment are not counted. Beside it are
reported turns, distinct questions, and pass@1 after the last step.
What would refute that the stored episode does it: `revisit`, the same questions without it, does as
well.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 6 comparisons.
An arm wins in an environment if all of it lies above 0, and by what matters if above .05.
Seeds: eight others. In `episodes_rates` runs of an arm and rate differ between seeds by about .03;
five seeds would have intervals of .06 to either side, eight of .04.
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
