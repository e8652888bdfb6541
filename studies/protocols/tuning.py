"""The learning rate of the other studies, chosen on seeds that none of them reports.

python -m studies run tuning --workdir=/tmp/tuning --parallel=2

Question: which of three learning rates suits ExGRPO, and which suits GRPO, in 40 steps?
Arms: each method at each rate.
Settings: chains of every difficulty, and chains of 8 terms. The policy solves few of the latter at
first and replays them from the first step.
Primary measure: pass@1 on held-out chains of the setting's kind at the last evaluation.
Rule: for each setting and method, the rate with the highest mean of the measure. In studies of that
setting, all of the method's arms use this rate.
Seeds: two.
Stopping rule: every run takes 40 steps, and no run is left out.
"""

from studies.protocol import Study


def get_study():
  rates = (1e-4, 2e-4, 4e-4)
  methods = {'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}}
  return Study(
    config='chains_from_scratch',
    arms={
      f'{method}_{rate:g}': {**changed, 'optimizer.learning_rate': rate}
      for method, changed in methods.items()
      for rate in rates
    },
    settings={
      'every_difficulty': {'num_steps': 40, 'data.evaluation': ('chains:test',)},
      'eight_terms': {
        'num_steps': 40,
        'data.train': 'chains:train_8',
        'data.evaluation': ('chains:test_8',),
        'replay.start_pass_rate': 0.0,
      },
    },
    seeds=(100, 101),
    baseline='grpo_0.0001',
    measure={
      'every_difficulty': 'eval/chains_test/pass@1',
      'eight_terms': 'eval/chains_test_8/pass@1',
    },
    smallest_difference=0.05,
  )
