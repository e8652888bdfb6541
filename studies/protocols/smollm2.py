"""ExGRPO against GRPO on a real language model, SmolLM2-135M-Instruct, in three settings.

python -m studies run smollm2 --workdir=/tmp/smollm2_study --parallel=2

Question: does replay give a language model more right answers, after the same steps and about the
same generated tokens, and after the same fresh questions? Does that depend on how rare its
successes are at first?
Settings: `sums`, three numbers of two digits, .008 solved at first (avg@4), the weak start that
replay was made for, 40 steps; `gcd`, greatest common divisors up to 100, .10 at first,
30 steps; `mixture`, sums of two and three numbers and divisors, two to one, .02 and .08 at first,
30 steps. 8 questions a step, 8 responses each, of 32 tokens at most.
Arms: `exgrpo`, which replays from the first step, half of a step's questions if its buffer has that
many, and is always clipped, as GRPO is; `grpo`, the same without replay.
Primary measure: avg@4 at temperature 1 on 100 held-out questions after the last step; in the
mixture, on its 74 sums. Steps are equal, and generated tokens nearly so. For equal fresh questions,
compare GRPO's evaluation halfway with ExGRPO's at the end; results.csv has the counts.
Refuted: that replay gives more for the same tokens, if `grpo` is level or higher at the end; that
it saves fresh questions at the price of tokens, if `grpo` halfway is level or higher.
Learning rate: 1e-5 for ExGRPO and 2e-5 for GRPO, for each method the best of 5e-6, 1e-5, 2e-5 and
4e-5 on two seeds that are not in this study (`smollm2_rates`), by one rule.
Seeds: 5. avg@4 of .1 to .2 on 100 questions has a standard error of .02 to .03. That alone gives a
paired difference over 5 seeds an interval of about .03 to either side, so .05 can just be seen.
Stopping rule: every run takes all its steps, no run is left out, and none is added. It takes about
two and a half hours on two cores. You can stop it and continue, because a study resumes.
"""

from studies.protocol import Study


def get_study():
  sums = 'reasoning_gym:chain_sum(min_terms=3,max_terms=3,min_digits=2,max_digits=2)'
  gcd = 'reasoning_gym:gcd(max_value=100)'
  mixture = 'reasoning_gym:chain_sum(min_terms=2,max_terms=3,max_digits=2)*2+gcd(max_value=100)'

  def setting(task, num_steps):
    return {
      'num_steps': num_steps,
      'rollout.questions': 8,
      'rollout.slots': 64,
      'data.train': f'{task}:train',
      'data.evaluation': (f'{task}:test[:100]',),
      'replay.start_pass_rate': 0.0,
      'evaluation.every': num_steps // 2,
      'checkpoint.every': num_steps,
    }

  return Study(
    config='smollm2',
    arms={
      'exgrpo': {'optimizer.learning_rate': 1e-5},
      'grpo': {'optimizer.learning_rate': 2e-5, 'replay.ratio': 0.0},
    },
    settings={'sums': setting(sums, 40), 'gcd': setting(gcd, 30), 'mixture': setting(mixture, 30)},
    seeds=range(5),
    baseline='grpo',
    measure={
      'sums': 'eval/reasoning_gym_chain_sum_896316_test_to_100/avg@4',
      'gcd': 'eval/reasoning_gym_gcd_bfd5da_test_to_100/avg@4',
      'mixture': 'eval/reasoning_gym_chain_sum_12299c_test_to_100/chain_sum/avg@4',
    },
    smallest_difference=0.05,
  )
