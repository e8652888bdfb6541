"""Several rewards in a whole run, held to numbers computed without the code.

The run is that of tests/helpers/tiny.py with rewards that ask for what a response, its question and
a column of its row are.
"""

import copy
import dataclasses
import json

import numpy as np
import pytest

from exgrpo_jax.datatypes import Questions
from exgrpo_jax.experiment import experiment
from exgrpo_jax.reporting import metrics, step_records
from tests.helpers import recording, tiny
from tests.helpers.chance import is_correct

Q, K, LIMIT, BUFFER, STEPS = tiny.QUESTIONS, tiny.ROLLOUTS, tiny.RESPONSE, 5, 5
WEIGHTS = {'correctness': 2.0, 'overlong': 0.5, 'weighed_length': -1.0, 'of_question': 0.125}


class Levelled(Questions):
  """Questions with a column: the row's number modulo 3."""

  def __init__(self, questions):
    self.questions = questions

  def __len__(self):
    return len(self.questions)

  def __getitem__(self, row):
    return self.read([row])[0]

  def read(self, rows):
    found = self.questions.read(rows)
    return [dataclasses.replace(q, columns={'level': q.row % 3}) for q in found]

  def select(self, rows):
    return Levelled(self.questions.select(rows))


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  """The recording."""
  changed = copy.deepcopy(values)
  changed.num_steps = STEPS
  changed.evaluation.every = changed.checkpoint.every = changed.num_steps
  changed.warm_start.num_updates = 0
  changed.metrics.sampled_rows = 64
  batched = 'tests.helpers.shaped:of_question'
  changed.grading.update(
    dict(
      rewards=('correctness', 'overlong', 'tests.helpers.shaped:weighed_length', batched),
      weights=tuple(WEIGHTS.values()),
      batched=(batched,),
      batch_size=10,
      overlong_buffer=BUFFER,
    )
  )
  load = experiment.load_questions

  def load_levelled(*args):
    data = load(*args)
    return dataclasses.replace(data, questions=Levelled(data.questions))

  def make(folder):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(experiment, 'load_questions', load_levelled)
      recording.record(changed, folder, compiled)

  return recording.load(changed, make_once('shaped_rewards', make), compiled)


def components(run, row, tokens):
  """Each reward of a response with these tokens, as tests/helpers/ and the papers define them."""
  tokens, length = tokens.tolist(), len(tokens)
  over = length - (LIMIT - BUFFER)
  is_cut = tokens[-1] not in run.rollout.tokenizer.eos_ids
  return {
    'correctness': float(is_correct(run.rollout.tokenizer.decode(tokens), str(row))),
    'overlong': -over / BUFFER if over > 0 else 0.0,
    'weighed_length': 0.01 * length * (row % 3),
    'of_question': row + sum(tokens) / 1000 + is_cut / LIMIT,
  }


def total(found):
  return sum(WEIGHTS[name] * value for name, value in found.items())


def test_a_reward_is_the_weighted_sum_and_correctness_is_the_verifiers(run):
  seen = {name: set() for name in WEIGHTS}
  for step in run.steps.values():
    for question, responses, verdicts in zip(step.plan.questions, step.responses, step.verdicts):
      for response, verdict in zip(responses, verdicts):
        expected = components(run, question.row, response.tokens)
        assert verdict.components == pytest.approx(expected)
        assert list(verdict.components) == list(WEIGHTS)
        assert verdict.reward == pytest.approx(total(expected))
        assert verdict.correct == bool(expected['correctness'])
        for name, value in expected.items():
          seen[name].add(value)
  assert all(len(values) > 1 for values in seen.values()) and min(seen['overlong']) == -1


def test_advantages_are_sums_of_rewards_less_the_groups_mean_replays_as_they_were_stored(run):
  num_replayed = 0
  for step in run.steps.values():
    rows = [
      (question.row, [*responses, *filter(None, [replayed])])
      for question, responses, replayed in zip(step.plan.questions, step.responses, step.replays)
    ]
    reward_QK = np.array(
      [[total(components(run, row, member.tokens)) for member in group] for row, group in rows]
    )
    expected_QK = reward_QK - reward_QK.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(step.batch.advantage_B, expected_QK.ravel(), atol=1e-5)
    for (row, _), replayed in zip(rows, step.replays):
      if replayed:
        assert replayed.reward == pytest.approx(total(components(run, row, replayed.tokens)))
        num_replayed += 1
  assert num_replayed > 5


def test_what_is_stored_and_what_retires_is_up_to_the_verifier_alone(run):
  num_stored = 0
  for step in run.steps.values():
    for row, entry in step.after.entries.items():
      assert 0 < entry.correctness < 1
      for stored in entry.trajectories:
        assert components(run, row, stored.tokens)['correctness'] == 1
        num_stored += 1
    groups = zip(step.plan.questions, step.verdicts, step.plan.is_replay_Q)
    for question, verdicts, is_replay in groups:
      correct = sum(verdict.correct for verdict in verdicts) + is_replay
      entry = step.after.entries.get(question.row)
      assert (question.row in step.after.retired_epoch) >= (correct == K)
      if entry and correct and step.buffer.started:
        assert entry.correctness == correct / K
  assert num_stored


def test_each_reward_is_a_metric_and_a_column_of_the_records(run):
  tables = step_records.read(run.workdir)
  recorded_rows = tables.responses.select(['components', 'is_replay', 'step']).to_pylist()
  for record in metrics.read(run.workdir)[1:]:
    step = run.steps[int(record['step'])]
    found = [
      components(run, question.row, response.tokens)
      for question, responses in zip(step.plan.questions, step.responses)
      for response in responses
    ]
    for name in WEIGHTS:
      assert record[f'rewards/{name}'] == pytest.approx(np.mean([one[name] for one in found]))
    assert record['reward'] == pytest.approx(np.mean(list(map(total, found))))
    rows = [row for row in recorded_rows if row['step'] == record['step']]
    assert len(rows) == Q * K
    assert [dict(row['components']) for row in rows if not row['is_replay']] == [
      pytest.approx(one) for one in found
    ]
    assert {row['components'] for row in rows if row['is_replay']} <= {None}
  (evaluated,) = (run.workdir / 'evaluation').glob(f'step_{STEPS:06d}_*.jsonl')
  assert all(set(json.loads(line)['correct']) <= {True, False} for line in evaluated.open())
