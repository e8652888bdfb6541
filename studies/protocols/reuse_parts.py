"""Which part of ExGRPO causes its gain from `weak`, and do smaller minibatches gain as much?

python -m studies run reuse_parts:rates --workdir=/tmp/reuse_parts_rates --parallel=2
python -m studies run reuse_parts:2.5e-5 --workdir=/tmp/reuse_parts_2.5e-5 --parallel=2
python -m studies run reuse_parts --workdir=/tmp/reuse_parts --parallel=2

Question: in study `reuse`, ExGRPO gained .076 over GRPO from `weak`, and two epochs gained .143.
ExGRPO differs from the arm `grpo` in four ways: it does not clip fresh rows, it takes half of its
questions from the buffer, it adds a stored row to these questions, and its best learning rate is
twice as high. Two epochs differ in two ways: rows are used twice, and a step has four updates
instead of two. Which of these differences cause the gains?
Arms:
  grpo: no replay, clipped, two updates per step.
  grpo_fast: like `grpo`, but at the learning rate of `exgrpo`.
  unclipped: no replay, never clipped.
  questions_clipped: ExGRPO's questions, but without the stored row; clipped.
  questions: like `questions_clipped`, but fresh rows are not clipped, as in `exgrpo`.
  exgrpo: as in the paper. Fresh rows are unclipped once replay has started, at the first step.
  unit_slope: ExGRPO, clipped, with a shaping whose slope is 1 at w = 1.
  minibatches_4, minibatches_8: like `grpo`, but with four or eight updates per step, each on fewer
  groups.
  epochs_2: like `grpo`, but each step's rows are used twice, which also makes four updates.
Start, primary measure, tokens and last policies: as for `weak` in study `reuse`.
Learning rates: as in study `reuse` for its arms. `reuse_parts:rates` runs the five new arms at
5e-5, 1e-4, 2e-4, 4e-4 and 8e-4, with the two seeds of `reuse_rates`. Rule: an arm's rate is the one
with the highest mean of the measure over the seeds. If this is the lowest or the highest rate
tried, the next lower or higher rate, by a factor of two, is run for this arm. So
`reuse_parts:2.5e-5` was added for `minibatches_8`, which was best at 5e-5. It has a second arm only
because a study needs two.
Decision: by the t interval of the difference from `grpo`, paired by seed and corrected for all 9
comparisons; and, decided separately, by the same interval of the difference from `exgrpo`. A part
of ExGRPO explains its gain if an arm with this part, but without the stored row, beats `grpo` and
does not trail `exgrpo`. A difference of .05 would matter.
Seeds: 8, none of them used for the rates or in another study.
Stopping rule: every run takes all of its steps, no run is left out, and none is added.
Results seen before: the runs of `reuse_rates` and `reuse`. In study `replay_pays_again`, from the
same start, `questions_clipped` differed from GRPO by -.008, and GRPO at twice its rate by +.023.
In the search for the new arms' rates, their best means were .42 (`unclipped`), .36 (`questions`),
.35 (`minibatches_8`), .34 (`minibatches_4`) and .27 (`questions_clipped`). From 1e-4 on, some runs
of the clipped arms did not take off within their 40 steps.
"""

from studies.protocol import Study
from studies.protocols import reuse, reuse_rates

_GRPO = reuse_rates.ARMS['grpo']
_NO_ROW = {'replay.include_trajectory': False}
NEW = {
  'unclipped': {**_GRPO, 'objective.clip_schedule': 'never'},
  'questions_clipped': {'objective.clip_schedule': 'always', **_NO_ROW},
  'questions': {'objective.clip_schedule': 'until_replay', **_NO_ROW},
  'minibatches_4': {**_GRPO, 'optimizer.minibatches': 4},
  'minibatches_8': {**_GRPO, 'optimizer.minibatches': 8},
}
RATES_TRIED = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
ADDED = {'2.5e-5': ('minibatches_4', 'minibatches_8')}  # rates that the rule added later
RATES = {  # of the new arms, chosen by `reuse_parts:rates`
  'unclipped': 4e-4,
  'questions_clipped': 1e-4,
  'questions': 4e-4,
  'minibatches_4': 1e-4,
  'minibatches_8': 5e-5,
}


def get_study(what=''):
  """Return the study, or with 'rates' or an added rate the search for learning rates."""
  start = reuse_rates.STARTS['weak']
  common = {
    'config': 'chains_from_scratch',
    'measure': reuse_rates.MEASURES['weak'],
    'smallest_difference': 0.05,
    'tokens': reuse_rates.TOKENS['weak'],
  }
  if what:
    arms = NEW if what == 'rates' else {name: NEW[name] for name in ADDED[what]}
    rates = RATES_TRIED if what == 'rates' else (float(what),)
    return Study(
      arms=arms,
      settings={f'weak-{rate:g}': {**start, 'optimizer.learning_rate': rate} for rate in rates},
      seeds=(300, 301),
      baseline=next(iter(arms)),
      **common,
    )
  old = {name: reuse_rates.ARMS[name] for name in ('grpo', 'exgrpo', 'unit_slope', 'epochs_2')}
  rates = {name: reuse.RATES['weak'][name] for name in old}
  rates |= {'grpo_fast': rates['exgrpo'], **RATES}
  return Study(
    arms={**old, 'grpo_fast': _GRPO, **NEW},
    settings={'weak': start},
    seeds=range(50, 58),
    baseline='grpo',
    second_baseline='exgrpo',
    tuned={'weak': {arm: {'optimizer.learning_rate': rate} for arm, rate in rates.items()}},
    last_data=f'{start["data.evaluation"][0]}[:200]',
    **common,
  )
