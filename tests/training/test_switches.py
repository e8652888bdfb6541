"""The switches of docs/algorithm.md in whole runs: what is drawn, replayed, stored and dropped.

The tests recompute it in plain Python and NumPy. test_kinds_of_run.py tests advantages and losses.
"""

import math

import numpy as np
import pytest

from exgrpo_jax.reporting import metrics
from tests.helpers import kinds, tiny

pytestmark = pytest.mark.full

K = tiny.ROLLOUTS


@pytest.fixture(scope='module', params=['plain', *kinds.SWITCHES])
def run(request, values, make_once, compiled):
  """The recording of a run with one switch changed; 'plain' has the paper's settings."""
  if request.param == 'plain':
    return request.getfixturevalue('recorded')
  return kinds.trained(request.param, values, make_once, compiled)


def groups(step):
  return zip(step.plan.questions, step.replays, step.responses, step.verdicts)


def successes(verdicts, replayed):
  return sum(verdict.correct for verdict in verdicts) + int(bool(replayed and replayed.correct))


def test_a_run_replays_unless_its_ratio_is_0(run):
  config, records = run.experiment.config, metrics.read(run.workdir)[1:]
  drawn, rows = (
    sum(record[f'replay/{name}'] for record in records) for name in ('questions', 'rows')
  )
  if config.replay.ratio:
    if config.replay.question_selection == 'headroom_drift':
      assert 1 < rows < drawn - 1
    else:
      assert drawn > 6 and rows == drawn * config.replay.include_trajectory
    batches = [step.batch for step in run.steps.values()]
    has_signal = any(batch.advantage_B[batch.is_replay_B].any() for batch in batches)
    is_trained = config.objective.replay_advantage != 'zero'
    assert has_signal == (config.replay.include_trajectory and is_trained)
  else:
    assert drawn == rows == sum(record['buffer/questions'] for record in records) == 0


def headroom(entry):
  """Return the mean of 1 - p over the tokens of all stored successes."""
  return np.mean(1 - np.exp(np.concatenate([one.logp for one in entry.trajectories])))


RANKS = {
  'hardest': lambda entry: entry.correctness,
  'headroom_drift': lambda entry: -headroom(entry),
}


def test_a_run_draws_and_replays_according_to_its_rules(run):
  config = run.experiment.config.replay
  ages, passed_over = [], 0
  in_order = config.question_selection in RANKS or config.age_decay < 1
  for number, step in run.steps.items():
    drawn = {q.row for q, yes in zip(step.plan.questions, step.plan.is_drawn) if yes}
    assert drawn <= set(step.buffer.entries)
    replayed = [yes and config.include_trajectory for yes in step.plan.is_drawn]
    assert step.plan.is_replay_Q.tolist() == replayed
    ages += [number - stored.step for own in step.plan.candidates for stored in own]
    entries = step.buffer.entries
    age = {row: number - entry.trajectories[-1].step for row, entry in entries.items()}
    young = {row: entry for row, entry in entries.items() if age[row] <= config.max_age}
    if in_order and drawn:
      by_age = config.age_decay < 1
      rank_of = RANKS.get(config.question_selection)
      rank = {row: age[row] if by_age else rank_of(entry) for row, entry in young.items()}
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


def drift(run, step, prompt, stored):
  """Return the mean squared change of a stored response's log-probabilities."""
  return np.square(run.values_of(step.params, prompt, stored.tokens)[0] - stored.logp).mean()


def test_a_run_replays_no_drifted_successes(run):
  gates = run.experiment.config.replay.question_selection == 'headroom_drift'
  for step in run.steps.values():
    every = zip(step.plan.prompts, step.plan.candidates, step.trained.candidates, step.responses)
    for prompt, own, kept, fresh in every:
      near = [one for one in own if not gates or drift(run, step, prompt, one) <= 1e-3]
      assert [id(one) for one in kept] == [id(one) for one in near]
      assert len(fresh) == K - bool(kept)


def test_a_run_replays_the_trajectory_that_its_rule_picks(run):
  """It minimizes the mean of current log-probabilities, or their largest drop since sampling."""
  rule, chosen = run.experiment.config.replay.trajectory_selection, 0
  if rule not in ('highest_perplexity', 'smallest_drop'):
    pytest.skip('another rule')
  for step in run.steps.values():
    for prompt, own, replayed in zip(step.plan.prompts, step.trained.candidates, step.replays):
      if replayed:
        now = [run.values_of(step.params, prompt, stored.tokens)[0] for stored in own]
        drops = [(stored.logp - logp).max() for stored, logp in zip(own, now)]
        costs = drops if rule == 'smallest_drop' else [logp.mean() for logp in now]
        place = [stored is replayed for stored in own].index(True)
        assert costs[place] <= min(costs) + 1e-4
        chosen += max(costs) > min(costs) + 1e-2
  assert chosen or run.experiment.config.replay.question_selection == 'headroom_drift'


def with_new(stored, responses, verdicts, keeps_all, limit):
  """Return the newest `limit` of the stored and newly kept (tokens, log-probabilities)."""
  stored = list(stored)
  for response, verdict in zip(responses, verdicts):
    is_kept = verdict.correct or keeps_all
    if is_kept and response.tokens.tolist() not in [tokens for tokens, _ in stored]:
      stored.append((response.tokens.tolist(), response.logp.tolist()))
  return stored[-limit:] if limit else stored


def test_a_run_stores_according_to_its_limit_bounds_and_failure_rule(run):
  """The test simulates the buffer group by group in plain Python, with correctness in quarters."""
  config = run.experiment.config.replay
  entries, retired, started = {}, {}, False
  unrecorded, most = set(), 0
  low, high = config.correctness_range
  for number, step in run.steps.items():
    every = zip(groups(step), step.plan.is_drawn, step.trained.candidates)
    for (question, replayed, responses, verdicts), is_drawn, kept in every:
      row, k = question.row, successes(verdicts, replayed)
      if is_drawn and config.question_selection == 'headroom_drift':
        correctness, _ = entries.pop(row)
        if kept:
          entries[row] = correctness, [(one.tokens.tolist(), one.logp.tolist()) for one in kept]
      if k == K and config.ratio and config.retire != 'never':
        retired.setdefault(row, step.plan.epoch)
        entries.pop(row, None)
      elif k == 0 and config.on_all_failed == 'bucket_0' and row in entries:
        entries[row] = (0, entries[row][1])
      elif low * K < k <= high * K or config.store == 'all':
        if started and row not in retired:
          _, stored = entries.get(row, (0, []))
          keeps_all = config.store == 'all'
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
    assert step.after.retired_epoch == retired and step.after.started == started
  # Check that each value has an effect that the default lacks.
  assert (most > tiny.STORED) == (config.max_trajectories == 0)
  assert unrecorded == ({1} if low else set())
  replayed = {one.correct for step in run.steps.values() for one in step.replays if one}
  assert (False in replayed) == (config.store == 'all')


def test_a_run_drops_replayed_tokens_until_their_second_moment_is_bounded(run):
  limit, all_left_out = run.experiment.config.objective.m2po_threshold, 0
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
