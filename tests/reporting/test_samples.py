"""The samples that a person reads, of a step of the recorded run (conftest.py)."""

import dataclasses

import pytest

from exgrpo_jax.datatypes import Experience
from exgrpo_jax.reporting import samples
from tests.helpers import tiny


@pytest.fixture(scope='module')
def experiences(recorded):
  """Of the steps with fresh and replayed questions."""
  return [
    Experience(
      plan=step.plan,
      replays=step.replays,
      scores=step.scores,
      responses=step.responses,
      verdicts=step.verdicts,
      batch=step.batch,
      left=step.left,
      sampling={},
      parity={},
      alignment={},
    )
    for step in recorded.steps.values()
    if any(step.replays) and not all(step.replays)
  ]


@pytest.fixture(scope='module')
def experience(experiences):
  return experiences[0]


@pytest.fixture(scope='module')
def sample(recorded):
  """A function of (experience, count) that gives the rows."""
  return lambda experience, count: samples.sample_rows(
    recorded.experiment.tokenizer, experience, count, tiny.SEED
  )


def test_samples_are_a_response_of_each_group_and_what_it_replays(recorded, experience, sample):
  tokenizer = recorded.experiment.tokenizer
  rows = sample(experience, 100)
  fresh = [row for row in rows if not row['replayed']]
  groups = {question.row: index for index, question in enumerate(experience.plan.questions)}
  assert {row['row'] for row in fresh} == set(groups) and len(fresh) == len(groups)
  for row in fresh:
    group = groups[row['row']]
    assert (row['response'], row['reward'], row['outcome'], row['truncated']) in [
      (
        tokenizer.decode(response.tokens, special=True),
        verdict.reward,
        verdict.outcome,
        response.truncated,
      )
      for response, verdict in zip(experience.responses[group], experience.verdicts[group])
    ]
  replayed = {row['row']: row for row in rows if row['replayed']}
  for question, trajectory in zip(experience.plan.questions, experience.replays):
    row = replayed.pop(question.row, None)
    assert (row is None) == (trajectory is None)
    if trajectory:
      assert row['response'] == tokenizer.decode(trajectory.tokens, special=True)
      assert (row['outcome'], row['written_in_step']) == ('correct', trajectory.step)
      assert row['truncated'] == (trajectory.tokens[-1] not in tokenizer.eos_ids)
  assert not replayed


def test_special_tokens_are_shown(recorded, experiences, sample):
  """In a prompt they are a chat template's."""
  end = recorded.experiment.tokenizer.eos_ids[0]
  rows = []
  for experience in experiences:
    prompts = [[end, *prompt] for prompt in experience.plan.prompts]
    templated = dataclasses.replace(experience.plan, prompts=prompts)
    rows += sample(dataclasses.replace(experience, plan=templated), 100)
  assert all(row['question'].startswith('</s>') for row in rows)
  ends = {row['response'].endswith('</s>'): row['truncated'] for row in rows}
  assert ends == {True: False, False: True}


def test_neither_the_group_nor_the_response_is_always_the_first(recorded, experiences, sample):
  tokenizer = recorded.experiment.tokenizer
  groups, responses = set(), set()
  for experience in experiences:
    (row,) = sample(experience, 1)
    group = [question.row for question in experience.plan.questions].index(row['row'])
    texts = [tokenizer.decode(r.tokens, special=True) for r in experience.responses[group]]
    groups.add(group)
    responses.add(texts.index(row['response']))
  assert len(groups) > 3 and len(responses) > 2


def test_the_same_step_has_the_same_samples(experience, sample):
  assert sample(experience, 100) == sample(experience, 100)


def test_there_are_at_most_as_many_samples_as_configured(experience, sample):
  assert len(sample(experience, 3)) == 3
