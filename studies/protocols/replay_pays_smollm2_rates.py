"""The learning rates of study `replay_pays` on a language model, on seeds that it does not report.

python -m studies run replay_pays_smollm2_rates --workdir=/tmp/smollm2_rates_2 --parallel=2

Question: which of four learning rates suits three ways of replay when SmolLM2-135M-Instruct learns
sums of two and three numbers of one and two digits, and greatest common divisors?
Arms: `revisit`, `normalised` and `normalised_hardest` of `replay_pays_rates`, each at each rate.
The rates of `grpo` and `exgrpo`, 2e-5 and 1e-5, were chosen by the same rule in `smollm2_rates`,
from the same rates, seeds and setting. With one minibatch a step nothing is clipped, so
`grpo_unclipped` is `grpo` and `exgrpo_clipped` is `exgrpo` here. There was no time to run `zero`,
`balanced`, `released` and `fifo` on the language model.
Setting: both tasks mixed, two sums to each divisor; 30 steps of 8 questions, 8 responses each, of
32 tokens at most; replay from the first step. Of 100 such questions, the model solves .02 of the
sums and .04 of the divisors at first (avg@4).
Primary measure: avg@4 at temperature 1 on the 74 sums of 100 held-out questions, after 30 steps.
Rule: as in `smollm2_rates`, the rate with the highest mean. If it is the lowest or the highest rate
tried, half or twice that rate is run for all three arms too, and so on.
In two parts: first 1e-5, 2e-5 and 4e-5; then 8e-5, which is the last in the CSV. Known when the
second part was written: at the three rates `revisit` has .049, .084 and .088, `normalised` .073,
.093 and .118, and `normalised_hardest` .054 and .020 at the first two. (The .020 is an evaluation
before the first step, because that run had not ended. It is .096. No rule depends on it.)
Seeds: two, only for the choice.
Stopping rule: every run takes 30 steps, and no run is left out.
"""

from studies.protocol import Study
from studies.protocols import smollm2
from studies.protocols.replay_pays_rates import ARMS

CHOSEN = ('revisit', 'normalised', 'normalised_hardest')


def get_study():
  of_method = smollm2.get_study()
  return Study(
    config='smollm2',
    arms={
      f'{arm}_{rate:g}': {**ARMS[arm], 'optimizer.learning_rate': rate}
      for rate in (1e-5, 2e-5, 4e-5, 8e-5)
      for arm in CHOSEN
    },
    settings={'mixture': {**of_method.settings['mixture'], 'evaluation.every': 30}},
    seeds=(100, 101),
    baseline='normalised_1e-05',
    measure={'mixture': of_method.measure_of('mixture')},
    smallest_difference=0.05,
  )
