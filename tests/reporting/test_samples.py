"""The samples that a person reads, of a step of the recorded run (conftest.py)."""

import pytest

from exgrpo_jax.datatypes import Experience
from exgrpo_jax.reporting import samples


@pytest.fixture(scope='module')
def experience(recorded):
  """Of a step with fresh and replayed questions."""
  step = next(step for step in recorded.steps.values() if any(step.replays))
  return Experience(
    plan=step.plan,
    replays=step.replays,
    responses=step.responses,
    verdicts=step.verdicts,
    batch=step.batch,
    parity={},
  )


def test_samples_are_the_first_response_of_each_group_and_what_it_replays(recorded, experience):
  tokenizer = recorded.experiment.tokenizer
  rows = samples.sample_rows(tokenizer, experience, 100)
  fresh = [row for row in rows if not row['replayed']]
  assert [(row['row'], row['response'], row['reward'], row['outcome']) for row in fresh] == [
    (question.row, tokenizer.decode(responses[0].tokens), verdicts[0].reward, verdicts[0].outcome)
    for question, responses, verdicts in zip(
      experience.plan.questions, experience.responses, experience.verdicts
    )
  ]
  assert [(row['response'], row['written_in_step']) for row in rows if row['replayed']] == [
    (tokenizer.decode(trajectory.tokens), trajectory.step)
    for trajectory in experience.replays
    if trajectory
  ]


def test_there_are_at_most_as_many_samples_as_configured(recorded, experience):
  tokenizer = recorded.experiment.tokenizer
  assert len(samples.sample_rows(tokenizer, experience, 3)) == 3
