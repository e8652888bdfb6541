"""Several rewards in a whole run, held to numbers computed without the code.

The run is that of tests/helpers/tiny.py with rewards that ask for what a response, its question and
a column of its row are.
"""

import copy
import json

import numpy as np
import pytest

from exgrpo_jax.reporting import metrics, step_records
from tests.helpers import recording, tiny
from tests.helpers.chance import is_correct

Q, K, LIMIT, BUFFER, STEPS = tiny.QUESTIONS, tiny.ROLLOUTS, tiny.RESPONSE, 5, 5
WEIGHTS = {'correctness': 2.0, 'overlong': 0.5, 'weighed_length': -1.0, 'of_question': 0.125}


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  """The recording; the column `level` of a question is its row's number modulo 3."""
  changed = copy.deepcopy(values)
  changed.num_steps = changed.evaluation.every = changed.checkpoint.every = STEPS
  changed.warm_start.num_updates = 0
  changed.metrics.sampled_rows = 64
  batched = 'tests.helpers.shaped:of_question'
  changed.grading.rewards = (*list(WEIGHTS)[:2], 'tests.helpers.shaped:weighed_length', batched)
  changed.grading.weights = tuple(WEIGHTS.values())
  changed.grading.batched = (batched,)
  changed.grading.batch_size = 10
  changed.grading.overlong_buffer = BUFFER

  def write(folder):
    rows = [{'question': f'{n}+0', 'answer': str(n), 'level': n % 3} for n in range(tiny.POOL)]
    (folder / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))

  changed.data.train = str(make_once('levelled', write) / 'train.jsonl')
  folder = make_once('shaped_rewards', lambda place: recording.record(changed, place, compiled))
  return recording.load(changed, folder, compiled)


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
