"""The learning rate of study `weak_base`, chosen on seeds that it does not report.

python -m studies run tuning_weak_base --workdir=/tmp/tuning_weak_base --parallel=2

Question: which of three learning rates suits ExGRPO, and which suits GRPO, from a base policy that
has learned its task badly? This policy is the warm start of another seed. It solves 30% of the
chains, and the usual base policy solves 44%.
Arms: each method at each rate.
Setting: chains of 8 terms, replayed from the first step.
Primary measure: pass@1 on 500 held-out chains of 8 terms at the last evaluation.
Rule: for each method, the rate with the highest mean of the measure. All of the method's arms use
it.
Seeds: two.
Stopping rule: every run takes 40 steps, and no run is left out.
"""

from studies.protocol import Study


def get_study():
  rates = (5e-5, 1e-4, 2e-4)
  methods = {'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}}
  return Study(
    config='chains_from_scratch',
    arms={
      f'{method}_{rate:g}': {**changed, 'optimizer.learning_rate': rate}
      for method, changed in methods.items()
      for rate in rates
    },
    settings={
      'eight_terms': {
        'num_steps': 40,
        'warm_start.seed': 100,
        'data.train': 'chains:train_8',
        'data.evaluation': ('chains:test_8',),
        'replay.start_pass_rate': 0.0,
      },
    },
    seeds=(100, 101),
    baseline='grpo_0.0001',
    measure='eval/chains_test_8/pass@1',
    smallest_difference=0.05,
  )
