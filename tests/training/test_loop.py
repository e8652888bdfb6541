"""The training loop: one recorded run (conftest.py) compared with docs/algorithm.md.

test_kinds_of_run.py tests the properties of all kinds of run.

No expected value comes from the code under test. The tests recompute each value from the recorded
inputs and outputs of the run's stages.
"""

import json
import math
import re
import types

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.reporting import metrics
from exgrpo_jax.reporting.step_rows import OUTCOMES
from exgrpo_jax.runtime.clock import Clock
from exgrpo_jax.training import loop
from tests.helpers import recording, tiny
from tests.helpers.chance import is_correct

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS


def groups(step):
  """Return (question row, is replayed, responses, verdicts, replayed trajectory) of each group."""
  return zip(
    [question.row for question in step.plan.questions],
    step.plan.is_replay_Q.tolist(),
    step.responses,
    step.verdicts,
    step.replays,
    strict=True,
  )


def successes(verdicts, is_replay):
  return sum(verdict.correct for verdict in verdicts) + is_replay


def stream_generator(epoch):
  """Return the question stream's generator, from the seed, purpose 7 and the epoch."""
  return np.random.default_rng(np.random.SeedSequence(tiny.SEED, spawn_key=(7, epoch)))


def test_the_run_exercises_what_the_other_tests_check(recorded):
  steps = list(recorded.steps.values())
  assert [step.plan.step for step in steps] == list(range(1, tiny.NUM_STEPS + 1))
  assert steps[-1].plan.epoch >= 3 and any(any(step.replays) for step in steps)
  retired_before = {
    row in step.buffer.retired_epoch and step.plan.epoch > step.buffer.retired_epoch[row]
    for step in steps
    for row, *_ in groups(step)
  }
  assert retired_before == {True, False}  # the stream also drew retired questions
  assert any(len(stored) > 1 for step in steps for stored in step.plan.candidates)
  sizes = [len(entry.trajectories) for step in steps for entry in step.after.entries.values()]
  assert max(sizes) == tiny.STORED


# ---- A step's questions ----


def test_a_step_replays_its_share_of_stored_questions_without_repeats(recorded):
  for step in recorded.steps.values():
    rows = [question.row for question in step.plan.questions]
    assert len(rows) == len(set(rows)) == Q
    eligible = len(step.buffer.entries) if step.buffer.started else 0
    assert sum(step.plan.is_replay_Q) == min(eligible, math.floor(tiny.RATIO * Q))
    for row, candidates in zip(rows, step.plan.candidates):
      if candidates:
        assert candidates == step.buffer.entries[row].trajectories


def test_the_stream_is_the_epochs_permutation_without_replayed_and_retired_questions(recorded):
  """The test walks through the permutation according to docs/algorithm.md."""
  epoch, position = 0, 0
  for step in recorded.steps.values():
    retired, fresh = step.buffer.retired_epoch, []
    replayed = {row for row, is_replay, *_ in groups(step) if is_replay}
    wanted = Q - len(replayed)
    while len(fresh) < wanted:
      if position == tiny.POOL:
        epoch, position = epoch + 1, 0
      unretired = [row for row in range(tiny.POOL) if retired.get(row, epoch) >= epoch]
      row = int(stream_generator(epoch).permutation(tiny.POOL)[position])
      position += 1
      is_read = row in unretired or len(unretired) < Q
      if row not in replayed and row not in fresh and is_read:
        fresh.append(row)
    assert {row for row, is_replay, *_ in groups(step) if not is_replay} == set(fresh)
    assert (step.plan.epoch, step.plan.cursor.position) == (epoch, position)


# ---- A run's output ----


ALWAYS = """reward pass_rate/all pass_rate/fresh groups/zero_advantage entropy length/mean
  length/max length/truncated groups/solved_by_all groups/solved_by_none probability/fresh
  code_blocks/fresh gradient_norm optimizer/skipped loss policy/clip_fraction
  policy/outside_clip_range epoch buffer/questions buffer/retired buffer/trajectories time/step
  time/device_wait time/pick time/reshard time/generate time/old_logprobs time/grade time/assemble
  time/record time/plan time/records time/await_update perf/tokens_per_second perf/compilations
  time/compile_total rollout/slots_busy"""
WITH_REPLAY = """pass_rate/replay replay/ratio_mean replay/ratio_max replay/age_mean
  replay/effective_sample_size replay/shaped_mean replay/shaped_variance replay/times_mean
  replay/times_max length/replayed probability/replayed code_blocks/replayed"""


def test_a_run_writes_every_metric(recorded):
  records = {int(record['step']): record for record in metrics.read(recorded.workdir)}
  assert list(records) == list(range(tiny.NUM_STEPS + 1))
  always = {*ALWAYS.split(), *(f'grading/{outcome.replace(" ", "_")}' for outcome in OUTCOMES)}
  with_replay = {*WITH_REPLAY.split(), *(f'replay/bucket_{k}' for k in range(K))}
  for number, step in recorded.steps.items():
    record = records[number]
    assert always <= set(record)
    assert with_replay & set(record) == (with_replay if any(step.replays) else set())
    compared = {'rollout_mismatch/logprob_mean', 'rollout_mismatch/logprob_max'}
    assert (compared <= set(record)) == (number in (1, 1 + tiny.COMPARED_EVERY))


def lines(path):
  return list(map(json.loads, path.read_text().splitlines()))


def test_the_policy_is_evaluated_at_the_start_at_intervals_and_at_the_end(recorded):
  records = metrics.read(recorded.workdir)
  evaluated = [one['step'] for one in records if 'eval/data_evaluation/pass@1' in one]
  assert evaluated == [0, tiny.NUM_STEPS // 2, tiny.NUM_STEPS]
  for step in evaluated:
    (path,) = (recorded.workdir / 'evaluation').glob(f'step_{int(step):06d}_*.jsonl')
    rows = lines(path)
    assert [row['answer'] for row in rows] == ['0', '1', '2', '3']
    for row in rows:
      graded = re.sub('<pad>|</s>|<unk>', '', row['responses'][0])  # shown, but not graded
      assert row['correct'] == [is_correct(graded, row['answer'])]
      assert row['truncated'] == [not row['responses'][0].endswith('</s>')]


def test_a_run_writes_samples(recorded):
  samples = sorted((recorded.workdir / 'samples').iterdir())
  assert [path.name for path in samples] == [
    f'step_{step:06d}.jsonl' for step in range(1, tiny.NUM_STEPS + 1)
  ]
  last = max(number for number, step in recorded.steps.items() if any(step.replays))
  rows = lines(samples[last - 1])
  assert {row['replayed'] for row in rows} == {True, False}
  assert any(row['replayed'] and row['written_in_step'] < last for row in rows)


@pytest.mark.parametrize(
  ('returned', 'message'),
  [
    *((x, 'Return a dict that maps metric names to') for x in (0.0, 3.0, ['x'])),
    *(({'x': x}, 'Return a dict that maps metric names to') for x in (None, [1.0], 'high')),
    ({'eval/x': 1.0}, "the run itself logs eval/x. Choose other names, such as 'mine/eval/x'"),
  ],
)
def test_a_callback_must_return_numbers_under_new_names(returned, message):
  run = types.SimpleNamespace(callbacks=[lambda *_: returned], clock=Clock())
  with pytest.raises(InputError, match=message):
    loop.observe(run, None, None)


def test_two_callbacks_must_not_return_the_same_metric():
  run = types.SimpleNamespace(callbacks=[lambda *_: {'mine/x': 1.0}] * 2, clock=Clock())
  with pytest.raises(InputError, match=r'^callbacks: two of them return mine/x'):
    loop.observe(run, None, None)


@pytest.mark.full
def test_a_run_stops_if_all_gradings_of_a_step_fail(recorded, config, tmp_path):
  config.grading.update(dict(rewards=('tests.helpers.misbehaving:always_fails',), workers=1))
  config.warm_start.num_updates = 0
  opened = experiment.open_experiment(config, str(tmp_path))
  message = rf'^step 1: grading failed for all {Q * K} .*OSError: .*, config.environment'
  with recorded.compiling(), pytest.raises(InputError, match=message):
    recording.run_training(opened)
