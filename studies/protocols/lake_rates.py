"""The learning rates of studies `lake` and `lake:6`, on seeds that they do not report.

python -m studies run lake_rates --workdir=/tmp/lake_rates --parallel=2

Question: which learning rate suits each arm on a small frozen lake, and on a large one?
Arms: grpo, exgrpo, revisit and normalised, as in `episodes_rates`.
Environment: lake, with maps of 4 by 4 in at most 10 turns, and of 6 by 6 in at most 12. The warm
start is short: 250 updates on 32 scripted episodes each, by a player who makes a random move in a
third of the turns. It gives a pass@1 of .25 (4 by 4) and .02 (6 by 6). A run has 40 steps of 16
maps with 8 episodes each. Replay begins at the first step.
Primary measure: the mean of pass@1 on 200 held-out maps over the first 60 thousand generated
tokens. The environment's tokens do not count.
Rule: for each side, study `lake` or `lake:6` uses an arm's rate with the highest mean of the
measure over the seeds. If this is the lowest or the highest rate tried, the next lower or higher
rate, by a factor of two, is run for all arms on maps of that side. This repeats until no best rate
is at the edge.
The rates were run in three parts for each side. Each part was written after the runs of the
previous part:
  1. 1e-4 to 8e-4.
  2. 1.6e-3, because GRPO (side 4) and every arm except `revisit` (side 6) were best at 8e-4.
  3. 3.2e-3, because `normalised` (both sides) and GRPO (side 6) were best at 1.6e-3.
lake_rates.csv has the parts of side 4, then the parts of side 6.
Seeds: two, used only for this choice.
Stopping rule: every run takes all of its steps, and no run is left out.
Results seen before: pass@1 of ExGRPO at 4e-4 on side 4 with seed 0 was .25 at first and .50 after 4
steps. GRPO at 8e-4 on side 6 with seed 200 had .03 at first, .22 after 40 steps and .075 after 60.
A first attempt at both sides together would have taken too long. It was stopped after six runs at
1e-4.
"""

from exgrpo_jax.configs import lake
from studies.protocol import Study
from studies.protocols.episodes_rates import ARMS

TOKENS = 60_000


def start(side):
  """Return the overrides of config lake for maps of this side."""
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
  """Return the primary measure on maps of this side."""
  return f'eval/lake_test_{side}_to_200/pass@1'


def get_study():
  rates = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
  settings = {f'{side}-{rate:g}': (side, rate) for side in ('4', '6') for rate in rates}
  return Study(
    config='lake',
    arms=ARMS,
    settings={
      name: {**start(side), 'optimizer.learning_rate': rate}
      for name, (side, rate) in settings.items()
    },
    seeds=(100, 101),
    baseline='grpo',
    measure={name: measure_of(side) for name, (side, _) in settings.items()},
    smallest_difference=0.05,
    tokens=TOKENS,
  )
