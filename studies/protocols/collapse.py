"""Does replay hold up a weak policy that collapses on-policy? At rates too high for GRPO.

python -m studies run collapse --workdir=/tmp/collapse --parallel=2
python -m studies run collapse:4e-4 --workdir=/tmp/collapse_4e-4 --parallel=2

Question: the paper's case for replay is a weak policy that collapses under GRPO and trains with
replay. Which arms hold a policy up where GRPO's collapses, if any?
How the setting was found: by looking through the 352 runs of `replay_pays_rates` (four starts, four
learning rates, eleven arms, two seeds). GRPO ended below where it began, at half of it or less in
some runs, with rising entropy, from the starts `rare` and `weak` at rates four to eight times
its best, and nowhere at its best rate. Of these, start `weak` at 8e-4 was chosen, where the arms
differ most. At 4e-4 some runs of most arms take off and others do not: that is study
`collapse:4e-4`, which was part of the same study until 2026-11-26, and was set apart before the
first run of either, since a study must end within three hours. So this says nothing about rates at
which GRPO learns; those are the matter of `replay_pays`.
Arms and start: those of `replay_pays_rates`; 9 terms, pass@1 .05 and valid steps .01 at first.
Primary measure: pass@1 on 500 held-out questions at the last evaluation. A run has collapsed if it
is below half of its value before the first step, and taken off if it reaches .2.
What would refute that replay holds the policy up: an arm without the stored row, `revisit`, or one
in which it has no weight, `zero`, does as well as the arm that does.
Seeds: 8, none of them those of the search.
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
