"""From `weak`, at which learning rates does each method learn, and which is best at its own rate?

python -m studies run rate_range --workdir=/tmp/rate_range --parallel=2
python -m studies.protocols.rate_range studies/measured/rate_range.csv

Question: study `reuse` chose each arm's learning rate on two seeds, and study `reuse_parts` showed
that one of these choices was wrong. In earlier runs at high rates, `unit_slope` often learned where
GRPO did not. So this study runs every arm at every rate with the same eight seeds, and asks:
  1. Does an arm work over a wider range of rates than GRPO?
  2. Is an arm better than GRPO if each has its best rate?
Arms:
  grpo: no replay, clipped.
  epochs_2: like `grpo`, but each step's rows are used twice.
  exgrpo: as in the paper. Fresh rows are unclipped once replay has started, at the first step.
  unit_slope: ExGRPO, clipped, with a shaping whose slope is 1 at w = 1.
  questions_clipped: ExGRPO's questions, but without the stored row; clipped.
Start and tokens: as for `weak` in study `reuse`. Rates: 1e-4, 2e-4, 4e-4 and 8e-4.
Measures: a run's score is the mean of pass@1 on 500 held-out questions over the first 220 thousand
generated tokens. For question 1, an arm's score with a seed is the mean over the four rates. For
question 2, it is the score at the rate that has the highest mean over the other seven seeds, so a
seed never chooses its own rate. `compare` below computes both. The number of runs that take off
(pass@1 reaches .2) at each rate is reported, too.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 8
comparisons (4 arms, 2 questions). A difference of .05 would matter. If `unit_slope` gains, but
`questions_clipped` gains as much, the stored row is not the reason.
Seeds: 8, none of them used before.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
Results seen before: all runs of `reuse_rates`, `reuse`, `reuse_parts`, `replay_pays_rates` and
`collapse`. With two seeds at 8e-4, `unit_slope` had .44 and .45 and GRPO .10 and .03. In
`collapse`, at 8e-4, `unit_slope` took off in 6 of 8 runs and GRPO in 2.
"""

import sys

import numpy as np

from exgrpo_jax.reporting import comparison
from studies import tables
from studies.protocol import Study
from studies.protocols import reuse_parts, reuse_rates
from studies.runs import compared, finished, read_csv

RATES = (1e-4, 2e-4, 4e-4, 8e-4)
ARMS = {name: reuse_rates.ARMS[name] for name in ('grpo', 'epochs_2', 'exgrpo', 'unit_slope')}
ARMS['questions_clipped'] = reuse_parts.NEW['questions_clipped']


def get_study():
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={
      f'weak-{rate:g}': {**reuse_rates.STARTS['weak'], 'optimizer.learning_rate': rate}
      for rate in RATES
    },
    seeds=range(60, 68),
    baseline='grpo',
    measure=reuse_rates.MEASURES['weak'],
    smallest_difference=0.05,
    tokens=reuse_rates.TOKENS['weak'],
    takes_off=0.2,
  )


def compare(path):
  """Return a table of a CSV's arms: their scores over all rates and at their best rates."""
  study, runs = get_study(), read_csv(path)
  scores_of = {arm: _scores(runs, study, arm) for arm in study.arms}  # [R, S]: rates, seeds
  rows = [('arm', 'over all rates', 'from grpo', 'at its best rate', 'from grpo')]
  for arm, scores in scores_of.items():
    cells = []
    for score, baseline in (
      (scores.mean(0), scores_of['grpo'].mean(0)),
      (_at_best(scores), _at_best(scores_of['grpo'])),
    ):
      found = tables.student_t(score - baseline, comparisons=2 * (len(study.arms) - 1))
      difference = f'{found.value:+.3f} ± {found.high - found.value:.3f}'
      cells += [f'{score.mean():.3f}', '' if arm == 'grpo' else difference]
    rows.append((arm, *cells))
  return comparison.markdown(rows)


def _scores(runs, study, arm):
  measure, scores = study.measure, []
  for setting in study.settings:
    of_seed = compared(finished(runs, setting, arm, measure), measure, study.tokens)
    scores.append([of_seed[seed] for seed in study.seeds])
  return np.array(scores)


def _at_best(scores):
  """Return each seed's score at the rate that is best for the other seeds: [R, S] -> [S]."""
  others = scores.sum(1, keepdims=True) - scores
  return scores[others.argmax(0), np.arange(scores.shape[1])]


if __name__ == '__main__':
  print(compare(sys.argv[1]))
