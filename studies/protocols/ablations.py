"""Which parts of ExGRPO matter? Each arm changes one part, as in the paper's ablations.

python -m studies run ablations --workdir=/tmp/ablations --parallel=2

Question: how much does pass@1 change when one part of ExGRPO changes, and do steps stay valid?
Setting: 40 steps of 16 questions from a pool of 640 chains of every difficulty.
Arms: `exgrpo`, and arms that change one part of it:
  `ratio_0` (GRPO), `ratio_0.25`, `ratio_0.75`: another share of replayed questions.
  `uniform_questions`: draws all questions in the buffer with equal probability.
  `random_trajectory`, `highest_entropy`: replays a random success of a question, or its success
  with the highest entropy.
  `no_shaping`, `beta_0.01`, `beta_1`: no shaping, or another beta.
  `no_delay`: replays from the first step. `no_retirement`: retires no question.
To see if replaying high-entropy successes leads to more invalid reasoning, compare
eval/chains_test/valid_steps with pass@1 in results.csv.
All runs start from the same warm start.
Primary measure: pass@1 on 1,000 held-out chains at the last evaluation.
Learning rate: 2e-4 with and without replay. Study `tuning` chose both by the same rule, on seeds
that this study does not use.
Seeds: 4. They can detect a difference of .05 if its standard deviation is at most .05.
Stopping rule: every run takes 40 steps, no run is left out, and none is added.
"""

from studies.protocol import Study


def get_study():
  return Study(
    config='chains_from_scratch',
    arms={
      'exgrpo': {},
      'ratio_0': {'replay.ratio': 0.0},
      'ratio_0.25': {'replay.ratio': 0.25},
      'ratio_0.75': {'replay.ratio': 0.75},
      'uniform_questions': {'replay.question_selection': 'uniform'},
      'random_trajectory': {'replay.trajectory_selection': 'random'},
      'highest_entropy': {'replay.trajectory_selection': 'highest_entropy'},
      'no_shaping': {'objective.shaping': 'none'},
      'beta_0.01': {'objective.beta': 0.01},
      'beta_1': {'objective.beta': 1.0},
      'no_delay': {'replay.start_pass_rate': 0.0},
      'no_retirement': {'replay.retire': 'never'},
    },
    settings={'every_difficulty': {'num_steps': 40, 'data.train': 'chains:train[:640]'}},
    seeds=range(4),
    baseline='exgrpo',
    measure='eval/chains_test/pass@1',
    smallest_difference=0.05,
  )
