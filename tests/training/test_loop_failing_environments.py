"""A run whose environments hang, raise and end their processes: it ends well and counts them."""

import copy
import zlib

import pytest

from exgrpo_jax.datatypes import turn_places
from exgrpo_jax.reporting import metrics
from tests.helpers import recording
from tests.helpers.environments import failure_of

pytestmark = pytest.mark.full
STEPS, TURNS = 4, 4
OUTCOMES = {'hang': 'timed out', 'raise': 'crashed', 'die': 'crashed'}  # by how it fails


@pytest.fixture(scope='module')
def run(values, tmp_path_factory, compiled):
  changed = copy.deepcopy(values)
  changed.num_steps = changed.checkpoint.every = STEPS
  changed.warm_start.num_updates = 0
  changed.environment.update(
    dict(
      name='tests.helpers.environments:Unreliable',
      max_turns=TURNS,
      max_turn_tokens=5,
      workers=2,
      time_limit=3.0,
      memory_limit=256,
    )
  )
  changed.rollout.update(dict(slots=6, max_response=24))
  changed.data.evaluation = ()
  folder = tmp_path_factory.mktemp('failing')
  recording.record(changed, folder, compiled)
  return recording.load(changed, folder, compiled)


def expected(run, question, response):
  """(outcome, how it failed if it did) of an episode, from what the policy said."""
  said = f'{question.row} '
  for written, _ in turn_places(response.turns):
    said += run.experiment.tokenizer.decode(response.tokens[written])
    if failure := failure_of(said):
      return OUTCOMES[failure], failure
    number = zlib.crc32(said.encode())
    if not number % 3:
      return ('correct' if number % 2 == 0 else 'wrong'), ''
  return 'wrong', ''


def test_failed_episodes_are_counted_and_change_no_other(run):
  failures = set()
  records = {record['step']: record for record in metrics.read(run.workdir)}
  assert sorted(run.steps) == list(range(1, STEPS + 1))
  for number, step in run.steps.items():
    found = list[str]()
    for question, own, judged in zip(step.plan.questions, step.responses, step.verdicts):
      for response, verdict in zip(own, judged, strict=True):
        outcome, failure = expected(run, question, response)
        assert verdict.outcome == outcome and not (failure and verdict.reward)
        found.append(outcome)
        failures.add(failure)
    for outcome, name in (('timed out', 'timed_out'), ('crashed', 'crashed')):
      assert records[number][f'grading/{name}'] == found.count(outcome) / len(found)
  assert failures == {'', *OUTCOMES}
