"""Episodes that go on in later steps: what each policy wrote, and what a resumed run has."""

import jax
import numpy as np
import pytest

from exgrpo_jax.reporting import step_records
from tests.helpers import buffers, guesses, recording, tiny
from tests.helpers.guesses import read

IN_FLIGHT, SAVED, STEPS = 6, 4, 8


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  changed = guesses.values_of(values, questions=2, carry=True, in_flight=IN_FLIGHT, max_age=2)
  changed.objective.update(dict(old_logprobs='recompute', tis_limit=1.5))
  folder = make_once('carried', lambda folder: recording.record(changed, folder, compiled))
  return recording.load(changed, folder, compiled)


def responses(run):
  """(step, question, prompt, response) of all that was trained."""
  for step in run.steps.values():
    groups = zip(step.trained.questions, step.trained.prompts, step.responses, strict=True)
    yield from ((step, q, prompt, one) for q, prompt, own in groups for one in own)


def test_episodes_span_steps_and_stop_within_a_turn_and_between_two(run):
  assert max(len(one.spans) for *_, one in responses(run)) > 1
  left = [one for step in run.steps.values() for group in step.left for one in group.responses]
  unfinished = [one for one in left if not one.is_complete and len(one.tokens)]
  in_turn = [sum(t.written + t.observed for t in one.turns) < len(one.tokens) for one in unfinished]
  assert {*in_turn} == {True, False} and any(one.turns for one in unfinished)


def test_what_was_written_in_several_steps_is_one_episode(run):
  for step, question, _, one in responses(run):
    own_T, success = read(run, question, one.tokens)
    np.testing.assert_array_equal(one.own, own_T)
    assert one.verdict.correct == success and sum(s.tokens for s in one.spans) == len(own_T)
    assert one.verdict in [v for judged in step.verdicts for v in judged]


def test_each_token_has_the_log_probability_of_the_policy_that_wrote_it(run):
  for _, question, prompt, one in responses(run):
    own_T, _ = read(run, question, one.tokens)
    begin = 0
    for span in one.spans:
      place = slice(begin, begin + span.tokens)
      logp, entropy = run.values_of(run.steps[span.step].params, prompt, one.tokens)
      np.testing.assert_allclose(one.logp[place], (logp * own_T)[place], atol=1e-4)
      np.testing.assert_allclose(one.entropy[place], (entropy * own_T)[place], atol=1e-4)
      begin = place.stop
    assert begin == len(one.tokens)


def test_a_run_resumed_with_episodes_in_flight_is_bit_for_bit_the_run_without_a_break(
  run, tmp_path
):
  """What its environments were is played again from seeds and turns."""
  workdir = tmp_path / 'resumed'
  recording.resume(run, workdir, SAVED)
  expected, resumed = map(run.last_snapshot, (run.workdir, workdir))
  jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
  buffers.assert_same(resumed.buffer, expected.buffer)
  assert buffers.described(resumed.left) == buffers.described(expected.left) != []
  assert buffers.described(resumed.left) == buffers.described(run.steps[STEPS].left)
  timed = ('environment/seconds', 'environment/idle_seconds')
  first, second = (
    [{k: v for k, v in record.items() if k not in timed} for record in tiny.untimed_records(where)]
    for where in (workdir, run.workdir)
  )
  assert first == second  # the busy slots too, for the clock decides nothing here
  assert step_records.read(workdir) == step_records.read(run.workdir)
