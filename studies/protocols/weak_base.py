"""Does replay help a policy that has learned its task badly (pass@1 of about .14 and .07)?

python -m studies run weak_base --workdir=/tmp/weak_base --parallel=2

Question: from a base policy that makes many errors in carrying out the steps, does on-policy GRPO
collapse, and does ExGRPO hold its level or learn?
Settings: the base policy is the warm start of another seed, which has learned less in as many
updates. Training and held-out questions are chains of 6 or 8 terms. The policy solves about .14 and
.07 of them. Replay begins at the first step.
Arms:
  `exgrpo`.
  `exgrpo_unclipped`: fresh rows are unclipped once replay has started, as in the paper.
  `exgrpo_bucket_0`: if a question's whole group fails, moves it to bucket 0 instead of leaving it
  in its bucket.
  `grpo`, always clipped.
  `grpo_no_bonus`: GRPO without the entropy bonus, always clipped.
All runs start from the same warm start.
Primary measure: pass@1 on 500 held-out chains of the same length at the last evaluation. A run has
collapsed if this value is below half of the value before the first step. results.csv has both
values.
Learning rate: 1e-4 for all arms. Study `tuning_weak_base` chose it by the same rule, on seeds that
this study does not use.
Seeds: 8. A pass@1 of .05 to .2 on 500 questions has a standard error of .01 to .018. For this
reason alone, the interval of a paired difference over 8 seeds extends .01 to .02 to either side.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from studies.protocol import Study


def get_study():
  exgrpo = {'optimizer.learning_rate': 1e-4}
  grpo = {'optimizer.learning_rate': 1e-4, 'replay.ratio': 0.0}
  return Study(
    config='chains_from_scratch',
    arms={
      'exgrpo': {**exgrpo, 'objective.clip_schedule': 'always'},
      'exgrpo_unclipped': {**exgrpo, 'objective.clip_schedule': 'until_replay'},
      'exgrpo_bucket_0': {**exgrpo, 'replay.on_all_failed': 'bucket_0'},
      'grpo': grpo,
      'grpo_no_bonus': {**grpo, 'objective.entropy_bonus': 0.0},
    },
    settings={
      f'terms={terms}': {
        'num_steps': 40,
        'warm_start.seed': 100,
        'data.train': f'chains:train_{terms}',
        'data.evaluation': (f'chains:test_{terms}',),
        'replay.start_pass_rate': 0.0,
      }
      for terms in (6, 8)
    },
    seeds=range(8),
    baseline='grpo',
    measure={f'terms={terms}': f'eval/chains_test_{terms}/pass@1' for terms in (6, 8)},
    smallest_difference=0.05,
  )
