"""Does replay help from the weakest start if both methods have the same learning rates?

python -m studies run weak_start_rates --workdir=/tmp/weak_start_rates --parallel=2

Question: the questions are chains of 9 terms, and the policy solves one in twenty. In study
`weak_start`, ExGRPO had a rate of 2e-4, and GRPO had 4e-4, the edge of its grid. Does a difference
remain if each method uses the other's rate, and which of them fails to take off?
Settings: four learning rates, each twice the previous one.
Arms: `exgrpo` and `grpo`, both always clipped. They differ only in `replay.ratio`.
All runs start from the same warm start. Replay begins at the first step.
Primary measure: pass@1 on 500 held-out chains of 9 terms at the last evaluation, and the difference
of ExGRPO from GRPO at the same rate, paired by seed. A run takes off if it ends above .4.
Secondary measure: each method at its rate with the highest mean. This rate is chosen on the seeds
that are reported, which favors both methods. If it is the lowest or the highest rate, the grid says
nothing about the best rate.
Refutation: the case for replay is refuted if GRPO takes off as often, and ends as high, at some
rate.
Every tenth step compares the gradients of fresh and of replayed rows with the gradient of 32
held-out questions.
Seeds: 8, the same as in `weak_start`, where differences had a standard deviation of .03 if both
methods take off. With eight seeds, a 95% interval then extends .02 to either side.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from studies.protocol import Study


def get_study():
  return Study(
    config='chains_from_scratch',
    arms={'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}},
    settings={
      f'rate={rate:g}': {
        'num_steps': 40,
        'data.train': 'chains:train_9',
        'data.evaluation': ('chains:test_9',),
        'replay.start_pass_rate': 0.0,
        'objective.clip_schedule': 'always',
        'optimizer.learning_rate': rate,
      }
      for rate in (1e-4, 2e-4, 4e-4, 8e-4)
    },
    seeds=range(8),
    baseline='grpo',
    measure='eval/chains_test_9/pass@1',
    smallest_difference=0.05,
    align_every=10,
  )
