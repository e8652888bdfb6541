"""ExGRPO and GRPO on a real language model, SmolLM2-135M-Instruct, in three settings.

python -m studies run smollm2 --workdir=/tmp/smollm2_study --parallel=2

Question: does replay help a language model to answer more questions correctly, after the same steps
and about the same number of generated tokens, and after the same number of fresh questions? Does
this depend on how rare its successes are at first?
Settings, with the initial avg@4:
  `sums`: three numbers of two digits, .008, 40 steps. This is the weak start that replay is meant
  for.
  `gcd`: greatest common divisors up to 100, .10, 30 steps.
  `mixture`: two sums of two or three numbers for each divisor, .02 and .08, 30 steps.
A step has 8 questions with 8 responses each, of at most 32 tokens.
Arms: `exgrpo` replays from the first step. If its buffer has enough questions, half of a step's
questions are replayed. It is always clipped, as GRPO is. `grpo` is the same without replay.
Primary measure: avg@4 at temperature 1 on 100 held-out questions after the last step, or in the
mixture on its 74 sums. The number of steps is equal, and the number of generated tokens nearly so.
For an equal number of fresh questions, compare GRPO's evaluation halfway with ExGRPO's at the end.
results.csv contains the counts.
Refutation: if `grpo` is equal or higher at the end, replay does not gain more from the same tokens.
If `grpo` is equal or higher halfway, replay does not save fresh questions at the cost of tokens.
Learning rate: 1e-5 for ExGRPO and 2e-5 for GRPO. By the same rule, `smollm2_rates` chose the best
of 5e-6, 1e-5, 2e-5 and 4e-5 for each method, on two seeds that this study does not use.
Seeds: 5. An avg@4 of .1 to .2 on 100 questions has a standard error of .02 to .03. For this reason
alone, the interval of a paired difference over 5 seeds extends about .03 to either side. So .05 can
just be detected.
Stopping rule: every run takes all its steps, no run is left out, and none is added. The study takes
about two and a half hours on two cores. You can stop it and continue later, because a study
resumes.
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
