"""Half of the lowest rate of study `smollm2_rates`, which was the best one for ExGRPO there.

exgrpo study --study=smollm2_rates_low --workdir=/tmp/smollm2_rates_low --parallel=2

Question: is 5e-6 better than 1e-5, for ExGRPO and for GRPO?
Arms: each method at 5e-6; clipped always, which the paper's scripts do for GRPO alone. Known when
this was written: ExGRPO's means there, .096 at 1e-5, .081 at 2e-5 and .017 at 4e-5, and no GRPO.
Setting, as in `smollm2_rates`: both tasks mixed, two sums to each divisor; 30 steps of 8 questions,
8 responses each, of 32 tokens at most; replay from the first step. Of 100 such questions, the model
solves .02 of the sums and .04 of the divisors at first (avg@4).
Primary measure: avg@4 at temperature 1 on the 74 sums of 100 held-out questions, after 30 steps.
Rule: of each method the rate with the highest mean, of the four in both studies, is that of study
`smollm2`. If that is 5e-6, half of it is run for both, in a study of its own, and so on.
Seeds: the same two, for the choice only.
Stopping rule: every run takes 30 steps, and no run is left out.
"""

from exgrpo_jax.studies.protocol import Study


def get_study():
  rates = (5e-6,)
  methods = {'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}}
  mixture = 'reasoning_gym:chain_sum(min_terms=2,max_terms=3,max_digits=2)*2+gcd(max_value=100)'
  return Study(
    config='smollm2',
    arms={
      f'{method}_{rate:g}': {**changed, 'optimizer.learning_rate': rate}
      for method, changed in methods.items()
      for rate in rates
    },
    settings={
      'mixture': {
        'num_steps': 30,
        'rollout.questions': 8,
        'rollout.slots': 64,
        'data.train': f'{mixture}:train',
        'data.evaluation': (f'{mixture}:test[:100]',),
        'replay.start_pass_rate': 0.0,
        'evaluation.every': 30,
        'checkpoint.every': 30,
      },
    },
    seeds=(100, 101),
    baseline='grpo_5e-06',
    measure='eval/reasoning_gym_chain_sum_12299c_test_to_100/chain_sum/avg@4',
    smallest_difference=0.05,
  )
