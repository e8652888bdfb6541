"""Which reuse of rollouts pays off: several epochs, dynamic sampling, replay, or both?

python -m studies run reuse --workdir=/tmp/reuse --parallel=2
python -m studies run reuse:usual --workdir=/tmp/reuse_usual --parallel=2
python -m studies run reuse:guess --workdir=/tmp/reuse_guess --parallel=2

Question: with the same number of generated tokens, does replay reach a higher pass@1 than the
simplest ways to use rollouts better, which are several epochs over a step's rows and dynamic
sampling?
There are three studies, each decided separately: `reuse`, from the start `weak`; `reuse:usual`; and
`reuse:guess`, with multi-turn episodes, which was added after the others had been run.
Arms and starts: as in study `reuse_rates`, which describes them.
Learning rate: the best rate of a grid for each arm and start. Study `reuse_rates` chose it on two
seeds that this study does not use.
Primary measure: the mean of pass@1 on 500 held-out questions (200 for guess) over the first 220,
150 and 60 thousand generated tokens, which is the area under the curve. Tokens of dropped groups
count, and the environment's tokens do not.
The tables and the CSV also contain pass@1 at the last evaluation, entropy, seconds, and avg@32 and
pass@32 of each run's last policy. The last two are measured on the first 200 of the held-out
questions, after the last run. The last policies have not generated the same number of tokens: a run
of `dynamic` generates more in its 40 steps.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 7
comparisons. An arm wins from a start if the whole interval is above 0. The gain matters if the
whole interval is above .05. A second question is whether replay beats, or adds to, several epochs.
It is decided separately, by the same interval of the difference from `epochs_2`, corrected for all
7 comparisons.
Seeds: 8, none of them used for the rates or in another study. On the two seeds of the rates,
differences from GRPO at an arm's own rate had standard deviations of .02 to .09 from `weak`, and of
up to .03 from `usual` and in `guess`. An interval then extends .03 to .12, or up to .04, to either
side.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
Results seen before: the runs of `reuse_rates`. There, `epochs_2` is ahead of GRPO on both seeds
from both starts. It is also ahead of all arms with replay except `unit_slope_epochs_2`, which is
about equal. In `guess`, `grpo` has the highest mean (.505), before `epochs_4` (.503), `dynamic`
(.502) and `epochs_2` (.492). Arms with replay have .472 to .489.
Added after these runs, because every arm's pass@32 is at least .996: avg@32 and pass@32 of each
run's last policy on the first 300 questions of chains:ood, which differ in kind from the training
questions. The command for each run is: exgrpo evaluate --checkpoint=RUN --data=chains:ood[:300]
--samples=32 --temperature=1. Differences from `grpo` and from `epochs_2` get the same corrected t
intervals. A difference of .02 in pass@32 would matter. Results seen before: two runs on 200 of
these questions, with .960 (`grpo`) and .980 (`epochs_4`).
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
