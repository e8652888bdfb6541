"""The learning rates of study `smollm2`, chosen on seeds that it does not report.

python -m studies run smollm2_rates --workdir=/tmp/smollm2_rates --parallel=2

Question: which of four learning rates suits ExGRPO, and which suits GRPO? SmolLM2-135M-Instruct
learns sums of two and three numbers of one and two digits, and greatest common divisors.
Arms: each method at each rate, always clipped. The paper's scripts clip only GRPO.
Setting: a mixture of both tasks with two sums for each divisor, 30 steps of 8 questions, and 8
responses each, of at most 32 tokens. Replay begins at the first step. On 100 such questions, the
model's avg@4 is .02 for the sums and .04 for the divisors at first.
Primary measure: avg@4 at temperature 1 on the 74 sums of 100 held-out questions, after 30 steps.
Rule: study `smollm2` uses a method's rate with the highest mean of the measure. If this is the
lowest or the highest rate tried, half or twice that rate is run for both methods and counts too,
and so on. The rates were run in two parts: first 1e-5, 2e-5 and 4e-5, then 5e-6, which comes last
in the CSV. It was added because ExGRPO's means at the three rates had been .096, .081 and .017.
GRPO's means were not known then.
Seeds: two, used only for this choice.
Stopping rule: every run takes 30 steps, and no run is left out.
"""

from studies.protocol import Study


def get_study():
  rates = (1e-5, 2e-5, 4e-5, 5e-6)
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
    baseline='grpo_2e-05',
    measure='eval/reasoning_gym_chain_sum_12299c_test_to_100/chain_sum/avg@4',
    smallest_difference=0.05,
  )
