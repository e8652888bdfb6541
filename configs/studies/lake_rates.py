"""The learning rates of study `lake`, chosen on a seed that it does not report.

exgrpo study --study=lake_rates --workdir=/tmp/lake_rates --parallel=2

Question: which learning rate suits each arm on the largest lake, where successes are rare at first?
Arms: those of `episodes_rates`: grpo, exgrpo, revisit, normalised.
Environment: lake, maps of 6 by 6, at most 12 turns. The warm start is short, 250 updates of 32
scripted episodes of a player who strays in a third of his turns: pass@1 .02 to .03. 60 steps of 16
maps with 8 episodes. Replay begins at the first step.
Primary measure: pass@1 on 200 held-out maps, its mean over the first 100 thousand generated tokens;
those of the environment are not counted.
Rule: the rate with the highest value of it is that of the arm in study `lake`. If it is the lowest
or the highest of those tried, the next one beyond, by factors of two, is run for all arms, until
none is.
Seeds: one, for the choice only; a run takes three minutes, and two seeds would take an hour.
Stopping rule: every run takes all of its steps, and no run is left out.
Looked at before: GRPO at 8e-4, seed 200: .03 at first, .22 after 40 steps, .075 after 60.
"""

from exgrpo_jax.configs.studies.episodes_rates import ARMS
from exgrpo_jax.studies.protocol import Study

START = {
  'environment.max_turns': 12,
  'rollout.max_prompt': 48,
  'rollout.max_response': 400,
  'rollout.slots': 32,
  'data.train': 'lake:train_6',
  'data.evaluation': ('lake:test_6[:200]',),
  'warm_start.data': 'lake:pretraining_6',
  'warm_start.num_updates': 250,
  'warm_start.batch_size': 32,
  'num_steps': 60,
  'evaluation.every': 10,
  'replay.start_pass_rate': 0.0,
}
MEASURE = 'eval/lake_test_6_to_200/pass@1'
TOKENS = 100_000


def get_study():
  return Study(
    config='lake',
    arms=ARMS,
    settings={
      f'{rate:g}': {**START, 'optimizer.learning_rate': rate} for rate in (1e-4, 2e-4, 4e-4, 8e-4)
    },
    seeds=(100,),
    baseline='grpo',
    measure=MEASURE,
    smallest_difference=0.05,
    tokens=TOKENS,
  )
