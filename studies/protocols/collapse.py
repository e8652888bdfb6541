"""Does replay save a weak policy that collapses on-policy, at rates too high for GRPO?

python -m studies run collapse --workdir=/tmp/collapse --parallel=2
python -m studies run collapse:4e-4 --workdir=/tmp/collapse_4e-4 --parallel=2

Question: the paper motivates replay with a weak policy that collapses under GRPO and trains with
replay. Which arms, if any, keep the policy from collapsing where GRPO's policy collapses?
Choice of the setting: from the 352 runs of `replay_pays_rates` (four starts, four learning rates,
eleven arms, two seeds). In some of them, GRPO ended below its initial pass@1, sometimes at half of
it or less, with rising entropy. This happened from the starts `rare` and `weak` at four to eight
times GRPO's best rate, and never at its best rate. Of these cases, start `weak` at 8e-4 was chosen
because the arms differ most there. At 4e-4, some runs of most arms take off and others do not. This
case is study `collapse:4e-4`. It was part of this study until 2026-11-26 and was separated before
the first run of either, because a study must end within three hours. So this study says nothing
about rates at which GRPO learns. `replay_pays` covers these rates.
Arms and start: as in `replay_pays_rates`, with 9 terms. Initially, pass@1 is .05, and .01 of the
solutions have valid steps.
Primary measure: pass@1 on 500 held-out questions at the last evaluation. A run has collapsed if it
is below half of its value before the first step, and has taken off if it reaches .2.
Refutation: suppose that an arm avoids the collapse. If an arm without the stored row (`revisit`) or
without weight on it (`zero`) does as well, the stored row is not the reason.
Seeds: 8, none of them used in the search.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
"""

from studies.protocol import Study
from studies.protocols.replay_pays_rates import ARMS, STARTS, measure_of


def get_study(learning_rate='8e-4'):
  rate = float(learning_rate)
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={
      f'weak-{rate:g}': {**STARTS['weak'], 'optimizer.learning_rate': rate},
    },
    seeds=range(8),
    baseline='grpo',
    measure=measure_of('weak'),
    smallest_difference=0.05,
    takes_off=0.2,
    align_every=STARTS['weak']['num_steps'] // 5,
  )
