"""Every switch of docs/algorithm.md in a whole run, held to numbers computed without the code.

Few runs of tests/helpers/tiny.py share all values. Each is recorded stage by stage, and what it
drew, stored and learnt from is computed again in plain Python and NumPy.
"""

import copy
import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Trajectory
from exgrpo_jax.experiment import experiment
from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime.clock import Clock
from exgrpo_jax.training import loop
from exgrpo_jax.training.run import Kept
from tests.helpers import losses, recording, tiny

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS
RUNS = {
  'power': {
    'replay.max_trajectories': 0,
    'replay.question_selection': 'linear',
    'replay.trajectory_selection': 'highest_perplexity',
    'objective.shaping': 'power',
    'objective.shaping_exponent': 0.25,
    'objective.baseline': 'fresh',
    'objective.normalize_std': 'sample',
    'optimizer.minibatches': 1,
  },
  'uncorrected': {
    'replay.question_selection': 'linear_clip',
    'replay.failed': 'bucket_0',
    'objective.importance_correction': False,
    'objective.shaping': 'none',
    'objective.normalize_std': 'population',
  },
  'log': {
    'replay.question_selection': 'square_root',
    'replay.lower_bound': 0.25,
    'objective.shaping': 'log',
    'objective.shaping_weight': 0.3,
    'objective.baseline': 'fresh',
    'optimizer.minibatches': 1,
  },
  'ratio_plus_log': {
    'replay.question_selection': 'uniform',
    'replay.upper_bound': 0.5,
    'objective.shaping': 'ratio_plus_log',
    'optimizer.minibatches': 1,
  },
  'medium_on_policy': {
    'replay.ratio': 0.0,
    'replay.difficulty': 'medium',
    'optimizer.minibatches': 1,
  },
}


@pytest.fixture(scope='module', params=RUNS)
def run(request, values, make_once, compiled):
  """The recording of one of RUNS."""
  changed = copy.deepcopy(values)
  changed.num_steps = 7
  changed.evaluation.every = changed.checkpoint.every = changed.num_steps
  changed.warm_start.num_updates = 0  # what counts as a success here needs none
  changed.update_from_flattened_dict(RUNS[request.param])
  folder = make_once(
    f'switches_{request.param}', lambda folder: recording.record(changed, folder, compiled)
  )
  return recording.load(changed, folder, compiled)


def groups(step):
  return zip(step.plan.questions, step.plan.is_replay_Q, step.responses, step.verdicts)


def successes(verdicts, is_replay):
  return sum(verdict.correct for verdict in verdicts) + int(is_replay)


def test_a_run_replays_unless_its_ratio_is_0(run):
  config, records = run.experiment.config, metrics.read(run.workdir)[1:]
  assert [record['step'] for record in records] == list(range(1, config.num_steps + 1))
  assert all(math.isfinite(value) for record in records for value in record.values())
  replayed = sum(record['replay/rows'] for record in records)
  if config.replay.ratio:
    assert replayed > 6
    assert any(step.batch.advantage_B[step.batch.is_replay_B].any() for step in run.steps.values())
  else:
    assert replayed == sum(record['buffer/questions'] for record in records) == 0


def with_successes(stored, responses, verdicts, limit):
  """(tokens, log-probabilities) stored and of the new successes, the newest `limit` of them."""
  stored = list(stored)
  for response, verdict in zip(responses, verdicts):
    if verdict.correct and response.tokens.tolist() not in [tokens for tokens, _ in stored]:
      stored.append((response.tokens.tolist(), response.logp.tolist()))
  return stored[-limit:] if limit else stored


def test_a_run_stores_what_limit_bounds_and_failed_say(run):
  """Group by group in plain Python; correctness in quarters."""
  config = run.experiment.config.replay
  entries, retired, started = {}, set(), False
  unrecorded, most = set(), 0
  for number, step in run.steps.items():
    for question, is_replay, responses, verdicts in groups(step):
      row, k = question.row, successes(verdicts, is_replay)
      if k == K and config.ratio:
        retired.add(row)
        entries.pop(row, None)
      elif k == 0 and config.failed == 'bucket_0' and row in entries:
        entries[row] = (0, entries[row][1])
      elif config.lower_bound * K < k <= config.upper_bound * K:
        if started and row not in retired:
          _, stored = entries.get(row, (0, []))
          stored = with_successes(stored, responses, verdicts, config.max_trajectories)
          entries[row] = (k, stored)
          most = max(most, len(stored))
      elif k > 0:
        unrecorded.add(k)
    correct = [verdict.correct for verdicts in step.verdicts for verdict in verdicts]
    started = started or (config.ratio > 0 and any(correct))
    assert entries == {
      row: (
        round(K * entry.correctness),
        [(t.tokens.tolist(), t.logp.tolist()) for t in entry.trajectories],
      )
      for row, entry in step.after.entries.items()
    }, number
    assert set(step.after.retired_epoch) == retired
  # So that each value is told from the default.
  assert (most > tiny.STORED) == (config.max_trajectories == 0)
  assert unrecorded == {(0.25, 1.0): {1}, (0.0, 0.5): {3}}.get(
    (config.lower_bound, config.upper_bound), set()
  )


# Of buckets 0 … 3, as in docs/algorithm.md.
WEIGHTS = {
  'linear': [0, 1, 2, 3],
  'linear_clip': [0, 1, 2, 2],
  'square_root': [0, 1, 2**0.5, 3**0.5],
  'uniform': [1, 1, 1, 1],
  'gaussian': [math.exp(-2), math.exp(-0.5), 1, math.exp(-0.5)],
}


def test_a_plan_draws_buckets_by_their_weights(run):
  """The question drawn by each of 800 plans, from buckets of one question each."""
  config = dataclasses.replace(run.rollout.replay, ratio=0.2, difficulty='all')  # 1 of 6 questions
  rollout = dataclasses.replace(run.rollout, replay=config)
  stored = (Trajectory(np.array([5], np.int32), np.zeros(1, np.float32), reward=1.0, step=1),)
  entries = {row: replay.Entry(row / 4, prompt_length=3, trajectories=stored) for row in range(4)}
  buffer, count_K = replay.Buffer(entries=entries, started=True), np.zeros(4)
  for step in range(800):
    plan, _ = rollout.plan(buffer, Cursor(), step)
    (row,) = (q.row for q, is_replay in zip(plan.questions, plan.is_replay_Q) if is_replay)
    count_K[row] += 1
  weight_K = np.array(WEIGHTS[config.question_selection])
  expected_K = 800 * weight_K / weight_K.sum()
  drawn_K = expected_K > 0
  assert (count_K[~drawn_K] == 0).all()
  chi_square = ((count_K - expected_K)[drawn_K] ** 2 / expected_K[drawn_K]).sum()
  assert chi_square < 16.3  # 3 degrees, p = .001


def test_a_run_replays_the_least_probable_success_where_told(run):
  if run.experiment.config.replay.trajectory_selection != 'highest_perplexity':
    pytest.skip('another run selects by perplexity')
  not_first = 0
  for step in run.steps.values():
    for prompt, stored, chosen in zip(step.plan.prompts, step.plan.candidates, step.replays):
      if len(stored) > 1:
        means = [run.values_of(step.params, prompt, t.tokens)[0].mean() for t in stored]
        index = [t is chosen for t in stored].index(True)
        assert means[index] <= min(means) + 1e-5
        not_first += index > 0
  assert not_first > 0


def test_a_run_takes_advantages_against_the_mean_and_by_the_standard_deviation_told(run):
  kind, baseline = (
    getattr(run.experiment.config.objective, name) for name in ('normalize_std', 'baseline')
  )
  between = 0  # replayed groups in which the two means differ
  for step in run.steps.values():
    for advantage_K, (_, is_replay, _, verdicts) in zip(
      step.batch.advantage_B.reshape(Q, K), groups(step)
    ):
      k = successes(verdicts, is_replay)
      squares = k * (1 - k / 4) ** 2 + (4 - k) * (k / 4) ** 2  # of distances to the mean k / 4
      scale = {'off': 1, 'population': math.sqrt(squares / 4), 'sample': math.sqrt(squares / 3)}
      rewards = np.array([verdict.reward for verdict in verdicts] + [1.0] * int(is_replay))
      mean_K = np.full(4, k / 4)
      if is_replay and baseline == 'fresh':
        mean_K[:3] = (k - 1) / 3
        between += k < 4
      expected_K = (rewards - mean_K) / (scale[kind] if squares else 1)
      np.testing.assert_allclose(advantage_K, expected_K, rtol=1e-4, atol=1e-6)
  assert (between > 0) == (baseline == 'fresh')


def test_the_loss_of_every_update_is_the_formula(run):
  """From all logits under the parameters before the update, in float64, by losses.formula."""
  config = run.experiment.config
  for number, step in run.steps.items():
    assert len(step.updates) == config.optimizer.minibatches
    for update in step.updates[:: config.optimizer.minibatches - 1 or 1]:
      batch = update.batch
      if not batch.response_mask_BT.any():  # no question of the difficulty trained on
        assert update.sums['loss'] == 0
        continue
      logp_BT = np.zeros(batch.tokens_BT.shape)
      entropy_BT = np.zeros_like(logp_BT)
      for b, mask_T in enumerate(batch.response_mask_BT > 0):
        if mask_T.any():
          (start, *_, last) = [*np.flatnonzero(mask_T)] * 2
          tokens_T = batch.tokens_BT[b, : last + 1]
          logp_BT[b, mask_T], entropy_BT[b, mask_T] = run.values_of(
            update.params, tokens_T[:start], tokens_T[start:]
          )
      expected = losses.formula(
        logp_BT,
        entropy_BT,
        batch,
        logp_BT,  # the reference, for a KL of coefficient 0
        config.objective,
        clip=update.clip,
        first=update.is_first,
        constant=logp_BT,
        max_response=tiny.RESPONSE,
      )
      assert update.sums['loss'] == pytest.approx(expected, rel=1e-3, abs=1e-6), number


def test_without_importance_correction_the_step_takes_replays_for_its_own(run):
  config, farthest = run.experiment.config, 0.0
  for step in run.steps.values():
    for (_, is_replay, _, _), prompt, b in zip(
      groups(step), step.plan.prompts, range(K - 1, Q * K, K)
    ):
      if is_replay:
        own = step.replays[b // K]
        (stored,) = [
          t for t in step.plan.candidates[b // K] if np.array_equal(t.tokens, own.tokens)
        ]
        now_T, _ = run.values_of(step.params, prompt, own.tokens)
        taken_T = step.batch.behaviour_logp_BT[b, step.batch.response_mask_BT[b] > 0]
        is_corrected = config.objective.importance_correction
        np.testing.assert_allclose(taken_T, stored.logp if is_corrected else now_T, atol=1e-4)
        farthest = max(farthest, np.abs(now_T - stored.logp).max())
    first, *later = (update.sums for update in step.updates)
    if not config.objective.importance_correction and first['replay_tokens']:
      assert first['ratio'] == first['ratio_squared'] == first['replay_tokens']
      assert first['ratio_max'] == 1
      assert all(sums['ratio'] != sums['replay_tokens'] for sums in later if sums['replay_tokens'])
  assert farthest > 0.01 or not config.replay.ratio


def test_on_policy_training_on_one_difficulty_masks_the_other_groups(run):
  if run.experiment.config.replay.difficulty == 'all':
    pytest.skip('another run trains on one difficulty')
  seen = set()
  for step in run.steps.values():
    solved_Q = [successes(verdicts, False) for verdicts in step.verdicts]
    trained_Q = (step.batch.response_mask_BT > 0).any(axis=1).reshape(Q, K)
    np.testing.assert_array_equal(trained_Q, np.repeat([[k == 2] for k in solved_Q], K, axis=1))
    assert len(step.batch.advantage_B) == Q * K and [len(g) for g in step.responses] == [K] * Q
    seen |= set(solved_Q)
    (update,) = step.updates
    assert update.clip  # replay never starts
    assert update.sums['tokens'] == step.batch.response_mask_BT.sum()
  assert {0, 1, 2, 3, 4} == seen


def learn(run, params, batch):
  """(skipped updates, gradient norm) of a step on this batch."""
  opened = run.experiment
  params = jax.device_put(params, model.shardings(opened.model, opened.meshes.training))
  state = optimizer.init(opened.config.optimizer, opened.config.num_updates, params)
  stand_in = types.SimpleNamespace(
    experiment=opened,
    update=experiment.update_spec(opened.config, opened.model, opened.meshes.training),
    kept=Kept(),
    clock=Clock(),
  )
  plan = types.SimpleNamespace(replay_started=True)
  with run.compiling():
    _, sums = loop.learn(stand_in, state, types.SimpleNamespace(plan=plan, batch=batch))
  return float(sums['skipped']), float(sums['gradient_norm'])


def test_without_importance_correction_the_first_minibatch_has_ratio_1_by_construction(run):
  """Whatever was computed anew, as for fresh rows; in the second minibatch it counts."""
  if run.experiment.config.objective.importance_correction:
    pytest.skip('another run does not correct')
  half = Q * K // 2

  def replayed_with_advantage(batch):
    return batch.is_replay_B & (batch.advantage_B != 0)

  step = next(
    step
    for step in run.steps.values()
    if replayed_with_advantage(step.batch)[:half].any()
    and replayed_with_advantage(step.batch)[half:].any()
  )

  def learn_with_shifted_logp(rows):
    shift_BT = 3 * step.batch.response_mask_BT * step.batch.is_replay_B[:, None]
    logp_BT = step.batch.behaviour_logp_BT.copy()
    logp_BT[rows] += shift_BT[rows]
    return learn(run, step.params, dataclasses.replace(step.batch, behaviour_logp_BT=logp_BT))

  as_it_was = learn_with_shifted_logp(slice(0))
  assert learn_with_shifted_logp(slice(half)) == as_it_was
  assert learn_with_shifted_logp(slice(half, None)) != as_it_was


def test_a_ratio_beyond_float32_is_harmless_at_advantage_0_and_else_refused(run):
  config = run.experiment.config
  if config.optimizer.minibatches != 1 or not config.replay.ratio:
    pytest.skip('other runs have a single minibatch with replayed rows')
  step = next(
    step for step in run.steps.values() if step.batch.advantage_B[step.batch.is_replay_B].any()
  )
  batch = step.batch
  absurd_BT = np.where(batch.is_replay_B[:, None], -900.0, batch.behaviour_logp_BT)
  absurd_BT = (absurd_BT * batch.response_mask_BT).astype(np.float32)
  silent_B = np.where(batch.is_replay_B, 0, batch.advantage_B).astype(np.float32)
  silent = dataclasses.replace(batch, behaviour_logp_BT=absurd_BT, advantage_B=silent_B)
  skipped, gradient_norm = learn(run, step.params, silent)
  assert skipped == 0 and 0 < gradient_norm < config.optimizer.skip_norm
  loud = dataclasses.replace(batch, behaviour_logp_BT=absurd_BT)
  has_ratio = config.objective.shaping != 'log'
  assert learn(run, step.params, loud)[0] == has_ratio
