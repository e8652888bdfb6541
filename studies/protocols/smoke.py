"""Does the command work? This is the smallest study, and it says nothing about the method.

python -m studies run smoke --workdir=/tmp/smoke_study
Four runs of under a minute each on two cores.

Question: does ExGRPO solve more held-out sums than on-policy GRPO after three steps?
Arms: `exgrpo`, which replays, and `grpo`, which does not. Nothing else differs, and the three steps
may end before anything is replayed.
Primary measure: pass@1 on 64 held-out sums at the last evaluation.
Seeds: two. They give no interval, so there is no conclusion.
Learning rate: as in configs/arithmetic.py for both arms, not tuned here.
Stopping rule: every run takes three steps, and no run is left out.
"""

from studies.protocol import Study


def get_study():
  return Study(
    config='smoke',
    arms={'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}},
    settings={'sums': {'num_steps': 3}},
    seeds=range(2),
    baseline='grpo',
    measure='eval/arithmetic_test_to_64/pass@1',
    smallest_difference=0.05,
  )
