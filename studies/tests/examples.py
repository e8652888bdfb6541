"""An example study with two arms, and its finished runs, in memory."""

from studies.protocol import Study
from studies.runs import Evaluation, StudyRun

MEASURE = 'eval/sums/pass@1'


def run(arm, seed, *scores):
  """Return a finished run, evaluated at step 0 and each later step; a step has 100 tokens."""
  evaluations = tuple(
    Evaluation(step, 0, 100 * step, 0.0, 8 * step, {'entropy': step / 2}, {MEASURE: score})
    for step, score in enumerate(scores)
  )
  return StudyRun('sums', arm, seed, 'python', (), '', True, evaluations)


def study(settings=('sums',), **fields):
  """Return a study that compares 'exgrpo' with 'grpo' over three seeds."""
  return Study(
    config='smoke',
    arms={'exgrpo': {}, 'grpo': {}},
    settings={name: {} for name in settings},
    seeds=range(3),
    baseline='grpo',
    measure=MEASURE,
    smallest_difference=0.05,
    **fields,
  )
