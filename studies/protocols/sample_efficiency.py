"""Does replay save more if questions are few? Passes over the pool: 1, 2, 5, 10.

python -m studies run sample_efficiency --workdir=/tmp/sample_efficiency --parallel=2

Question: at the same number of steps, is ExGRPO better than GRPO on held-out questions, and does
that depend on how often the pool of questions is read?
Settings: 40 steps of 16 questions are 640 readings, from a pool of 640, 320, 128 or 64 questions,
so GRPO passes over it once, twice, five or ten times. ExGRPO reads about half as many fresh ones.
Arms: `exgrpo`; `grpo`; `grpo_retire`, which leaves out fully solved questions, as ExGRPO does;
`grpo_half`, with 8 questions a step, about as many fresh ones as ExGRPO reads; `uniform`, ExGRPO
that replays all questions of its buffer and all successes alike; `supervised`, which continues the
supervised learning for about the time of 40 steps (350 updates), without reinforcement learning. It
does not depend on the pool.
All runs except `supervised` start from the same warm start.
Primary measure: pass@1 on 1,000 held-out chains at the last evaluation. Also reported: out of
distribution (500), valid steps, and all of these against fresh questions, generated tokens and
seconds.
Learning rate: 2e-4 with and without replay. Study `tuning` chose both by one rule, on seeds that
are not in this study.
Seeds: 5. On the two seeds of `tuning` the differences between ExGRPO and GRPO at one rate had
standard deviations of .006 to .028. Then five seeds give a 95% interval of .025 to either side or
less, so a difference of .05 can be seen.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from studies.protocol import Study


def get_study():
  steps, questions = 40, 16
  exgrpo = {'num_steps': steps}
  grpo = {'num_steps': steps, 'replay.ratio': 0.0}
  return Study(
    config='chains_from_scratch',
    arms={
      'exgrpo': exgrpo,
      'grpo': grpo,
      'grpo_retire': {**grpo, 'replay.retire': 'always'},
      'grpo_half': {**grpo, 'rollout.questions': questions // 2},
      'uniform': {
        **exgrpo,
        'replay.question_selection': 'uniform',
        'replay.trajectory_selection': 'random',
      },
      'supervised': {'num_steps': 0, 'warm_start.num_updates': 2350},
    },
    settings={
      f'passes={passes}': {'data.train': f'chains:train[:{steps * questions // passes}]'}
      for passes in (1, 2, 5, 10)
    },
    seeds=range(5),
    baseline='grpo',
    measure='eval/chains_test/pass@1',
    smallest_difference=0.05,
  )
