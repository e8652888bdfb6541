"""Does replay save more if there are few questions? One, two, five or ten passes over a pool.

python -m studies run sample_efficiency --workdir=/tmp/sample_efficiency --parallel=2

Question: after the same number of steps, is ExGRPO better than GRPO on held-out questions? Does
this depend on how often the pool of questions is read?
Settings: a run of 40 steps of 16 questions makes 640 visits to questions, from a pool of 640, 320,
128 or 64 questions. So GRPO makes one, two, five or ten passes over the pool. ExGRPO visits about
half as many fresh questions.
Arms:
  `exgrpo`, `grpo`.
  `grpo_retire`: GRPO that drops fully solved questions, as ExGRPO does.
  `grpo_half`: GRPO with 8 questions per step, which is about as many fresh questions as in ExGRPO.
  `uniform`: ExGRPO that draws questions from the buffer, and their successes, uniformly.
  `supervised`: continues supervised learning for about the time of 40 steps (350 updates), without
  reinforcement learning. This arm does not depend on the pool.
All runs except `supervised` start from the same warm start.
Primary measure: pass@1 on 1,000 held-out chains at the last evaluation. Also reported:
out-of-distribution pass@1 (500 chains), valid steps, and all of these against fresh questions,
generated tokens and seconds.
Learning rate: 2e-4 with and without replay. Study `tuning` chose both by the same rule, on seeds
that this study does not use.
Seeds: 5. On the two seeds of `tuning`, differences between ExGRPO and GRPO at the same rate had
standard deviations of .006 to .028. With five seeds, a 95% interval then extends at most .025 to
either side. So a difference of .05 can be detected.
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
