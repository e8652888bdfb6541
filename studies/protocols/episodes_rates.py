"""The learning rates of study `episodes`, chosen on seeds that it does not report.

python -m studies run episodes_rates --workdir=/tmp/episodes_rates --parallel=2

Question: which learning rate suits each arm in two environments with multi-turn episodes?
Arms, each with one change:
  grpo: no replay, clipped.
  exgrpo: as in the paper. Fresh rows are unclipped once replay has started.
  revisit: draws questions as ExGRPO does but only generates fresh episodes for them. Clipped.
  normalised: the shaping's slope is 1 at w = 1. Clipped. The only arm that beat GRPO in study
  `replay_pays_again`.
Environments: in guess, the policy guesses a number between 1 and 64 in at most seven turns. In
calculator, it adds large numbers in at most six turns. Each begins with the warm start of its
config, which learns from scripted episodes of varying quality and gives a pass@1 of .41 and .22. A
run has 40 steps of 16 questions with 8 episodes each. Replay begins at the first step.
Primary measure: the mean of pass@1 on 200 held-out questions over the first 60 thousand (guess) or
100 thousand (calculator) generated tokens. The environment's tokens do not count.
Rule: in each environment, study `episodes` uses an arm's rate with the highest mean of the measure
over the seeds. If this is the lowest or the highest rate tried, the next lower or higher rate, by a
factor of two, is run for all arms in that environment. This repeats until no best rate is at the
edge.
The rates were run in two parts: first the four higher rates of each environment, then the two lower
ones. The lower rates were added because most arms had their best mean at the lowest rate tried,
4e-4 in `guess` and 2e-4 in `calculator`. The second part was written after the runs of the first
part up to `calculator` at 4e-4, and before its own runs. episodes_rates.csv has both parts, in this
order.
Seeds: two, used only for this choice.
Stopping rule: every run takes all of its steps, and no run is left out.
Results seen before: with ExGRPO at 4e-4 and seed 0, pass@1 rose slowly from .41 to .50 in guess,
and from .22 to .42 in calculator.
"""

from exgrpo_jax.configs import calculator, guess
from studies.protocol import Study

_CLIPPED = {'objective.clip_schedule': 'always'}

ARMS = {
  'grpo': {**_CLIPPED, 'replay.ratio': 0.0},
  'exgrpo': {'objective.clip_schedule': 'until_replay'},
  'revisit': {**_CLIPPED, 'replay.include_trajectory': False},
  'normalised': {**_CLIPPED, 'objective.shaping': 'unit_slope'},
}
CONFIGS = {'guess': guess, 'calculator': calculator}
_ENVIRONMENT = ('name', 'max_turns', 'max_turn_tokens')
TOKENS = {'guess': 60_000, 'calculator': 100_000}
_RATES = {
  'guess': (4e-4, 8e-4, 1.6e-3, 3.2e-3, 1e-4, 2e-4),
  'calculator': (2e-4, 4e-4, 8e-4, 1.6e-3, 5e-5, 1e-4),
}


def start(name, questions):
  """Return the overrides of config guess for an environment; `questions` are evaluated."""
  config = CONFIGS[name].get_config()
  return {
    **{f'environment.{key}': config.environment[key] for key in _ENVIRONMENT},
    **{f'rollout.{key}': config.rollout[key] for key in ('max_prompt', 'max_response')},
    'warm_start.data': config.warm_start.data,
    'data.train': config.data.train,
    'data.evaluation': (f'{name}:test[:{questions}]',),
    'evaluation.every': config.num_steps // 5,
    'replay.start_pass_rate': 0.0,
  }


def measure_of(name, questions):
  """Return the primary measure in an environment."""
  return f'eval/{name}_test_to_{questions}/pass@1'


def get_study():
  settings = {f'{name}-{rate:g}': (name, rate) for name in _RATES for rate in _RATES[name]}
  return Study(
    config='guess',
    arms=ARMS,
    settings={
      setting: {**start(name, 200), 'optimizer.learning_rate': rate}
      for setting, (name, rate) in settings.items()
    },
    seeds=(100, 101),
    baseline='grpo',
    measure={setting: measure_of(name, 200) for setting, (name, _) in settings.items()},
    smallest_difference=0.05,
    tokens={setting: TOKENS[name] for setting, (name, _) in settings.items()},
  )
