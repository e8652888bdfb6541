"""The learning rates of study `lake`, chosen on seeds that it does not report.

exgrpo study --study=lake_rates --workdir=/tmp/lake_rates --parallel=2

Question: which learning rate suits each arm on a small frozen lake?
Arms: those of `episodes_rates`: grpo, exgrpo, revisit, normalised.
Environment: lake, maps of 4 by 4 in at most 10 turns. The warm start is short, 250 updates of 32
scripted episodes of a player who strays in a third of his turns: pass@1 .25. 40 steps of 16 maps
with 8 episodes. Replay begins at the first step.
Primary measure: pass@1 on 200 held-out maps, its mean over the first 60 thousand generated tokens;
those of the environment are not counted.
Rule: the rate with the highest mean of it over the seeds is that of the arm in study `lake`. If it
is the lowest or the highest of those tried, the next one beyond, by factors of two, is run for all
arms, until none is.
Seeds: two, for the choice only.
Stopping rule: every run takes all of its steps, and no run is left out.
Looked at before: ExGRPO at 4e-4, seed 0: .25 at first, .50 after 4 steps. A first start of this
study, which had the largest lake beside it and would have taken longer than a session, was stopped
after six runs at 1e-4; the largest is study `lake_rates_large` now. Nothing else has changed.
"""

from exgrpo_jax.configs import lake
from exgrpo_jax.configs.studies.episodes_rates import ARMS
from exgrpo_jax.studies.protocol import Study

TOKENS = 60_000


def start(side):
  """Overrides of config lake for maps of this side."""
  turns, prompt, response = lake.SIDES[side]
  return {
    'environment.max_turns': turns,
    'rollout.max_prompt': prompt,
    'rollout.max_response': response,
    'data.train': f'lake:train_{side}',
    'data.evaluation': (f'lake:test_{side}[:200]',),
    'warm_start.data': f'lake:pretraining_{side}',
    'evaluation.every': 8,
    'replay.start_pass_rate': 0.0,
  }


def measure_of(side):
  """The primary measure on maps of this side."""
  return f'eval/lake_test_{side}_to_200/pass@1'


def get_study(side='4'):
  return Study(
    config='lake',
    arms=ARMS,
    settings={
      f'{side}-{rate:g}': {**start(side), 'optimizer.learning_rate': rate}
      for rate in (1e-4, 2e-4, 4e-4, 8e-4)
    },
    seeds=(100, 101),
    baseline='grpo',
    measure=measure_of(side),
    smallest_difference=0.05,
    tokens=TOKENS,
  )
