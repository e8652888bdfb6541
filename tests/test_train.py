"""The training loop itself: one recorded run (conftest.py) held to DESIGN's sections 2.1 to 2.3.

Nothing here calls the code under test for an expected value: each sentence is
worked out again from what the stages of the run read and wrote.
"""

import copy
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import experiment, train
from exgrpo_jax.grading import pool
from exgrpo_jax.learner import buffer_arrays, checkpoint, optimizer
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.reporting.step_metrics import OUTCOMES
from exgrpo_jax.runtime import preemption
from exgrpo_jax.runtime.clock import Clock
from tests.helpers import recording, tiny
from tests.helpers.chance import is_correct
from tests.helpers.paths import REPOSITORY, TINY_CONFIG

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS


def groups(step):
  """(question row, is replayed, responses, verdicts, replayed trajectory) of each group."""
  return zip(
    [question.row for question in step.plan.questions],
    step.plan.is_replay_Q.tolist(),
    step.responses,
    step.verdicts,
    step.replays,
    strict=True,
  )


def successes(judged, is_replay):
  return sum(verdict.correct for verdict in judged) + is_replay


def of_stream(epoch):
  """The generator of the question stream: seed 0, purpose 7, then the epoch."""
  return np.random.default_rng(np.random.SeedSequence(0, spawn_key=(7, epoch)))


def epoch_of(step):
  return step.cursor.epoch


def test_the_run_exercises_what_the_others_check(recorded):
  steps = list(recorded.steps.values())
  assert [step.plan.step for step in steps] == list(range(1, tiny.NUM_STEPS + 1))
  assert epoch_of(steps[-1]) >= 3
  ages = [step.plan.step - old.step for step in steps for old in step.replays if old]
  assert max(ages) > 3
  retired_by = {
    (is_replay, row in step.buffer.entries)
    for step in steps
    for row, is_replay, _, judged, _ in groups(step)
    if successes(judged, is_replay) == K and row not in step.buffer.retired_epoch
  }
  assert {(True, True), (False, False)} <= retired_by  # with a replay's help, and without
  returned = {
    row in step.buffer.retired_epoch and epoch_of(step) > step.buffer.retired_epoch[row]
    for step in steps
    for row, *_ in groups(step)
  }
  assert returned == {True, False}
  assert any(
    row in step.buffer.entries and successes(judged, is_replay) == 0
    for step in steps
    for row, is_replay, _, judged, _ in groups(step)
  )
  assert any(len(stored) > 1 for step in steps for stored in step.plan.candidates)
  assert any(
    entry.trajectories[0].step != step.plan.step and len(entry.trajectories) == tiny.STORED
    for step in steps
    for entry in step.after.entries.values()
  )
  assert (
    len({len(response.tokens) for step in steps for group in step.responses for response in group})
    > tiny.RESPONSE / 2
  )
  assert any(
    response.truncated and verdict.correct
    for step in steps
    for _, _, group, judged, _ in groups(step)
    for response, verdict in zip(group, judged)
  )


# What a step works on.


def test_no_question_comes_twice_in_a_step(recorded):
  for step in recorded.steps.values():
    rows = [question.row for question in step.plan.questions]
    assert len(rows) == len(set(rows)) == Q


def test_the_number_replayed_is_the_smaller_of_eligible_and_the_floor_of_the_share(recorded):
  for step in recorded.steps.values():
    eligible = len(step.buffer.entries) if step.buffer.started else 0
    assert sum(step.plan.is_replay_Q) == min(eligible, math.floor(tiny.RATIO * Q))


def test_replayed_questions_come_from_the_buffer_with_all_they_have_stored(recorded):
  for step in recorded.steps.values():
    for question, candidates in zip(step.plan.questions, step.plan.candidates):
      if candidates:
        assert candidates == step.buffer.entries[question.row].trajectories


def test_the_stream_is_the_epochs_permutation_without_replayed_and_earlier_retired_ones(recorded):
  """Read again position by position, with DESIGN's rule for each."""
  epoch, position = 0, 0
  for step in recorded.steps.values():
    retired, fresh = step.buffer.retired_epoch, []
    replayed = {row for row, is_replay, *_ in groups(step) if is_replay}
    wanted = Q - len(replayed)
    while len(fresh) < wanted:
      if position == tiny.POOL:
        epoch, position = epoch + 1, 0
      left = [row for row in range(tiny.POOL) if retired.get(row, epoch) >= epoch]
      row = int(of_stream(epoch).permutation(tiny.POOL)[position])
      position += 1
      if row not in replayed and row not in fresh and (row in left or len(left) < Q):
        fresh.append(row)
    assert {row for row, is_replay, *_ in groups(step) if not is_replay} == set(fresh)
    assert (step.cursor.epoch, step.cursor.position) == (epoch, position)


def test_groups_are_shuffled(recorded):
  """Else every replayed question would stand first, and all in the first minibatch."""
  orders = {tuple(step.plan.is_replay_Q.tolist()) for step in recorded.steps.values()}
  assert len(orders) > 5


# What a step leaves in the buffer.


def test_recording_is_the_rules_applied_group_by_group(recorded):
  """The whole of section 2.2, from an empty buffer to the last step, in plain Python."""
  entries, retired, started = {}, {}, False
  for number, step in recorded.steps.items():
    for row, is_replay, group, judged, _ in groups(step):
      k = successes(judged, is_replay)
      if k == K:
        retired.setdefault(row, epoch_of(step))
        entries.pop(row, None)
      elif started and row not in retired:
        stored = list(entries[row][1]) if row in entries else []
        for response, verdict in zip(group, judged):
          if verdict.correct and response.tokens.tolist() not in [tokens for tokens, *_ in stored]:
            stored.append((response.tokens.tolist(), response.logp.tolist(), 1.0, number))
        if stored:
          entries[row] = (k / K, stored[-tiny.STORED :])
    rate = np.mean([verdict.correct for judged in step.verdicts for verdict in judged])
    started = started or rate > 0
    found = {
      row: (
        entry.correctness,
        [(t.tokens.tolist(), t.logp.tolist(), t.reward, t.step) for t in entry.trajectories],
      )
      for row, entry in step.after.entries.items()
    }
    assert found == entries
    assert step.after.retired_epoch == retired
    assert step.after.started == started


def test_nothing_is_stored_or_replayed_before_the_step_behind_the_one_that_crosses(recorded):
  first, second = recorded.steps[1], recorded.steps[2]
  assert any(verdict.correct for judged in first.verdicts for verdict in judged)
  assert not first.buffer.started and first.after.started and not first.after.entries
  assert not any(second.plan.is_replay_Q) and second.after.entries


def test_a_question_solved_by_the_whole_group_is_gone_at_once(recorded):
  for step in recorded.steps.values():
    for row, is_replay, _, judged, _ in groups(step):
      if successes(judged, is_replay) == K:
        assert row in step.after.retired_epoch and row not in step.after.entries


def test_a_retired_question_is_never_stored_or_replayed_again(recorded):
  for step in recorded.steps.values():
    assert not set(step.after.entries) & set(step.after.retired_epoch)
    assert not {row for row, is_replay, *_ in groups(step) if is_replay} & set(
      step.buffer.retired_epoch
    )
    assert step.buffer.retired_epoch.items() <= step.after.retired_epoch.items()


def test_everything_stored_is_a_success_that_its_step_wrote(recorded):
  written = {
    (number, row, response.tokens.tobytes(), response.logp.tobytes())
    for number, step in recorded.steps.items()
    for row, _, group, judged, _ in groups(step)
    for response, verdict in zip(group, judged)
    if verdict.correct
  }
  for step in recorded.steps.values():
    for row, entry in step.after.entries.items():
      assert 1 <= len(entry.trajectories) <= tiny.STORED
      for t in entry.trajectories:
        assert (t.step, row, t.tokens.tobytes(), t.logp.tobytes()) in written


def test_stored_log_probabilities_are_those_of_the_policy_that_wrote_them(recorded):
  """In float64 from all logits, under the parameters of the writing step."""
  last = recorded.steps[tiny.NUM_STEPS].after
  prompts = recorded.data.prompts
  for row, entry in last.entries.items():
    for t in entry.trajectories:
      logp_T, _ = values_of(recorded, recorded.steps[t.step].params, prompts[row], t.tokens)
      np.testing.assert_allclose(t.logp, logp_T, atol=1e-4)


def values_of(recorded, params, prompt, tokens):
  """(log-probability, entropy) of each token of a response, float64."""
  whole_T = np.concatenate([prompt, tokens])
  logp_TV = tiny.full_log_probabilities(params, recorded.experiment.model, whole_T)[
    len(prompt) - 1 :
  ]
  return logp_TV[np.arange(len(tokens)), tokens], -(np.exp(logp_TV) * logp_TV).sum(-1)


def test_the_replayed_trajectory_has_the_lowest_entropy_under_the_current_policy(recorded):
  not_first = 0
  several = [
    (step, *group)
    for step in recorded.steps.values()
    for group in zip(step.plan.prompts, step.plan.candidates, step.replays)
    if len(group[1]) > 1
  ]
  for step, prompt, candidates, chosen in several[::3]:
    cost = [values_of(recorded, step.params, prompt, t.tokens)[1].mean() for t in candidates]
    place = [t is chosen for t in candidates].index(True)
    assert cost[place] <= min(cost) + 1e-5
    not_first += place > 0
  assert not_first > 2  # the oldest is not always it


# What a step learns from.


def test_every_fresh_question_has_k_responses_and_every_replayed_one_k_minus_1(recorded):
  for step in recorded.steps.values():
    for _, is_replay, group, judged, replayed in groups(step):
      assert len(group) == len(judged) == (K - 1 if is_replay else K)
      assert (replayed is not None) == is_replay


def test_the_batch_is_the_groups_in_order_with_the_replayed_row_last(recorded):
  for number, step in recorded.steps.items():
    batch, b = step.batch, 0
    assert len(batch.tokens_BT) == len(batch.advantage_B) == Q * K
    for index, (_, is_replay, group, _, replayed) in enumerate(groups(step)):
      prompt = step.plan.prompts[index]
      for k, member in enumerate([*group, replayed] if is_replay else group):
        stop = len(prompt) + len(member.tokens)
        expected_T = np.arange(batch.tokens_BT.shape[1])
        inside_T = (expected_T >= len(prompt)) & (expected_T < stop)
        np.testing.assert_array_equal(batch.tokens_BT[b, : len(prompt)], prompt)
        np.testing.assert_array_equal(batch.tokens_BT[b, inside_T], member.tokens)
        np.testing.assert_array_equal(batch.response_mask_BT[b], inside_T)
        np.testing.assert_array_equal(batch.behaviour_logp_BT[b, inside_T], member.logp)
        assert (batch.behaviour_logp_BT[b, ~inside_T] == 0).all()
        assert batch.is_replay_B[b] == (is_replay and k == K - 1)
        assert batch.policy_step_B[b] == (replayed.step if batch.is_replay_B[b] else number)
        b += 1


def test_advantages_are_rewards_less_the_mean_of_the_group(recorded):
  for step in recorded.steps.values():
    reward_QK = np.array(
      [
        [verdict.reward for verdict in judged] + [1.0] * is_replay
        for _, is_replay, _, judged, _ in groups(step)
      ]
    )
    expected_QK = reward_QK - reward_QK.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(step.batch.advantage_B, expected_QK.ravel(), atol=1e-6)


# The update.


@pytest.fixture(scope='module')
def lesson(recorded):
  """(params, batch) of a step whose replayed rows have an advantage."""
  step = next(
    step
    for step in recorded.steps.values()
    if np.abs(step.batch.advantage_B[step.batch.is_replay_B]).sum() > 1
  )
  return step.params, step.batch


SCALE, EPSILON = 0.02, 1e4


def linear(recorded, minibatches):
  """The experiment with an optimiser that is all but linear: parameters move by -SCALE gradient.

  AdamW's first update is rate * g / (|g| + epsilon), for epsilon >> |g| rate / epsilon * g.
  """
  config = recorded.experiment.config
  return dataclasses.replace(
    recorded.experiment,
    config=dataclasses.replace(
      config,
      optimizer=dataclasses.replace(
        config.optimizer,
        minibatches=minibatches,
        learning_rate=SCALE * EPSILON,
        epsilon=EPSILON,
        warmup_updates=0,
        weight_decay=0.0,
        clip_norm=math.inf,
        skip_norm=math.inf,
      ),
    ),
  )


@pytest.fixture(scope='module')
def whole(recorded):
  return linear(recorded, minibatches=1)


def updated(owner, params, batch):
  """(change of the parameters / SCALE, sums as floats) of train.learn from a fresh state."""
  placed = jax.device_put(params, model.shardings(owner.model, owner.mesh))
  state = optimizer.init(owner.config.optimizer, owner.config.num_updates, placed)
  run = types.SimpleNamespace(
    experiment=owner,
    update=experiment.update_spec(owner.config, owner.model, owner.mesh),
    reference=None,
    clock=Clock(),
  )
  before_replay = types.SimpleNamespace(replay_started=False)  # so fresh ratios are clipped
  state, sums = train.learn(run, state, types.SimpleNamespace(plan=before_replay, batch=batch))
  change = jax.tree.map(
    lambda new, old: (np.asarray(new, np.float64) - old) / SCALE, state.params, params
  )
  return change, {name: float(value) for name, value in sums.items()}


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def expected_gradient(config, params, batch):
  """Section 2.3 on all logits at once: fresh rows at ratio 1, replayed ones through f(w)."""
  mask_BT = batch.response_mask_BT[:, 1:]
  logits_BTV = model.hidden_states(config, params, batch.tokens_BT) @ model.unembedding(
    config, params
  )
  logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
  logp_BT = jnp.take_along_axis(logp_BTV, batch.tokens_BT[:, 1:, None], axis=-1)[..., 0]
  entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
  w_BT = jnp.exp(logp_BT - batch.behaviour_logp_BT[:, 1:])
  fresh_BT = jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
  term_BT = jnp.where(batch.is_replay_B[:, None], w_BT / (w_BT + 0.1), fresh_BT)
  policy = (mask_BT * term_BT * batch.advantage_B[:, None]).sum() / (len(mask_BT) * tiny.RESPONSE)
  return -policy - 1e-4 * (mask_BT * entropy_BT).sum() / mask_BT.sum()


def norm(tree):
  return math.sqrt(
    sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
  )


def distance(left, right):
  return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, left, right))


@pytest.fixture(scope='module')
def gradient(recorded, lesson):
  return expected_gradient(recorded.experiment.model, *lesson)


def test_one_minibatch_moves_the_parameters_by_the_gradient_of_all_rows(whole, lesson, gradient):
  change, sums = updated(whole, *lesson)
  assert distance(change, jax.tree.map(lambda x: -np.asarray(x), gradient)) < 1e-3 * norm(gradient)
  assert sums['gradient_norm'] == pytest.approx(norm(gradient), rel=1e-4)
  assert sums['tokens'] == lesson[1].response_mask_BT.sum() and sums['updates'] == 1


def test_replayed_rows_pull(whole, lesson):
  """TRL's replay buffer once did nothing at all, and nobody saw it."""
  params, batch = lesson
  silent = dataclasses.replace(
    batch, advantage_B=np.where(batch.is_replay_B, 0, batch.advantage_B).astype(np.float32)
  )
  as_fresh = dataclasses.replace(batch, is_replay_B=np.zeros_like(batch.is_replay_B))
  change, _ = updated(whole, params, batch)
  assert distance(change, updated(whole, params, silent)[0]) > 0.001 * norm(change)
  assert distance(change, updated(whole, params, as_fresh)[0]) > 0.01 * norm(change)


def test_the_first_minibatch_is_on_policy_whatever_the_sampler_says(whole, lesson):
  """The ratio of fresh rows is 1 by construction; that of replayed rows is not."""
  params, batch = lesson

  def shifted(rows_B):
    logp_BT = batch.behaviour_logp_BT + (3 * batch.response_mask_BT * rows_B[:, None])
    return updated(
      whole, params, dataclasses.replace(batch, behaviour_logp_BT=logp_BT.astype(np.float32))
    )

  change, sums = updated(whole, params, batch)
  assert sums['clipped'] == 0
  same, sums = shifted(~batch.is_replay_B)
  assert distance(change, same) == 0 and sums['clipped'] == 0
  assert distance(change, shifted(batch.is_replay_B)[0]) > 0


def test_two_minibatches_cover_every_row_once(recorded, lesson):
  """Consecutive halves of whole groups, the second at the parameters the first one left.

  The steps are small, so fresh ratios are 1 there too. AdamW's second momentum with bias
  correction is (.9 g1 + g2) / 1.9.
  """
  params, batch = lesson
  change, sums = updated(linear(recorded, minibatches=2), params, batch)
  half = Q * K // 2
  first, second = (  # twice the same rows have the gradient of the rows, and no new shape
    expected_gradient(
      recorded.experiment.model,
      params,
      jax.tree.map(lambda x, rows=rows: np.concatenate([x[rows], x[rows]]), batch),
    )
    for rows in (slice(half), slice(half, None))
  )
  expected = jax.tree.map(
    lambda a, b: -np.asarray(a) - np.asarray(0.9 * a + b) / 1.9, first, second
  )
  assert norm(second) > 0.2 * norm(first)  # it has a say
  assert distance(change, expected) < 0.05 * norm(expected)
  assert sums['tokens'] == batch.response_mask_BT.sum() and sums['updates'] == 2
  assert sums['replay_tokens'] == batch.response_mask_BT[batch.is_replay_B].sum()


# What a run leaves behind.


def test_a_run_writes_every_metric(recorded):
  records = {int(record['step']): record for record in metrics.read(recorded.workdir)}
  assert list(records) == list(range(tiny.NUM_STEPS + 1))
  always = {
    'reward',
    'pass_rate/all',
    'pass_rate/fresh',
    'zero_variance',
    'entropy',
    'length/mean',
    'length/max',
    'length/truncated',
    'gradient_norm',
    'skipped_updates',
    'loss',
    'clip_share',
    'epoch',
    'buffer/questions',
    'buffer/retired',
    'buffer/trajectories',
    *(f'buffer/bucket_{k}' for k in range(K)),
    'time/step',
    *(f'grading/{outcome.replace(" ", "_")}' for outcome in OUTCOMES),
    'time/device_wait',
    *(
      f'time/{phase}'
      for phase in (
        'pick',
        'reshard',
        'generate',
        'old_logprobs',
        'grade',
        'assemble',
        'record',
        'plan',
        'await_update',
      )
    ),
    'speed/tokens_per_second',
    'speed/compilations',
    'time/compile_total',
  }
  of_replay = {
    'pass_rate/replay',
    'replay/ratio_mean',
    'replay/ratio_max',
    'replay/age_mean',
    'replay/effective_sample_size',
  }
  for number, step in recorded.steps.items():
    found = records[number]
    assert always <= set(found)
    assert (of_replay <= set(found)) if any(step.replays) else not of_replay & set(found)
    assert ({'parity/mean', 'parity/max'} <= set(found)) == (number in (1, 1 + tiny.COMPARED_EVERY))
    assert all(math.isfinite(value) for value in found.values())


def test_metrics_say_what_happened(recorded):
  for record in metrics.read(recorded.workdir)[1:]:
    step = recorded.steps[int(record['step'])]
    rewards = [
      [v.reward for v in judged] + [1.0] * is_replay for _, is_replay, _, judged, _ in groups(step)
    ]
    assert record['reward'] == pytest.approx(
      np.mean([v.reward for judged in step.verdicts for v in judged])
    )
    assert record['grading/correct'] == record['pass_rate/all']
    assert record['zero_variance'] == np.mean([len(set(group)) == 1 for group in rewards])
    assert record['buffer/retired'] == len(step.after.retired_epoch)
    assert sum(record[f'buffer/bucket_{k}'] for k in range(K)) == len(step.after.entries)
    assert record['length/total'] == sum(len(r.tokens) for g in step.responses for r in g)
    if ages := [step.plan.step - old.step for old in step.replays if old]:
      assert record['replay/age_mean'] == np.mean(ages)


def test_evaluation_comes_first_every_so_often_and_last(recorded):
  evaluated = [
    record['step']
    for record in metrics.read(recorded.workdir)
    if 'eval/evaluation/pass@1' in record
  ]
  assert evaluated == [0, tiny.NUM_STEPS // 2, tiny.NUM_STEPS]
  for step in evaluated:
    (path,) = (recorded.workdir / 'evaluation').glob(f'step_{int(step):06d}_*.jsonl')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row['answer'] for row in rows] == ['0', '1', '2', '3']
    assert all(row['correct'] == [is_correct(row['responses'][0], row['answer'])] for row in rows)


def test_a_run_leaves_pictures_samples_and_tensorboard_files(recorded):
  assert (recorded.workdir / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert any((recorded.workdir / 'tensorboard').iterdir())
  samples = sorted((recorded.workdir / 'samples').iterdir())
  assert [path.name for path in samples] == [
    f'step_{step:06d}.jsonl' for step in range(1, tiny.NUM_STEPS + 1)
  ]
  rows = [json.loads(line) for line in samples[-1].read_text().splitlines()]
  assert {row['replayed'] for row in rows} == {True, False}
  assert any(row['replayed'] and row['written_in_step'] < tiny.NUM_STEPS for row in rows)


def test_without_a_share_of_replay_it_is_plain_grpo(recorded, values, tmp_path, monkeypatch):
  monkeypatch.setattr(pool, 'COMMAND', tiny.WORKER)
  config = copy.deepcopy(values)
  config.replay.ratio, config.num_steps, config.warm_start.num_updates = 0.0, 3, 0
  opened = experiment.open_experiment(config, str(tmp_path))
  with recorded.compiling():
    recording.run_training(opened)
  for record in metrics.read(tmp_path)[1:]:
    assert record['reward'] > 0 and record['buffer/started'] == 0  # successes, but none kept
    assert record['buffer/questions'] == record['buffer/trajectories'] == record['replay/rows'] == 0
    assert not {'pass_rate/replay', 'replay/ratio_mean', 'replay/age_mean'} & set(record)
  rows = [
    json.loads(line)
    for line in (tmp_path / 'samples' / 'step_000003.jsonl').read_text().splitlines()
  ]
  assert len(rows) == Q and not any(row['replayed'] for row in rows)


# Killed and resumed.


def test_a_run_that_is_killed_and_resumed_is_bit_for_bit_the_run_that_was_not(
  recorded, data, tmp_path
):
  workdir = tmp_path / 'killed'
  command = [
    sys.executable,
    '-m',
    'exgrpo_jax.train',
    f'--config={TINY_CONFIG}',
    f'--workdir={workdir}',
    f'--config.data.train={data.train}',
    f'--config.warm_start.data={data.train}',
    f"--config.data.evaluation=('{data.evaluation}',)",
    f'--config.data.cache_dir={data.cache}',
  ]
  env = os.environ | {
    'JAX_COMPILATION_CACHE_DIR': str(recorded.cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PLATFORMS': 'cpu',
  }
  with open(tmp_path / 'log', 'w+') as log:
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log)
    while not (workdir / 'checkpoints' / str(tiny.SAVED_EVERY)).exists():
      assert process.poll() is None, (tmp_path / 'log').read_text()
      time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
  assert not (workdir / 'checkpoints' / str(tiny.NUM_STEPS)).exists()
  last = max(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())
  with open(workdir / 'metrics.jsonl', 'a') as file:  # as if it had been killed a step later
    file.write(json.dumps({'step': last + 1, 'reward': -1.0}) + '\n')
  done = subprocess.run(command, cwd=REPOSITORY, env=env, text=True, capture_output=True)
  assert done.returncode == 0, done.stderr
  assert 'resumed after step' in done.stdout and 'warm start' not in done.stdout

  left, right = (last_snapshot(recorded, path) for path in (recorded.workdir, workdir))
  jax.tree.map(np.testing.assert_array_equal, left.state, right.state)
  jax.tree.map(
    np.testing.assert_array_equal,
    buffer_arrays.flatten(left.buffer),
    buffer_arrays.flatten(right.buffer),
  )
  assert left.cursor == right.cursor and left.step == right.step == tiny.NUM_STEPS
  assert tiny.lasting(recorded.workdir) == tiny.lasting(workdir)
  samples = [
    {path.name: path.read_text() for path in (folder / 'samples').iterdir()}
    for folder in (recorded.workdir, workdir)
  ]
  assert samples[0] == samples[1]


@pytest.fixture
def kill_once(monkeypatch):
  """Sends this process SIGTERM when a run enters a phase for the so manieth time."""
  waiting = []  # the phase, as often as it will be entered
  enter = Clock.__call__

  def entering(clock, phase, *args, **kwargs):
    if phase in waiting:
      waiting.pop()
      if not waiting:
        os.kill(os.getpid(), signal.SIGTERM)
    return enter(clock, phase, *args, **kwargs)

  monkeypatch.setattr(Clock, '__call__', entering)
  return lambda phase, entry: waiting.extend([phase] * entry)


def test_a_run_that_is_told_to_stop_finishes_its_step_saves_it_and_goes_on(
  recorded, values, tmp_path, monkeypatch, kill_once, capsys
):
  monkeypatch.setattr(pool, 'COMMAND', tiny.WORKER)
  config = copy.deepcopy(values)
  config.num_steps = 10
  opened = experiment.open_experiment(config, str(tmp_path))

  def run():
    params = jax.device_put(recorded.steps[1].params, model.shardings(opened.model, opened.mesh))
    with recorded.compiling():
      recording.run_training(opened, params)

  assert tiny.SAVED_EVERY == 4
  for phase, entry, step in (
    ('generate', 2, 2),
    ('grade', 2, 4),
    ('await_update', 2, 6),
    ('save', 1, 8),
  ):
    kill_once(phase, entry)
    with pytest.raises(SystemExit) as stopped:
      run()
    assert stopped.value.code == preemption.EXIT_CODE
    assert f'saved after step {step} of 10' in capsys.readouterr().err
  run()
  snapshot = last_snapshot(recorded, tmp_path)
  assert snapshot.step == 10
  jax.tree.map(np.testing.assert_array_equal, snapshot.state.params, recorded.steps[11].params)
  jax.tree.map(
    np.testing.assert_array_equal,
    buffer_arrays.flatten(snapshot.buffer),
    buffer_arrays.flatten(recorded.steps[10].after),
  )


def last_snapshot(recorded, workdir):
  owner = recorded.experiment
  params = jax.device_put(recorded.steps[1].params, model.shardings(owner.model, owner.mesh))
  state = optimizer.init(owner.config.optimizer, owner.config.num_updates, params)
  with checkpoint.open_manager(str(workdir)) as manager:
    return checkpoint.restore(manager, manager.latest_step(), checkpoint.abstract(state))
