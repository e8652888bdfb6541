"""Which reuse of rollouts pays: several epochs, dynamic sampling, replay, or both?

python -m studies run reuse --workdir=/tmp/reuse --parallel=2
python -m studies run reuse:usual --workdir=/tmp/reuse_usual --parallel=2
python -m studies run reuse:guess --workdir=/tmp/reuse_guess --parallel=2

Question: at equal generated tokens, does replay give more pass@1 than the plainest ways to use
rollouts better: several epochs over a step's rows, and dynamic sampling?
Studies, each decided separately: `reuse`, from start `weak`; `reuse:usual`; and `reuse:guess`, with
episodes of several turns, which was added after the others had been run.
Arms and starts: as in study `reuse_rates`, which describes them.
Learning rate: for each arm and start the best of one grid, chosen by study `reuse_rates` on two
seeds that are not in this study.
Primary measure: pass@1 on 500 held-out questions (200 of guess), its mean over the first 220, 150
and 60 thousand generated tokens, which is the area under its curve. Tokens of dropped groups count
too; the environment's tokens do not.
Also in the tables and the CSV: pass@1 at the last evaluation; avg@32 and pass@32 of each run's last
policy, on the first 200 of the held-out questions, after the last run; entropy; seconds. The last
policies have not generated equally many tokens: a run of `dynamic` generates more in its 40 steps.
Decision: the t interval of the difference to `grpo`, seed by seed, corrected for all 7 comparisons.
An arm wins at a start if the whole interval is above 0, and by an amount that matters if it is
above .05. Whether replay beats, or adds to, several epochs is a second question with a decision of
its own: the same interval of the difference to `epochs_2`, corrected for all 7 comparisons.
Seeds: 8, none of them used for the rates or in another study. On the two seeds of the rates,
differences to GRPO at an arm's own rate had standard deviations of .02 to .09 from `weak`, and of
up to .03 from `usual` and in `guess`. Then such an interval is .03 to .12 and up to .04 to either
side.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
Looked at before: the runs of `reuse_rates`, where `epochs_2` is ahead of GRPO on both seeds from
both starts, and ahead of all arms with replay but `unit_slope_epochs_2`, which is about equal. In
`guess`, `grpo` has the highest mean (.505), before `epochs_4` (.503), `dynamic` (.502) and
`epochs_2` (.492); arms with replay have .472 to .489.
Added after these runs, because every arm's pass@32 is at least .996: avg@32 and pass@32 of each
run's last policy on the first 300 questions of chains:ood, which differ in kind from the training
questions. For each run: exgrpo evaluate --checkpoint=RUN --data=chains:ood[:300] --samples=32
--temperature=1. Differences to `grpo` and to `epochs_2` get the same corrected t intervals; .02 of
pass@32 would matter. Looked at before: two runs on 200 of these questions, .960 (`grpo`) and .980
(`epochs_4`).
"""

from studies.protocol import Study
from studies.protocols.reuse_rates import ARMS, MEASURES, STARTS, TOKENS

RATES = {
  'weak': {
    'grpo': 2e-4,
    'epochs_2': 2e-4,
    'epochs_4': 1e-4,
    'dynamic': 4e-4,
    'exgrpo': 4e-4,
    'unit_slope': 4e-4,
    'headroom_drift': 4e-4,
    'unit_slope_epochs_2': 2e-4,
  },
  'usual': {
    'grpo': 4e-4,
    'epochs_2': 2e-4,
    'epochs_4': 1e-4,
    'dynamic': 4e-4,
    'exgrpo': 4e-4,
    'unit_slope': 4e-4,
    'headroom_drift': 4e-4,
    'unit_slope_epochs_2': 2e-4,
  },
  'guess': {
    'grpo': 8e-4,
    'epochs_2': 4e-4,
    'epochs_4': 2e-4,
    'dynamic': 8e-4,
    'exgrpo': 4e-4,
    'unit_slope': 8e-4,
    'headroom_drift': 4e-4,
    'unit_slope_epochs_2': 4e-4,
  },
}


def get_study(start='weak'):
  (spec,) = STARTS[start]['data.evaluation']
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={start: STARTS[start]},
    seeds=range(40, 48),
    baseline='grpo',
    second_baseline='epochs_2',
    measure=MEASURES[start],
    smallest_difference=0.05,
    tokens=TOKENS[start],
    tuned={start: {arm: {'optimizer.learning_rate': rate} for arm, rate in RATES[start].items()}},
    last_data=spec if '[' in spec else f'{spec}[:200]',
  )
