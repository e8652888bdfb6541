"""Does replay hold up a policy that solves next to nothing? pass@1 of about .2, .1, .07, .05.

python -m exgrpo_jax.study --study=weak_start --workdir=/tmp/weak_start --parallel=2

Question: where the policy solves few of the training questions, does on-policy GRPO collapse, and
does ExGRPO hold or learn?
Settings: training and held-out questions are chains of 6, 7, 8 or 9 terms, which the policy solves
in about .19, .11, .07 and .05 of cases at the start (the two seeds of study `tuning`). Replay
begins at the first step, since a start at a pass rate of .35 might never come.
Arms: `exgrpo`; `exgrpo_unclipped`, whose fresh rows go unclipped once replay has started, as in the
paper; `exgrpo_bucket_0`, which moves a question whose group failed to bucket 0 instead of leaving
it where it was; `grpo`; `grpo_no_bonus`, without the entropy bonus. GRPO is always clipped.
All runs start from the same warm start.
Primary measure: pass@1 on 500 held-out chains of the same length at the last evaluation. A run has
collapsed if that is below half of its value before the first step; the rate of collapse of each arm
is read off results.csv.
Learning rate: 1e-4 for every arm; study `tuning` chose it, on seeds that are not in this study.
Seeds: 8. A pass@1 of .05 to .2 on 500 questions has a standard error of .01 to .018; in a paired
difference over 8 seeds that alone makes an interval of .01 to .02 to either side.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from exgrpo_jax.sweeps.protocol import Study


def get_study():
  return Study(
    config='chains',
    arms={
      'exgrpo': {'objective.clip': 'always'},
      'exgrpo_unclipped': {'objective.clip': 'until_replay'},
      'exgrpo_bucket_0': {'objective.clip': 'always', 'replay.failed': 'bucket_0'},
      'grpo': {'replay.ratio': 0.0},
      'grpo_no_bonus': {'replay.ratio': 0.0, 'objective.entropy_bonus': 0.0},
    },
    settings={
      f'terms={terms}': {
        'num_steps': 40,
        'data.train': f'chains:train_{terms}',
        'data.evaluation': (f'chains:test_{terms}',),
        'replay.start_pass_rate': 0.0,
        'optimizer.learning_rate': 1e-4,
      }
      for terms in (6, 7, 8, 9)
    },
    seeds=range(8),
    baseline='grpo',
    measure={f'terms={terms}': f'eval/chains_test_{terms}/pass@1' for terms in (6, 7, 8, 9)},
    smallest_difference=0.05,
  )
