"""The learning rates of `replay_pays` on a language model, on seeds that it does not report.

python -m studies run replay_pays_smollm2_rates --workdir=/tmp/smollm2_rates_2 --parallel=2

Question: which of four learning rates suits each of three ways of replay? SmolLM2-135M-Instruct
learns sums of two and three numbers of one and two digits, and greatest common divisors.
Arms: `revisit`, `normalised` and `normalised_hardest` of `replay_pays_rates`, each at each rate.
The rates of `grpo` and `exgrpo`, 2e-5 and 1e-5, were chosen by the same rule in `smollm2_rates`,
from the same rates, seeds and setting. With one minibatch per step, nothing is clipped. So
`grpo_unclipped` equals `grpo` here, and `exgrpo_clipped` equals `exgrpo`. There was no time to run
`zero`, `balanced`, `released` and `fifo` on the language model.
Setting: a mixture of both tasks with two sums for each divisor, 30 steps of 8 questions, and 8
responses each, of at most 32 tokens. Replay begins at the first step. On 100 such questions, the
model's avg@4 is .02 for the sums and .04 for the divisors at first.
Primary measure: avg@4 at temperature 1 on the 74 sums of 100 held-out questions, after 30 steps.
Rule: as in `smollm2_rates`, the rate with the highest mean. If this is the lowest or the highest
rate tried, half or twice that rate is run for all three arms too, and so on.
The rates were run in two parts: first 1e-5, 2e-5 and 4e-5, then 8e-5, which comes last in the CSV.
These means were known when the second part was written: `revisit` has .049, .084 and .088 at the
three rates, `normalised` has .073, .093 and .118, and `normalised_hardest` has .054 and .020 at the
first two. (The .020 is an evaluation before the first step, because that run had not ended. The
correct value is .096. No rule depends on it.)
Seeds: two, used only for this choice.
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
