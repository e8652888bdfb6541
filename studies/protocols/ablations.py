"""Which parts of ExGRPO matter? Changes one at a time, as in the paper's ablations.

python -m studies run ablations --workdir=/tmp/ablations --parallel=2

Question: how much does pass@1 change when one part of ExGRPO changes, and do steps stay valid?
Setting: 40 steps of 16 questions from a pool of 640 chains of every difficulty.
Arms: `exgrpo`, and changes of one part: another share of replayed questions (`ratio_0`, which is
GRPO, `ratio_0.25`, `ratio_0.75`); all questions of the buffer alike (`uniform_questions`); a random
success of a question (`random_trajectory`) or the one with the highest entropy (`highest_entropy`);
no shaping (`no_shaping`) or another beta (`beta_0.01`, `beta_1`); replay from the first step
(`no_delay`); no retirement (`no_retirement`). To see if high entropy makes invalid reasoning grow,
compare eval/chains_test/valid_steps with pass@1 in results.csv.
All runs start from the same warm start.
Primary measure: pass@1 on 1,000 held-out chains at the last evaluation.
Learning rate: 2e-4 with and without replay. Study `tuning` chose both by one rule, on seeds that
are not in this study.
Seeds: 4. With them a difference of .05 can be seen if its standard deviation is .05 or less.
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
