"""Where does a missing clip hurt, and in which direction do replayed rows push?

python -m studies run why --workdir=/tmp/why --parallel=2

Question: do unclipped updates harm ExGRPO because its updates are large? Their size depends on the
learning rate and on the number of minibatches, because ratios leave 1 after a step's first
minibatch. And does a baseline help that excludes the replayed row from the mean?
Setting: 40 steps of 16 questions from a pool of 640 chains of every difficulty.
Arms: ExGRPO, clipped or not (`objective.clip_schedule` always or until_replay), with 1, 2 or 4
minibatches per step and two learning rates; GRPO, clipped or not, with the same choices; and
`fresh_baseline`, which is clipped ExGRPO with two minibatches and the lower rate, but compares
fresh rows with the mean of the fresh rows.
Every tenth step compares the gradient of fresh and of replayed rows with the gradient of 32
held-out questions (alignment/ in metrics.jsonl).
All runs start from the same warm start.
Primary measure: pass@1 on 1,000 held-out chains at the last evaluation.
Seeds: 2, which is too few for an interval. Read the arms as a grid, not one by one.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

import itertools

from studies.protocol import Study

RATES = (2e-4, 4e-4)


def get_study():
  grid = {
    f'{method}_{clip}_{minibatches}_{rate:g}': {
      'replay.ratio': ratio,
      'objective.clip_schedule': clip,
      'optimizer.minibatches': minibatches,
      'optimizer.learning_rate': rate,
    }
    for (method, ratio, clips), minibatches, rate in itertools.product(
      (
        ('exgrpo', 0.5, ('always', 'until_replay')),
        ('grpo', 0.0, ('always', 'never')),
      ),
      (1, 2, 4),
      RATES,
    )
    for clip in clips
  }
  fresh = {**grid[f'exgrpo_always_2_{RATES[0]:g}'], 'objective.baseline': 'fresh'}
  return Study(
    config='chains_from_scratch',
    arms={**grid, 'fresh_baseline': fresh},
    settings={
      'every_difficulty': {
        'num_steps': 40,
        'data.train': 'chains:train[:640]',
      },
    },
    seeds=range(2),
    baseline=f'grpo_always_2_{RATES[0]:g}',
    measure='eval/chains_test/pass@1',
    smallest_difference=0.05,
    align_every=10,
  )
