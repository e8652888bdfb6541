"""The learning rates of study `replay_pays`, chosen on seeds that it does not report.

python -m studies run replay_pays_rates --workdir=/tmp/replay_pays_rates --parallel=2

Question: which of four learning rates suits each arm, from each of four starts?
Arms, each with one change:
  grpo: no replay, clipped.
  grpo_unclipped: no replay, never clipped, as the paper's ExGRPO is.
  exgrpo: as in the paper. Fresh rows are unclipped once replay has started.
  exgrpo_clipped: always clipped, as are all arms below except `released`.
  released: selects trajectories as the authors' code does. Otherwise like `exgrpo`.
  revisit: draws questions as ExGRPO does but only generates fresh responses to them.
  zero: the stored row has advantage 0.
  balanced: the group's advantages, weighted by slopes, sum to 0.
  normalised: the shaping's slope is 1 at w = 1.
  normalised_hardest: like `normalised`, but draws from the hardest bucket upwards.
  fifo: like `normalised`, but draws at random from every response of the last 8 steps.
Starts, each from its own base policy, with the initial pass@1 and the initial share of solutions
whose steps are all valid (a guess is correct 3 times in 100):
  rare: 8 terms, .06 and .004, 80 steps.
  weak: 9 terms, .05 and .010, 40 steps.
  modest: 8 terms, .08 and .037, 40 steps.
  control: the default questions of chains, .43, 40 steps.
Replay begins at the first step.
Primary measure: the mean of pass@1 on 500 held-out questions of the same kind over the first 380,
220, 200 and 150 thousand generated tokens.
Rule: from each start, study `replay_pays` uses an arm's rate with the highest mean of the measure
over the seeds. If this is the lowest or the highest rate tried, the next lower or higher rate, by a
factor of two, is run for all arms from that start. This repeats until no best rate is at the edge.
So 5e-5 was added for `rare`, where most arms were best at 1e-4. Its runs are the last of
replay_pays_rates.csv.
Seeds: two, used only for this choice.
Stopping rule: every run takes all of its steps, and no run is left out.
Results seen before: GRPO and ExGRPO, clipped, at 2e-4 and 4e-4 from the first three starts, with
seed 200.
"""

from studies.protocol import Study

_CLIPPED = {'objective.clip_schedule': 'always'}
_NORMALISED = {**_CLIPPED, 'objective.shaping': 'unit_slope'}

ARMS = {
  'grpo': {**_CLIPPED, 'replay.ratio': 0.0},
  'grpo_unclipped': {'objective.clip_schedule': 'never', 'replay.ratio': 0.0},
  'exgrpo': {'objective.clip_schedule': 'until_replay'},
  'exgrpo_clipped': _CLIPPED,
  'released': {
    'objective.clip_schedule': 'until_replay',
    'replay.trajectory_selection': 'released',
  },
  'revisit': {**_CLIPPED, 'replay.include_trajectory': False},
  'zero': {**_CLIPPED, 'objective.replay_advantage': 'zero'},
  'balanced': {**_CLIPPED, 'objective.replay_advantage': 'balanced'},
  'normalised': _NORMALISED,
  'normalised_hardest': {**_NORMALISED, 'replay.question_selection': 'hardest'},
  'fifo': {
    **_NORMALISED,
    'replay.store': 'all',
    'replay.question_selection': 'uniform',
    'replay.trajectory_selection': 'random',
    'replay.retire': 'never',
    'replay.max_age': 8,
  },
}


def _start(base, kind, num_steps):
  """Return the overrides of a start: warm-start seed, kind of questions, steps."""
  return {
    'warm_start.seed': base,
    'data.train': f'chains:train{kind}',
    'data.evaluation': (f'chains:test{kind}',),
    'num_steps': num_steps,
    'evaluation.every': num_steps // 10,
    'replay.start_pass_rate': 0.0,
  }


STARTS = {
  'rare': _start(100, '_8', 80),
  'weak': _start(2, '_9', 40),
  'modest': _start(101, '_8', 40),
  'control': _start(2, '', 40),
}
TOKENS = {'rare': 380_000, 'weak': 220_000, 'modest': 200_000, 'control': 150_000}


def measure_of(start):
  """Return the primary measure at a start."""
  (spec,) = STARTS[start]['data.evaluation']
  return f'eval/{spec.replace(":", "_")}/pass@1'


def get_study():
  settings = {f'{start}-{rate:g}': start for start in STARTS for rate in (1e-4, 2e-4, 4e-4, 8e-4)}
  settings['rare-5e-05'] = 'rare'
  return Study(
    config='chains_from_scratch',
    arms=ARMS,
    settings={
      name: {**STARTS[start], 'optimizer.learning_rate': float(name.partition('-')[2])}
      for name, start in settings.items()
    },
    seeds=(100, 101),
    baseline='grpo',
    measure={name: measure_of(start) for name, start in settings.items()},
    smallest_difference=0.05,
    tokens={name: TOKENS[start] for name, start in settings.items()},
  )
