"""Every switch of docs/algorithm.md in a whole run, held to numbers computed without the code.

Few runs of tests/helpers/tiny.py share all values. Each is recorded stage by stage, and what it
drew, stored and learnt from is computed again in plain Python and NumPy.
"""

import copy
import math

import numpy as np
import pytest

from exgrpo_jax.reporting import metrics
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
    'objective.second_moment': 1e-3,
    'optimizer.minibatches': 1,
  },
  'uncorrected': {
    'replay.question_selection': 'linear_clip',
    'replay.failed': 'bucket_0',
    'replay.lower_bound': 0.25,
    'objective.importance_correction': False,
    'objective.shaping': 'none',
    'objective.normalize_std': 'population',
  },
  'balanced': {
    'replay.question_selection': 'hardest',
    'replay.trajectory_selection': 'smallest_drop',
    'replay.max_age': 2.0,
    'objective.beta': 0.3,
    'objective.replay_advantage': 'balanced',
  },
  'revisit': {
    'replay.row': False,
    'replay.question_selection': 'uniform',
    'replay.age_decay': 1e-3,  # so small that no older one is drawn before a newer one
    'optimizer.minibatches': 1,
  },
  'all_kept': {
    'replay.keep': 'all',
    'replay.retire': 'never',
    'replay.question_selection': 'advantage',
    'replay.trajectory_selection': 'random',
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
  return zip(step.plan.questions, step.replays, step.responses, step.verdicts)


def successes(verdicts, replayed):
  return sum(verdict.correct for verdict in verdicts) + int(bool(replayed and replayed.correct))


def test_a_run_replays_unless_its_ratio_is_0(run):
  config, records = run.experiment.config, metrics.read(run.workdir)[1:]
  assert [record['step'] for record in records] == list(range(1, config.num_steps + 1))
  assert all(math.isfinite(value) for record in records for value in record.values())
  drawn, rows = (
    sum(record[f'replay/{name}'] for record in records) for name in ('questions', 'rows')
  )
  if config.replay.ratio:
    assert drawn > 6 and rows == drawn * config.replay.row
    has_signal = any(
      step.batch.advantage_B[step.batch.is_replay_B].any() for step in run.steps.values()
    )
    assert has_signal == config.replay.row
  else:
    assert drawn == rows == sum(record['buffer/questions'] for record in records) == 0


def test_a_run_draws_and_replays_what_its_rules_say(run):
  config = run.experiment.config.replay
  ages, passed_over = [], 0
  in_order = config.question_selection == 'hardest' or config.age_decay < 1
  for number, step in run.steps.items():
    drawn = {q.row for q, yes in zip(step.plan.questions, step.plan.is_drawn) if yes}
    assert drawn <= set(step.buffer.entries)
    assert step.plan.is_replay_Q.tolist() == [yes and config.row for yes in step.plan.is_drawn]
    of_stored = [number - stored.step for own in step.plan.candidates for stored in own]
    ages += of_stored
    young = {
      row: entry
      for row, entry in step.buffer.entries.items()
      if number - entry.trajectories[-1].step <= config.max_age
    }
    if in_order and drawn:
      rank = {
        row: number - entry.trajectories[-1].step if config.age_decay < 1 else entry.correctness
        for row, entry in young.items()
      }
      last = max(rank[row] for row in drawn)
      others = [own for row, own in rank.items() if row not in drawn]
      assert last <= min(others, default=last)
      passed_over += bool(others) and max(others) > min(rank[row] for row in drawn)
    if config.question_selection == 'advantage' and drawn:
      solved = {row for row, entry in young.items() if entry.correctness == 1}
      assert not solved & drawn
      passed_over += len(solved)
  assert max(ages, default=0) <= config.max_age
  assert (passed_over > 0) == (in_order or config.question_selection == 'advantage')


def cost(rule, now, then):
  """What a rule picks the least of, from log-probabilities now and when it was written.

  The paper's rule has its test in test_loop.py.
  """
  return {'highest_perplexity': now.mean(), 'smallest_drop': (then - now).max()}[rule]


def test_a_run_replays_what_its_rule_picks(run):
  config = run.experiment.config.replay
  rule = config.trajectory_selection
  if rule not in ('highest_perplexity', 'smallest_drop'):
    pytest.skip('another rule')
  chosen = 0
  for step in run.steps.values():
    for prompt, own, replayed in zip(step.plan.prompts, step.plan.candidates, step.replays):
      if replayed:
        costs = [
          cost(rule, run.values_of(step.params, prompt, stored.tokens)[0], stored.logp)
          for stored in own
        ]
        place = [stored is replayed for stored in own].index(True)
        assert costs[place] <= min(costs) + 1e-4
        chosen += max(costs) > min(costs) + 1e-2
  assert chosen


def with_new(stored, responses, verdicts, keeps_all, limit):
  """(tokens, log-probabilities) stored and of what is new and kept, the newest `limit` of them."""
  stored = list(stored)
  for response, verdict in zip(responses, verdicts):
    is_kept = verdict.correct or keeps_all
    if is_kept and response.tokens.tolist() not in [tokens for tokens, _ in stored]:
      stored.append((response.tokens.tolist(), response.logp.tolist()))
  return stored[-limit:] if limit else stored


def test_a_run_stores_what_limit_bounds_and_failed_say(run):
  """Group by group in plain Python; correctness in quarters."""
  config = run.experiment.config.replay
  entries, retired, started = {}, set(), False
  unrecorded, most = set(), 0
  for number, step in run.steps.items():
    for question, replayed, responses, verdicts in groups(step):
      row, k = question.row, successes(verdicts, replayed)
      if k == K and config.ratio and config.retire != 'never':
        retired.add(row)
        entries.pop(row, None)
      elif k == 0 and config.failed == 'bucket_0' and row in entries:
        entries[row] = (0, entries[row][1])
      elif config.lower_bound * K < k <= config.upper_bound * K or config.keep == 'all':
        if started and row not in retired:
          _, stored = entries.get(row, (0, []))
          keeps_all = config.keep == 'all'
          stored = with_new(stored, responses, verdicts, keeps_all, config.max_trajectories)
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
  assert unrecorded == ({1} if config.lower_bound else set())
  replayed = {one.correct for step in run.steps.values() for one in step.replays if one}
  assert (False in replayed) == (config.keep == 'all')


def test_a_run_takes_advantages_against_the_mean_and_by_the_standard_deviation_told(run):
  kind, baseline, of_replay = (
    getattr(run.experiment.config.objective, name)
    for name in ('normalize_std', 'baseline', 'replay_advantage')
  )
  between = 0  # replayed groups in which the two means differ
  for step in run.steps.values():
    for advantage_K, (_, replayed, _, verdicts) in zip(
      step.batch.advantage_B.reshape(Q, K), groups(step)
    ):
      k = successes(verdicts, replayed)
      squares = k * (1 - k / 4) ** 2 + (4 - k) * (k / 4) ** 2  # of distances to the mean k / 4
      scale = {'off': 1, 'population': math.sqrt(squares / 4), 'sample': math.sqrt(squares / 3)}
      rewards = np.array([row.reward for row in [*verdicts, replayed] if row])
      mean_K = np.full(4, k / 4)
      if replayed and baseline == 'fresh':
        mean_K[:3] = (k - 1) / 3
        between += k < 4
      if replayed and of_replay == 'balanced':
        weight = 0.3 / 1.3**2  # of the replayed row: the slope of w / (w + 0.3) at w = 1
        mean_K[:] = (k - 1 + weight) / (3 + weight)
        between += k < 4
      expected_K = (rewards - mean_K) / (scale[kind] if squares else 1)
      np.testing.assert_allclose(advantage_K, expected_K, rtol=1e-4, atol=1e-6)
  assert (between > 0) == (baseline == 'fresh' or of_replay == 'balanced')


def test_a_run_leaves_out_replayed_tokens_until_their_second_moment_is_bounded(run):
  limit, all_left_out = run.experiment.config.objective.second_moment, 0
  for step in run.steps.values():
    is_replay_B, mask_BT = step.batch.is_replay_B, step.batch.response_mask_BT > 0
    assert (step.batch.term_weight_BT[~is_replay_B] == 1).all()
    moved, left_out = [], []
    for b, (row, own) in zip(
      np.flatnonzero(is_replay_B), [(r, s) for r, s in zip(step.replays, step.scores) if r]
    ):
      weights = step.batch.term_weight_BT[b, mask_BT[b]].tolist()
      for weight, now, then in zip(weights, own.logp.tolist(), row.logp.tolist()):
        is_moved = (now - then) * step.batch.advantage_B[b] > 0
        assert weight in ([0, 1] if is_moved else [1])
        if is_moved:
          (moved if weight else left_out).append((now - then) ** 2)
    assert not moved or np.mean(moved) <= limit * (1 + 1e-5)
    assert not left_out or np.mean([*moved, min(left_out)]) > limit * (1 - 1e-5)
    all_left_out += len(left_out)
  assert (all_left_out > 0) == (limit < math.inf)


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
