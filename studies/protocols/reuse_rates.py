"""The learning rates of study `reuse`, chosen on seeds that it does not report.

python -m studies run reuse_rates --workdir=/tmp/reuse_rates --parallel=2
python -m studies run reuse_rates:5e-5 --workdir=/tmp/reuse_rates_5e-5 --parallel=2
python -m studies run reuse_rates:1.6e-3 --workdir=/tmp/reuse_rates_1.6e-3 --parallel=2

Question: which of four learning rates suits each arm, from each of three starts?
Arms:
  grpo: no replay, clipped, as are all arms without replay.
  epochs_2, epochs_4: no replay, but each step's rows are used two or four times.
  dynamic: no replay. A step draws questions until 16 of them have unequal rewards, at most 48.
  exgrpo: as in the paper. Fresh rows are unclipped once replay has started.
  unit_slope: ExGRPO, clipped, with a shaping whose slope is 1 at w = 1.
  headroom_drift: like `unit_slope`, but chooses questions by headroom and drift (arXiv:2609.03941).
  The drift limit is .02 instead of .001, because these learning rates are a hundred times larger.
  unit_slope_epochs_2: like `unit_slope`, but each step's rows are used twice.
Starts: `weak` (chains of 9 terms) and `usual` (the default questions of chains), both from the base
policy of `replay_pays`, with a pass@1 of .05 and .43. `guess` has episodes of up to seven turns, as
in study `episodes`, with a pass@1 of .41. A run has 40 steps of 16 questions with 8 responses each.
Replay begins at the first step.
Primary measure: the mean of pass@1 on 500 held-out questions (200 for guess) over the first 220,
150 and 60 thousand generated tokens. Tokens of dropped groups count, too.
Rule: from each start, study `reuse` uses an arm's rate with the highest mean of the measure over
the seeds. If this is the lowest or the highest rate tried, the next lower or higher rate, by a
factor of two, is run for all arms from that start. This repeats until no best rate is at the edge.
So 5e-5 was added for `weak` and `usual`, where `epochs_4` was best at 1e-4. `reuse_rates:5e-5` has
only these runs. And 1.6e-3 was added for `guess`, where `grpo`, `dynamic` and `unit_slope` were
best at 8e-4.
Seeds: two, used only for this choice.
Stopping rule: every run takes all of its steps, and no run is left out.
Results seen before: none of these arms, except `grpo`, `exgrpo` and `unit_slope` in the studies
named above.
"""

from studies.protocol import Study
from studies.protocols import episodes_rates, replay_pays_rates

_GRPO = {'objective.clip_schedule': 'always', 'replay.ratio': 0.0}
_UNIT_SLOPE = {'objective.clip_schedule': 'always', 'objective.shaping': 'unit_slope'}

ARMS = {
  'grpo': _GRPO,
  'epochs_2': {**_GRPO, 'optimizer.epochs': 2},
  'epochs_4': {**_GRPO, 'optimizer.epochs': 4},
  'dynamic': {**_GRPO, 'rollout.dynamic_sampling': 3.0},
  'exgrpo': {'objective.clip_schedule': 'until_replay'},
  'unit_slope': _UNIT_SLOPE,
  'headroom_drift': {
    **_UNIT_SLOPE,
    'replay.question_selection': 'headroom_drift',
    'replay.max_drift': 0.02,
  },
  'unit_slope_epochs_2': {**_UNIT_SLOPE, 'optimizer.epochs': 2},
}
STARTS = {
  'weak': replay_pays_rates.STARTS['weak'],
  'usual': replay_pays_rates.STARTS['control'],
  'guess': {
    **episodes_rates.start('guess', 200),
    'warm_start.num_updates': 1500,
    'num_steps': 40,
    'evaluation.every': 4,
  },
}
TOKENS = {'weak': 220_000, 'usual': 150_000, 'guess': 60_000}
MEASURES = {
  'weak': replay_pays_rates.measure_of('weak'),
  'usual': replay_pays_rates.measure_of('control'),
  'guess': episodes_rates.measure_of('guess', 200),
}


RATES = (1e-4, 2e-4, 4e-4, 8e-4)
# Rates that the rule added later, and where.
ADDED = {'5e-5': ('weak', 'usual'), '1.6e-3': ('guess',)}


def get_study(added=''):
  """Return the study of all rates, or only the runs of a rate that was added later."""
  settings = {} if added else {f'{start}-{rate:g}': start for start in STARTS for rate in RATES}
  for rate in [added] if added else ADDED:
    settings |= {f'{start}-{float(rate):g}': start for start in ADDED[rate]}
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={
      name: {**STARTS[start], 'optimizer.learning_rate': float(name.partition('-')[2])}
      for name, start in settings.items()
    },
    seeds=(300, 301),
    baseline='grpo',
    measure={name: MEASURES[start] for name, start in settings.items()},
    smallest_difference=0.05,
    tokens={name: TOKENS[start] for name, start in settings.items()},
  )
