"""Whole runs in which responses span steps, held to numbers computed without the code."""

import copy

import jax
import numpy as np
import pytest

from exgrpo_jax.reporting import metrics, step_records
from tests.helpers import buffers, recording, tiny
from tests.helpers.chance import is_correct

Q, K, IN_FLIGHT, MAX_AGE, STEPS, SAVED = 2, tiny.ROLLOUTS, 6, 2, 10, 5


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  """The recording of one that takes the trainer's log-probabilities, and weights beside them."""
  changed = copy.deepcopy(values)
  changed.num_steps = changed.evaluation.every = STEPS
  changed.checkpoint.every = SAVED
  changed.rollout.update(
    dict(questions=Q, slots=8, carry=True, in_flight=IN_FLIGHT, max_age=MAX_AGE)
  )
  changed.optimizer.minibatches = 1
  changed.objective.update(dict(old_logprobs='recompute', tis_limit=1.5))
  folder = make_once('carry', lambda folder: recording.record(changed, folder, compiled))
  return recording.load(changed, folder, compiled)


def rows(plan):
  return [question.row for question in plan.questions]


def trained(run):
  """(step, question row, its responses) of each group that was trained."""
  for step in run.steps.values():
    yield from ((step, row, own) for row, own in zip(rows(step.trained), step.responses))


def ages(step, response):
  """[T]: how many steps ago each token was written."""
  return np.concatenate(
    [np.full(span.tokens, step.plan.step - span.step) for span in response.spans]
  )


def test_the_run_carries_responses_that_three_policies_wrote(run):
  spans = [len(one.spans) for _, _, own in trained(run) for one in own]
  assert max(spans) >= 3 and min(spans) == 1
  assert {bool(group.is_drawn) for step in run.steps.values() for group in step.left} == {
    True,
    False,
  }
  unfinished = [one for step in run.steps.values() for g in step.left for one in g.responses]
  assert {0} < {len(one.tokens) for one in unfinished if not one.is_complete}
  assert any(one.is_complete for one in unfinished)


def test_each_group_trains_once_complete_and_in_time(run):
  before, drawn = [], []
  for number, step in run.steps.items():
    in_flight = rows(step.plan)
    assert len(set(in_flight)) == len(in_flight) == IN_FLIGHT
    assert in_flight[: len(before)] == [group.question_row for group in before]
    drawn += in_flight[len(before) :]
    left = [group.question_row for group in step.left]
    assert sorted(rows(step.trained) + left) == sorted(in_flight) and len(left) == IN_FLIGHT - Q
    assert step.trained.step == number and [len(own) for own in step.responses] == [
      K - bool(stored) for stored in step.trained.candidates
    ]
    assert all(one.is_complete for own in step.responses for one in own)
    assert all(len(own) == len(judged) for own, judged in zip(step.responses, step.verdicts))
    before = step.left
  everything = [row for _, row, _ in trained(run)] + [group.question_row for group in before]
  assert sorted(everything) == sorted(drawn)
  oldest = [ages(step, one).max() for step, _, own in trained(run) for one in own]
  assert 1 <= max(oldest) <= MAX_AGE


def test_groups_are_shuffled_before_they_train(run):
  """So that a minibatch holds old and new ones."""
  places = [
    [rows(step.plan).index(row) for row in rows(step.trained)] for step in run.steps.values()
  ]
  assert any(place != sorted(place) for place in places)


def test_each_tokens_log_probability_is_that_of_the_policy_that_wrote_it(run):
  checked = 0
  for _, row, own in trained(run):
    prompt = run.data.prompts[row]
    for one in own:
      written, start = {span.step: span.tokens for span in one.spans}, 0
      assert list(written) == sorted(written) and sum(written.values()) == len(one.tokens)
      if len(written) == 1 and checked > 9:
        continue
      for number, count in written.items():
        logp, entropy = run.values_of(run.steps[number].params, prompt, one.tokens)
        place = slice(start, start + count)
        np.testing.assert_allclose(one.logp[place], logp[place], atol=1e-4)
        np.testing.assert_allclose(one.entropy[place], entropy[place], atol=1e-4)
        start += count
      checked += 1
  # The policies differ, so a token that is held to another one's would be noticed.
  first, last = (run.steps[number].params for number in (1, STEPS))
  gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, last)
  assert max(jax.tree.leaves(gaps)) > 0.01


def test_the_batch_says_which_tokens_are_carried(run):
  for step in run.steps.values():
    batch, b = step.batch, 0
    for own, prompt, replayed in zip(step.responses, step.trained.prompts, step.replays):
      for one in own:
        place = slice(len(prompt), len(prompt) + len(one.tokens))
        assert batch.is_carried_BT[b, place].tolist() == (ages(step, one) > 0).tolist()
        assert batch.is_carried_BT[b].sum() == (ages(step, one) > 0).sum()
        assert batch.policy_step_B[b] == one.spans[0].step
        np.testing.assert_array_equal(batch.behaviour_logp_BT[b, place], one.logp)
        if one.tis_weight is not None:
          np.testing.assert_array_equal(batch.term_weight_BT[b, place], one.tis_weight)
          np.testing.assert_allclose(one.tis_weight, 1, atol=1e-4)  # up to rounding
        b += 1
      if replayed:
        assert not batch.is_carried_BT[b].any() and batch.policy_step_B[b] == replayed.step
        b += 1
    assert b == len(batch.advantage_B) == Q * K


def test_only_what_is_trained_is_stored_retires_and_counts(run):
  for step in run.steps.values():
    changed = {
      row
      for row in {*step.buffer.entries, *step.after.entries}
      if step.buffer.entries.get(row) is not step.after.entries.get(row)
    }
    assert changed <= {*rows(step.trained)}
    assert {*step.after.retired_epoch} - {*step.buffer.retired_epoch} <= {*rows(step.trained)}
    correct = [verdict.correct for judged in step.verdicts for verdict in judged]
    decode = run.experiment.tokenizer.decode
    assert correct == [
      is_correct(decode(one.tokens), question.answer)
      for question, own in zip(step.trained.questions, step.responses)
      for one in own
    ]
    record = metrics.read(run.workdir)[step.plan.step]
    assert record['pass_rate/all'] == pytest.approx(np.mean(correct))


def test_a_replayed_response_is_as_old_as_its_first_token(run):
  written, waited = {}, 0
  for number, step in run.steps.items():
    replayed = [
      (row, one.tokens.tobytes())
      for row, one in zip(rows(step.trained), step.replays)
      if one is not None
    ]
    if replayed:
      ages = [number - written[key] for key in replayed]
      assert metrics.read(run.workdir)[number]['replay/age_mean'] == np.mean(ages)
    for row, own in zip(rows(step.trained), step.responses):
      known = step.buffer.entries.get(row)
      old = {stored.tokens.tobytes() for stored in known.trajectories} if known else set()
      for one in reversed(own):  # the first of equal ones is stored
        if (tokens := one.tokens.tobytes()) not in old:
          written[row, tokens] = one.spans[0].step
          waited += one.spans[0].step < number
  assert waited > 5


def test_metrics_say_how_old_the_tokens_are(run):
  for step in run.steps.values():
    age = np.concatenate([ages(step, one) for own in step.responses for one in own])
    record = metrics.read(run.workdir)[step.plan.step]
    assert record['carry/age_mean'] == pytest.approx(age.mean())
    assert record['carry/age_max'] == age.max() and record['carry/groups_left'] == IN_FLIGHT - Q
    assert record.get('carry/token_share', 0) == pytest.approx((age > 0).mean())
    # Absent in a step that had nothing to decode.
    assert 0 < record.get('rollout/slots_busy', 1) <= 1


def test_a_run_resumed_with_responses_in_flight_is_bit_for_bit_the_run_that_was_not(run, tmp_path):
  workdir = tmp_path / 'resumed'
  recording.resume(run, workdir, SAVED)
  expected, resumed = map(run.last_snapshot, (run.workdir, workdir))
  jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
  buffers.assert_same(resumed.buffer, expected.buffer)
  assert resumed.cursor == expected.cursor and resumed.step == expected.step == STEPS
  assert buffers.described(resumed.left) == buffers.described(expected.left) != []
  assert buffers.described(resumed.left) == buffers.described(run.steps[STEPS].left)
  assert tiny.untimed_records(workdir) == tiny.untimed_records(run.workdir)
  assert step_records.read(workdir) == step_records.read(run.workdir)
