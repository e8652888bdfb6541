"""Warnings that a run learns nothing or runs out of questions, and the end of a run."""

import dataclasses
import math

import pytest

from exgrpo_jax.algorithm import question_stream, replay
from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting import alarms, metrics
from exgrpo_jax.training import run
from tests.helpers import tiny

STEPS = alarms.WINDOW
SETUP = alarms.Setup(num_steps=500, pool=1000, questions=32, max_response=64)
TAUGHT = {
  'length/truncated': 0.9,
  'pass_rate/all': 0.125,
  'buffer/retired': 10,
  'groups/zero_advantage': 0.5,
  'groups/solved_by_all': 0.4,
  'groups/solved_by_none': 0.1,
}


def observed(records, setup=SETUP):
  """Return the warnings printed for steps 1, 2, ... with these changes to TAUGHT."""
  past, printed = alarms.History(), []
  for step, record in enumerate(records, 1):
    past, warnings = alarms.observe(setup, past, TAUGHT | record | {'step': step})
    printed += warnings
  return printed


def test_a_healthy_run_gets_no_warning():
  assert observed([{}] * 150) == []


def test_a_warning_with_the_limit_if_every_response_was_truncated():
  (warning,) = observed([{}, {'length/truncated': 1.0}])
  assert warning.startswith('step 2: ') and 'config.rollout.max_response=64' in warning


def test_a_warning_about_truncated_responses_is_repeated_after_a_pause():
  printed = observed([{}, *[{'length/truncated': 1.0}] * 250])
  assert [text.split(':')[0] for text in printed] == ['step 2', 'step 102', 'step 202']


def test_a_warning_after_every_ten_steps_without_learning_signal():
  silent = {'groups/zero_advantage': 1.0}
  warnings = observed([silent] * 9 + [{}] + [silent] * 25)
  ten = [text for text in warnings if 'in a row' in text]
  said = [text.split(' steps in a row')[0] for text in ten]
  assert said == ['step 20: for 10', 'step 30: for 20']
  assert 'pass rate 0.125' in ten[0]


def retiring(pace, already=0):
  return [{'buffer/retired': already + pace * step} for step in range(1, STEPS + 1)]


def test_a_pool_that_retirement_will_empty_before_the_end():
  # 40 of 1,000 after step 20, 2 more each step: after 464 steps 32 are left, after 465 fewer.
  (warning,) = observed(retiring(2))
  for words in ('40 of 1,000', '2.0 retired', 'about step 485 of 500', 'the 32', 'retire=never'):
    assert words in warning
  assert observed(retiring(2), dataclasses.replace(SETUP, num_steps=485)) == []
  assert observed(retiring(0, already=990)) == []  # the pool no longer shrinks
  (warning,) = observed(retiring(1, already=950))
  assert '970 of 1,000' in warning and 'There are now fewer' in warning


@pytest.mark.parametrize('carry', [False, True])
def test_a_pool_is_empty_when_the_stream_reuses_retired_questions(carry, recorded):
  """With carry, a step works on all groups in flight, more than it trains on."""
  opened, rollout = recorded.experiment, recorded.rollout
  changes = dict(partial=carry, max_groups_in_flight=9, max_staleness=2)
  of_rollout = dataclasses.replace(opened.config.rollout, **changes)
  config = dataclasses.replace(opened.config, rollout=of_rollout)
  opened = dataclasses.replace(opened, config=config)
  rollout = dataclasses.replace(rollout, config=of_rollout)
  setup, size = run.alarm_setup(opened, rollout), len(rollout.data.questions)
  for left in range(size):
    retired = replay.Buffer(retired_epoch=dict.fromkeys(range(size - left), 0))
    pool = size, retired.retired_epoch, of_rollout.groups_in_flight
    assert question_stream.reads_retired(1, *pool) == (left < setup.questions)


@pytest.mark.parametrize(
  ('by_all', 'by_none', 'remedy'), [(0.7, 0.1, 'harder'), (0.1, 0.7, 'easier')]
)
def test_a_warning_if_most_groups_had_equal_rewards_with_a_remedy(by_all, by_none, remedy):
  solved = {'groups/solved_by_all': by_all, 'groups/solved_by_none': by_none}
  (warning,) = observed([solved | {'groups/zero_advantage': 0.8}] * STEPS)
  assert '80% of the groups in steps 1 to 20' in warning and f'Use {remedy} questions' in warning
  assert f'{by_all:.0%} were solved by all responses, and {by_none:.0%} by none' in warning
  for too_little in ([], [{'step': 1, 'groups/zero_advantage': 1.0}]):
    assert alarms.silent_groups(too_little) == ''


def test_a_kind_of_warning_pauses_and_does_not_silence_another():
  silent = {'groups/zero_advantage': 0.8}
  retired = [{'buffer/retired': 10 + 4 * max(0, step - 60)} | silent for step in range(1, 231)]
  printed = observed(retired)
  steps = {word: [t.split(':')[0] for t in printed if word in t] for word in ('groups', 'retired')}
  assert steps['groups'] == ['step 20', 'step 120', 'step 220']
  assert steps['retired'][0] not in steps['groups'] and len(steps['retired']) == 2


@pytest.mark.parametrize(('num_correct', 'is_warned'), [(5, True), (296, True), (297, False)])
def test_a_warning_with_a_reason_if_more_than_1_percent_of_gradings_failed(num_correct, is_warned):
  def verdicts(*outcomes):
    return [Verdict(reward=0.0, outcome=name, reason=f'why it {name}') for name in outcomes]

  graded = [verdicts(*['correct'] * num_correct, 'timed out'), verdicts('crashed', 'timed out')]
  warning = alarms.grading(12, graded)
  assert bool(warning) == is_warned
  total = f'failed for 3 of {num_correct + 3} responses'
  for words in ('step 12', total, '2 timed out', '1 crashed', 'why it timed out'):
    assert not is_warned or words in warning


# ---- A real run ----


def test_the_recorded_run_gets_a_warning_about_its_pool(recorded):
  """The expected counts come from its stages, not from its metrics."""
  setup = run.alarm_setup(recorded.experiment, recorded.rollout)
  past, printed = alarms.History(), []
  for record in metrics.read(recorded.workdir)[1:]:
    past, warnings = alarms.observe(setup, past, record)
    printed += warnings
  retired = len(recorded.steps[20].after.retired_epoch)
  assert tiny.POOL - retired < tiny.QUESTIONS
  (warning,) = (text for text in printed if 'retired' in text)
  assert warning.startswith(f'step 20: {retired} of {tiny.POOL} training questions are')


def test_a_resumed_run_restores_its_history_from_its_metrics(recorded, tmp_path):
  with metrics.Writer(tmp_path, 0) as writer:
    for step, share in enumerate((1.0, 0.5, 1.0, 1.0), 1):
      writer.write(step, TAUGHT | {'groups/zero_advantage': share})
    setup = run.alarm_setup(recorded.experiment, recorded.rollout)
  history = alarms.history(setup, metrics.read(tmp_path))
  assert history.silent_steps == 2 and len(history.recent) == 4


@pytest.mark.parametrize('stopped', [5, 20, 43])
def test_a_resumed_run_warns_like_an_uninterrupted_run(stopped):
  records = [
    TAUGHT | {'groups/zero_advantage': 0.9 + step % 7 / 60, 'step': step} for step in range(1, 130)
  ]

  def warned(past, records):
    for record in records:
      past, warnings = alarms.observe(SETUP, past, record)
      yield warnings

  whole = list(warned(alarms.History(), records))
  resumed = alarms.history(SETUP, records[:stopped])
  assert list(warned(resumed, records[stopped:])) == whole[stopped:]
  assert sum(map(len, whole)) == 2


# ---- When a run ends early ----

CONFIG = optimizer.OptimizerConfig(minibatches=2)
WELL = {'entropy': 0.5, 'loss': 0.1, 'gradient_norm': 0.01, 'optimizer/skipped': 0.0}
FALLS = {0: 0.5, 10: 0.6, 20: 0.4, 30: 0.6, 40: 0.7, 50: 0.1}  # 0.6 again is no improvement


@pytest.mark.parametrize(
  ('num_steps', 'patience', 'step'),
  [(60, 0, 60), (60, 1, 20), (60, 2, 30), (60, 3, 60), (10, 2, 10)],
)
def test_a_run_ends_after_patience_evaluations_without_improvement(num_steps, patience, step):
  assert alarms.last_step(FALLS, num_steps, patience) == step


def breakdown(*changes):
  """Return the breakdown after steps with these changes to WELL, oldest first."""
  steps = [WELL | change | {'step': step} for step, change in enumerate(changes, 1)]
  return alarms.breakdown(CONFIG, steps)


@pytest.mark.parametrize('entropy', [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_stops_a_run_at_once(entropy):
  why = breakdown({}, {'entropy': entropy, 'gradient_norm': math.nan, 'optimizer/skipped': 1.0})
  assert f'entropy {entropy}' in why and 'config.optimizer.learning_rate=1e-06' in why


def test_the_weights_are_blamed_if_no_update_was_made():
  why = breakdown({'entropy': math.nan, 'optimizer/skipped': 2.0})
  assert 'config.model.path' in why and 'learning_rate' not in why


@pytest.mark.parametrize('norm', [math.nan, 100.0])
def test_a_single_gradient_that_is_not_finite_or_too_large_is_tolerated(norm):
  skipped = {'loss': math.nan, 'gradient_norm': norm, 'optimizer/skipped': 2.0}
  assert not breakdown(*[{}] * 5, skipped)
  assert not breakdown(*[skipped, {}] * 10), 'half of them'


def test_a_run_continues_after_a_step_whose_rows_are_all_masked():
  assert not alarms.breakdown(CONFIG, [{name: x for name, x in WELL.items() if name != 'entropy'}])


def test_a_run_stops_if_most_updates_are_skipped():
  """11 of the 20 updates in ten steps."""
  half, all_of_it = {'optimizer/skipped': 1.0}, {'optimizer/skipped': 2.0, 'gradient_norm': 100.0}
  assert not breakdown(*[half] * 8, all_of_it), 'too few steps to say'
  why = breakdown(*[{}] * 5, *[half] * 9, all_of_it)
  assert '11 of the 20 updates' in why and 'config.optimizer.skip_above_norm=7.8' in why
  assert not breakdown(*[all_of_it] * 9, *[{}] * 5), 'steps that are past'
