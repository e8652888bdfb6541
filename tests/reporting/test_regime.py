"""When a run is warned that it learns no more, or has left the regime in which replay helps."""

import copy
import dataclasses

import jax
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.configs import base
from exgrpo_jax.experiment import experiment
from exgrpo_jax.grading import worker_slot
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, regime
from exgrpo_jax.training import run
from tests.helpers import recording, tiny

STEPS = regime.WINDOW
REPLAY = config_lib.build(replay.Config, base.get_config().replay, 'config.replay')
OBJECTIVE = config_lib.build(objective.Config, base.get_config().objective, 'config.objective')
SETUP = regime.Setup(
  num_steps=500, pool=1000, questions=32, samples=4, replay=REPLAY, objective=OBJECTIVE
)
# A step of a run in which all is well: 8 questions replayed, 400 in the middle buckets 1 to 3.
WELL = {
  'buffer/started': 1,
  'buffer/retired': 10,
  'buffer/bucket_0': 0,
  **{f'buffer/bucket_{k}': size for k, size in ((1, 100), (2, 200), (3, 100))},
  'replay/bucket_0': 0,
  **{f'replay/bucket_{k}': size for k, size in ((1, 2), (2, 4), (3, 2))},
  'replay/times_mean': 1.5,
  'replay/effective_sample_size': 0.9,
  'outside_clip_range': 0.001,
  'pass_rate/fresh': 0.5,
  'pass_rate/replay': 0.6,
}


def observed(records, setup=SETUP):
  """What is printed of steps 1, 2, ... with these changes to WELL."""
  past, printed = regime.History(), []
  for step, record in enumerate(records, 1):
    past, warnings = regime.observe(setup, past, WELL | record | {'step': step})
    printed += warnings
  return printed


def replaying(**changes):
  return dataclasses.replace(SETUP, replay=dataclasses.replace(REPLAY, **changes))


def clipping(**changes):
  return dataclasses.replace(SETUP, objective=dataclasses.replace(OBJECTIVE, **changes))


def retiring(pace, already=0):
  return [{'buffer/retired': already + pace * step} for step in range(1, STEPS + 1)]


SMALL = {'buffer/bucket_1': 2, 'buffer/bucket_2': 6, 'buffer/bucket_3': 2}


def test_a_run_in_which_all_is_well_gets_no_warning():
  assert observed([{}] * 300) == []


def test_a_pool_that_retirement_will_empty_before_the_end():
  # 40 of 1,000 after step 20, 2 more each step: after 464 steps 32 are left, after 465 fewer.
  assert observed(retiring(2)) == [
    'step 20: 40 of 1,000 training questions are retired, and 2.0 more in each of the last 20 '
    'steps: from about step 485 of 500 on fewer than the 32 that a step works on are left, so '
    'retired ones are read again. Give a larger config.data.train, fewer steps, or '
    'config.replay.retire=never.'
  ]
  assert observed(retiring(2), dataclasses.replace(SETUP, num_steps=485)) == []
  assert observed(retiring(0, already=990)) == []  # it stays as it is, and was warned of


@pytest.mark.parametrize('carry', [False, True])
def test_a_pool_is_empty_where_the_stream_reads_retired_questions_again(carry, recorded):
  """With carry a step works on all groups in flight, which are more than it trains."""
  opened, rollout = recorded.experiment, recorded.rollout
  of_rollout = dataclasses.replace(opened.config.rollout, carry=carry, in_flight=9, max_age=2)
  opened = dataclasses.replace(
    opened, config=dataclasses.replace(opened.config, rollout=of_rollout)
  )
  rollout = dataclasses.replace(rollout, config=of_rollout)
  setup, size = run.regime_setup(opened, rollout), len(rollout.data.questions)
  for left in range(size):
    retired = replay.Buffer(retired_epoch=dict.fromkeys(range(size - left), 0))
    assert rollout.reads_retired(retired, epoch=1) == (left < setup.questions)


def test_a_pool_that_is_nearly_empty_already():
  (warning,) = observed(retiring(1, already=950))
  assert '970 of 1,000' in warning and ': now fewer than' in warning


def test_middle_buckets_that_replay_nearly_empties_at_each_step_with_the_same_successes():
  # 10 questions, 8 of them drawn.
  (warning,) = observed([SMALL | {'replay/times_mean': 3.0}] * STEPS)
  assert warning.startswith(
    'step 20: the buckets within config.replay.sigma=1 of 2 held 10 questions, and 8 of them were '
    'replayed in each of the last 20 steps; a replayed success was on average replayed 3.0 times '
    'by then'
  )
  assert 'config.replay.question_selection=uniform' in warning


@pytest.mark.parametrize(
  ('record', 'setup'),
  [
    (SMALL, SETUP),  # 1.5 times: others come
    ({'replay/times_mean': 3.0}, SETUP),  # 8 of 400
    (SMALL | {'replay/times_mean': 3.0, 'buffer/bucket_2': 12}, SETUP),  # 8 of 16 is just half
    (SMALL | {'replay/times_mean': 3.0}, replaying(question_selection='uniform')),
  ],
)
def test_middle_buckets_that_suffice(record, setup):
  assert observed([record] * STEPS, setup) == []


def test_what_is_drawn_is_held_against_the_buffer_from_which_it_was_drawn():
  filled = {f'buffer/bucket_{k}': 1000 for k in (1, 2, 3)}  # after the last of the steps
  assert len(observed([SMALL | {'replay/times_mean': 3.0}] * (STEPS - 1) + [filled])) == 1


def test_sigma_says_which_buckets_are_the_middle():
  outer = {'buffer/bucket_1': 200, 'buffer/bucket_2': 4, 'replay/times_mean': 3.0}
  assert observed([outer] * STEPS) == []  # 8 of 304
  assert len(observed([outer] * STEPS, replaying(sigma=0.5))) == 1  # 4 of 4


@pytest.mark.parametrize('size', [0.29, float('nan')])  # NaN: ratios beyond float32
def test_a_small_effective_sample_size(size):
  (warning,) = observed([{'replay/effective_sample_size': size}] * STEPS)
  assert 'the effective sample size of replayed tokens is 0.' in warning
  assert 'config.optimizer.learning_rate' in warning


def test_a_single_step_of_small_effective_sample_size_says_nothing():
  odd = [{'replay/effective_sample_size': 0.02}] * 9 + [{}] * (STEPS - 9)
  assert observed(odd) == []


@pytest.mark.parametrize('clip', ['until_replay', 'never'])
def test_unclipped_ratios_outside_the_range(clip):
  record = {'outside_clip_range': 1.5 * regime.MAX_OUTSIDE}
  (warning,) = observed([record] * STEPS, clipping(clip=clip))
  assert f"config.objective.clip='{clip}' leaves fresh ratios unclipped" in warning
  assert 'lie outside 0.8 to 1.2' in warning


def test_ratios_outside_the_range_are_no_matter_where_they_are_clipped():
  record = {'outside_clip_range': 1.5 * regime.MAX_OUTSIDE}
  assert observed([record] * STEPS, clipping(clip='always')) == []
  assert observed([record | {'buffer/started': 0}] * STEPS) == []  # until_replay


def test_replayed_questions_solved_far_more_often_than_fresh_ones():
  (warning,) = observed([{'pass_rate/fresh': 0.05, 'pass_rate/replay': 0.4}] * STEPS)
  assert 'pass rate of replayed questions is 0.40 and that of fresh ones 0.05' in warning
  assert 'config.replay.ratio than 0.5' in warning
  assert observed([{'pass_rate/fresh': 0.2, 'pass_rate/replay': 0.4}] * STEPS) == []


def test_a_run_that_stands_still_is_warned_once_a_fifth_of_it_is_known_to():
  silent = {'zero_variance': 0.8, 'groups/solved_by_all': 0.8, 'groups/solved_by_none': 0.0}
  for num_steps, first in ((60, 20), (150, 30)):
    setup = dataclasses.replace(SETUP, num_steps=num_steps)
    (warning,) = observed([silent] * 60, setup)
    assert warning.startswith(f'step {first}: the pass rate of fresh questions has stopped rising')
    assert '80% of the groups' in warning and 'prefilter' in warning
    assert observed([silent | {'zero_variance': 0.3}] * 60, setup) == []


def test_what_no_step_has_gets_no_warning():
  plain = {name: value for name, value in WELL.items() if not name.startswith('replay/')}
  del plain['pass_rate/replay'], plain['outside_clip_range']  # as of an older version
  past = regime.History()
  for step in range(1, 50):
    past, warnings = regime.observe(SETUP, past, plain | {'step': step})
    assert warnings == ()


def test_a_kind_of_warning_pauses_and_does_not_silence_another():
  far, few = {'pass_rate/replay': 0.9}, {'replay/effective_sample_size': 0.1}
  printed = observed([far] * 50 + [far | few] * 200)
  # More than half of a window makes its median.
  assert [line.split(':')[0] for line in printed if 'pass rate' in line] == [
    'step 20',
    'step 120',
    'step 220',
  ]
  assert [line.split(':')[0] for line in printed if 'effective' in line] == ['step 61', 'step 161']


# ---- Of a real run ----


def test_the_recorded_run_is_warned_of_its_pool_and_of_its_middle(recorded, monkeypatch):
  """Held to what its stages returned, not to its metrics; a lower bound is one that it reaches."""
  monkeypatch.setattr(regime, 'MAX_TIMES_REPLAYED', 2.0)
  setup = run.regime_setup(recorded.experiment, recorded.rollout)
  past, printed = regime.History(), []
  for record in metrics.read(recorded.workdir)[1:]:
    past, warnings = regime.observe(setup, past, record)
    printed += warnings
  pool_warning, middle_warning = (text for text in printed if 'stopped rising' not in text)
  retired = len(recorded.steps[20].after.retired_epoch)
  assert tiny.POOL - retired < tiny.QUESTIONS
  assert pool_warning.startswith(f'step 20: {retired} of {tiny.POOL} training questions are')
  held = drawn = 0
  for number in range(4, 23):  # the 20 steps from 3 to 22 without the first
    step = recorded.steps[number]
    middle = {row for row, entry in step.buffer.entries.items() if entry.correctness > 0}
    held += len(middle)
    drawn += sum(
      question.row in middle
      for question, yes in zip(step.plan.questions, step.plan.is_replay_Q)
      if yes
    )
  assert f'held {held / 19:.0f} questions, and {drawn / 19:.0f} of them' in middle_warning


def test_a_resumed_run_warns_as_the_one_that_was_not_stopped(
  recorded, values, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(worker_slot, 'COMMAND', tiny.WORKER)
  monkeypatch.setattr(regime, 'WINDOW', 4)
  monkeypatch.setattr(regime, 'PAUSE', 3)
  monkeypatch.setattr(regime, 'MIN_EFFECTIVE_SAMPLE_SIZE', 1.1)  # every size is below it

  def warnings(folder, num_steps):
    config = copy.deepcopy(values)
    config.num_steps, config.replay.retire = num_steps, 'never'
    opened = experiment.open_experiment(config, str(tmp_path / folder))
    params = jax.device_put(
      recorded.steps[1].params, model.shardings(opened.model, opened.meshes.training)
    )
    with recorded.compiling():
      recording.run_training(opened, params, config)
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith('WARNING: step')]

  whole = warnings('whole', 9)  # replays from step 3 on
  assert [line.split(': ')[1] for line in whole if 'effective' in line] == ['step 6', 'step 9']
  first = warnings('stopped', 7)
  assert first == [line for line in whole if int(line.split()[2][:-1]) <= 7]
  assert first + warnings('stopped', 9) == whole


def test_silent_steps_are_counted_on_by_a_resumed_run(recorded, tmp_path):
  opened = dataclasses.replace(recorded.experiment, workdir=str(tmp_path))
  with metrics.Writer(tmp_path, 0) as writer:
    for step, share in enumerate((1.0, 0.5, 1.0, 1.0), 1):
      writer.write(step, WELL | {'zero_variance': share})
  assert run.silent_steps(metrics.read(opened.workdir)) == 2
