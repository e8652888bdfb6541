"""Does replay help a policy that rarely succeeds (pass@1 of about .2, .1, .06 and .05)?

python -m studies run weak_start --workdir=/tmp/weak_start --parallel=2

Question: the policy solves few of the training questions at first, but knows a good way to solve
them. Does ExGRPO learn more than GRPO, and does either collapse?
Settings: training and held-out questions are chains of 6, 7, 8 or 9 terms. Replay begins at the
first step, because the policy might never reach a pass rate of .35.
Arms: `exgrpo`; `exgrpo_unclipped`, in which fresh rows are unclipped once replay has started, as in
the paper; `grpo`, which is always clipped.
All runs start from the same warm start.
Primary measure: pass@1 on 500 held-out chains of the same length at the last evaluation. A run has
collapsed if this value is below half of the value before the first step. results.csv has both
values.
Learning rate: 2e-4 with replay and 4e-4 without. Study `tuning` chose both by the same rule, on
seeds that this study does not use.
Seeds: 8. On the two seeds of `tuning`, differences between the two methods had standard deviations
of up to .03. With eight seeds, a 95% interval then extends at most .02 to either side.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from studies.protocol import Study


def get_study():
  exgrpo = {'optimizer.learning_rate': 2e-4}
  return Study(
    config='chains_from_scratch',
    arms={
      'exgrpo': {**exgrpo, 'objective.clip_schedule': 'always'},
      'exgrpo_unclipped': {**exgrpo, 'objective.clip_schedule': 'until_replay'},
      'grpo': {'optimizer.learning_rate': 4e-4, 'replay.ratio': 0.0},
    },
    settings={
      f'terms={terms}': {
        'num_steps': 40,
        'data.train': f'chains:train_{terms}',
        'data.evaluation': (f'chains:test_{terms}',),
        'replay.start_pass_rate': 0.0,
      }
      for terms in (6, 7, 8, 9)
    },
    seeds=range(8),
    baseline='grpo',
    measure={f'terms={terms}': f'eval/chains_test_{terms}/pass@1' for terms in (6, 7, 8, 9)},
    smallest_difference=0.05,
  )
