"""One contract for all kinds of run: each kind is trained once, and its numbers are recomputed.

tests/helpers/kinds.py defines the kinds. The inputs and outputs of all stages are recorded, and no
expected value comes from the code under test. test_switches.py tests the rules of the buffer and
the switches, test_loop.py tests the stream, and test_epochs.py tests the update.
"""

import dataclasses
import functools
import json
import math
import re
import shutil
import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from exgrpo_jax.commands import export, generate
from exgrpo_jax.datatypes import Span
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.evaluation import responses
from exgrpo_jax.experiment import experiment, policies, warm_start
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.page import experience
from exgrpo_jax.rollout import resuming, sampler, slots
from exgrpo_jax.runtime import hub
from exgrpo_jax.runtime.workdir import read_config
from tests.helpers import buffers, kinds, losses, recording, tiny
from tests.helpers.chance import is_correct
from tests.helpers.paths import CHECKPOINTS, REPOSITORY

K = tiny.ROLLOUTS
# Metrics that depend on timing. With whole episodes, the order of replies assigns rows to slots.
TIMED = ('environment/seconds', 'environment/idle_seconds')


def of(*names):
  """Parametrize a test with these kinds of run."""
  marks = dict.fromkeys(kinds.FULL, pytest.mark.full)
  params = [pytest.param(name, marks=marks.get(name, ())) for name in names]
  return pytest.mark.parametrize('run', params, indirect=True)


every_kind = of(*kinds.KINDS)


@pytest.fixture(scope='module')
def run(request, values, make_once, compiled):
  """The recording of a kind of run."""
  if request.param == 'plain':
    return request.getfixturevalue('recorded')
  return kinds.trained(request.param, values, make_once, compiled)


@pytest.fixture(scope='module')
def base(run):
  """The parameters that LoRA's adapters belong to, from their file; None for other runs."""
  return kinds.base_of(run)


def some(steps, most=8):
  """Return at most `most` evenly spaced steps."""
  steps = list(steps.values())
  return steps[:: -(-len(steps) // most)]


def groups(step):
  """Yield (question, prompt, responses, verdicts, replayed trajectory) of each finished group."""
  return zip(
    step.trained.questions,
    step.trained.prompts,
    step.responses,
    step.verdicts,
    step.replays,
    strict=True,
  )


def trained_groups(step):
  """The trained groups, which come first."""
  return [*groups(step)][: len(step.responses) - step.num_dropped]


def judged(run):
  """Yield (step, question, response, verdict) of each fresh response in finished groups."""
  for step in run.steps.values():
    for question, _, own, verdicts, _ in groups(step):
      for response, verdict in zip(own, verdicts, strict=True):
        yield step, question, response, verdict


def by_step(run):
  """Return (metrics, step) of each step."""
  records = metrics.read(run.workdir)[-len(run.steps) :]
  return list(zip(records, run.steps.values(), strict=True))


def rows(step):
  """Yield (question, prompt, response or replayed trajectory) of each row in the batch."""
  for question, prompt, own, _, replayed in trained_groups(step):
    yield from ((question, prompt, one) for one in ([*own, replayed] if replayed else own))


def originals(step):
  """Yield the buffer's copy of each replayed trajectory, or None."""
  for candidates, replayed in zip(step.trained.candidates, step.replays, strict=True):
    same = [one for one in candidates if replayed and np.array_equal(one.tokens, replayed.tokens)]
    yield same[0] if replayed else None


def first_step(response, step):
  return response.spans[0].step if response.spans else step.plan.step


# ---- What is generated ----


@every_kind
def test_every_step_is_written_and_finite(run):
  records = metrics.read(run.workdir)
  steps = list(range(1, run.experiment.config.num_steps + 1))
  assert [record['step'] for record in records][-len(steps) :] == steps == list(run.steps)
  assert all(math.isfinite(value) for record in records for value in record.values())
  name = 'rollout_mismatch/logprob_max'
  assert 0 <= max(record[name] for record in records if name in record) < 1e-4


@every_kind
def test_each_token_has_the_values_of_the_policy_that_sampled_it(run):
  """The values are log-probability and entropy. Both are 0 for tokens from an environment."""
  for step in some(run.steps):
    for question, prompt, own, *_ in groups(step):
      for one in own:
        own_T, begin = kinds.own_tokens(run, question, one), 0
        assert one.is_complete and own_T[0]
        np.testing.assert_array_equal(one.own, own_T)
        for span in one.spans or [Span(step.plan.step, len(one.tokens))]:
          place = slice(begin, begin := begin + span.tokens)
          wrote = run.steps[span.step].params
          logp, entropy = run.values_of(wrote, prompt, one.tokens, one.routes)
          np.testing.assert_allclose(one.logp[place], (logp * own_T)[place], atol=1e-4)
          np.testing.assert_allclose(one.entropy[place], (entropy * own_T)[place], atol=1e-4)
        assert begin == len(one.tokens) and not one.logp[~own_T].any()


@every_kind
def test_each_verdict_follows_from_the_response(run):
  for _, question, one, verdict in judged(run):
    wanted = kinds.outcome(run, question, one)
    assert wanted is None or verdict.outcome == wanted
    assert verdict.correct == (verdict.outcome == 'correct')


# ---- What is replayed ----


@every_kind
def test_each_replayed_trajectory_is_stored_for_its_question(run):
  for step in run.steps.values():
    for question, candidates in zip(step.trained.questions, step.trained.candidates, strict=True):
      stored = step.buffer.entries[question.row].trajectories if candidates else ()
      assert all(any(one is own for own in stored) for one in candidates)
    for replayed, original in zip(step.replays, originals(step)):
      corrected = run.experiment.config.objective.importance_correction
      assert replayed is original or not corrected


@every_kind
def test_stored_trajectories_are_trained_responses(run):
  """They have the same tokens, values, turns and routes, and the age of their first token."""
  config = run.experiment.config
  keeps_all, masks = config.replay.store == 'all', config.objective.mask_truncated
  written = {
    (question.row, one.tokens.tobytes(), first_step(one, step)): (one, verdict)
    for step, question, one, verdict in judged(run)
    if (verdict.correct or keeps_all) and not (masks and one.truncated)
  }
  for step in run.steps.values():
    entries = step.after.entries.items()
    for row, stored in [(row, one) for row, entry in entries for one in entry.trajectories]:
      one, verdict = written[row, stored.tokens.tobytes(), stored.step]
      np.testing.assert_array_equal(stored.logp, one.logp)
      assert (stored.turns, stored.reward) == (one.turns, verdict.reward)
      assert stored.correct == verdict.correct
      assert (stored.routes is None) == (one.routes is None)
      if one.routes is not None:
        np.testing.assert_array_equal(stored.routes, one.routes)


@every_kind
def test_replay_scores_come_from_the_current_policy_on_its_own_tokens(run):
  checked = 0
  for step in some(run.steps):
    for (question, prompt, *_), replayed, scores in zip(groups(step), originals(step), step.scores):
      if replayed:
        own_T = kinds.own_tokens(run, question, replayed)
        logp, entropy = run.values_of(step.params, prompt, replayed.tokens, replayed.routes)
        np.testing.assert_allclose(scores.logp, logp[own_T], atol=1e-4)
        np.testing.assert_allclose(scores.entropy, entropy[own_T], atol=1e-4)
        np.testing.assert_allclose(scores.log_ratio, (logp - replayed.logp)[own_T], atol=1e-4)
        checked += 1
  replays = run.experiment.config.replay
  assert (checked > 0) == bool(replays.ratio and replays.include_trajectory)


# ---- What is trained ----


@every_kind
def test_the_batch_lists_groups_in_order_with_replayed_rows_last(run):
  config, masked = run.experiment.config, 0
  for number, step in run.steps.items():
    batch, b = step.batch, 0
    for question, prompt, own, verdicts, replayed in trained_groups(step):
      k = sum(verdict.correct for verdict in verdicts) + bool(replayed and replayed.correct)
      has_difficulty = config.replay.difficulty == 'all' or k == K / 2
      for one in [*own, replayed] if replayed else own:
        own_T = kinds.own_tokens(run, question, one)
        is_masked = config.objective.mask_truncated and one is not replayed and one.truncated
        is_trained, masked = has_difficulty and not is_masked, masked + is_masked
        place = slice(len(prompt), len(prompt) + len(own_T))
        np.testing.assert_array_equal(batch.tokens_BT[b, : place.start], prompt)
        np.testing.assert_array_equal(batch.tokens_BT[b, place], one.tokens)
        np.testing.assert_array_equal(batch.response_mask_BT[b, place], own_T * is_trained)
        assert batch.response_mask_BT[b].sum() == own_T.sum() * is_trained
        np.testing.assert_array_equal(batch.old_logp_BT[b, place], one.logp)
        assert np.count_nonzero(batch.old_logp_BT[b]) == np.count_nonzero(one.logp)
        assert batch.is_replay_B[b] == (one is replayed)
        begun = replayed.step if one is replayed else first_step(one, step)
        assert batch.policy_step_B[b] == begun
        if batch.is_carried_BT is not None:
          carried = 0 if one is replayed else sum(s.tokens for s in one.spans if s.step < number)
          assert batch.is_carried_BT[b, place].tolist() == [t < carried for t in range(len(own_T))]
          assert batch.is_carried_BT[b].sum() == carried
        if batch.routes_BTLC is not None:
          np.testing.assert_array_equal(batch.routes_BTLC[b, : place.stop], one.routes)
          assert (batch.routes_BTLC[b, place.stop :] == 255).all()
        b += 1
    assert b == len(batch.advantage_B) == config.rollout.questions * K
  assert (masked > 0) == config.objective.mask_truncated


@every_kind
def test_advantages_are_rewards_minus_the_baseline_divided_by_the_chosen_deviation(run):
  config = run.experiment.config.objective
  ddof = {'off': 0, 'population': 0, 'sample': 1}
  between, visits = 0, {}  # replayed groups in which the two means differ
  for step in run.steps.values():
    advantage_QK = step.batch.advantage_B.reshape(-1, K)
    of_groups = zip(advantage_QK, trained_groups(step), strict=True)
    for advantage_K, (question, *_, verdicts, replayed) in of_groups:
      rewards = np.array([row.reward for row in [*verdicts, replayed] if row])
      mean_K, deviation = np.full(K, rewards.mean()), rewards.std(ddof=ddof[config.normalize_std])
      if config.baseline == 'history':
        own = visits.setdefault(question.row, [])
        own.append([verdict.correct for verdict in verdicts])
        mean_K[:] = mean = of_history(own)
        deviation = math.sqrt(mean * (1 - mean))
      elif replayed and config.baseline == 'fresh':
        mean_K[:-1] = rewards[:-1].mean()
      if replayed and config.replay_advantage == 'balanced':
        weight = 0.3 / 1.3**2  # the replayed row's: the slope of w / (w + 0.3) at w = 1
        mean_K[:] = (rewards[:-1].sum() + weight * rewards[-1]) / (K - 1 + weight)
      between += not np.allclose(mean_K, rewards.mean())
      is_scaled = config.normalize_std != 'off' and deviation > 0
      expected_K = (rewards - mean_K) / (deviation if is_scaled else 1)
      if replayed and config.replay_advantage == 'zero':
        expected_K[-1] = 0
      np.testing.assert_allclose(advantage_K, expected_K, rtol=1e-4, atol=1e-5)
  assert (between > 0) == (config.baseline != 'group' or config.replay_advantage == 'balanced')
  assert (max(map(len, visits.values()), default=0) > 2) == (config.baseline == 'history')
  after = run.steps[max(run.steps)].after.history
  assert {row: alpha / (alpha + beta) for row, (alpha, beta) in after.items()} == {
    row: pytest.approx(of_history(own), rel=1e-12) for row, own in visits.items()
  }


def of_history(visits):
  """Return the mean of all outcomes, [[True, ...] per visit], after one prior success and failure.

  Each visit has half the weight of the next visit (arXiv:2603.18444, eq. 24 and 25).
  """
  weights = [0.5 ** (len(visits) - number) for number in range(len(visits) + 1)]
  outcomes = [[True, False], *visits]
  successes = sum(weight * sum(own) for weight, own in zip(weights, outcomes))
  return successes / sum(weight * len(own) for weight, own in zip(weights, outcomes))


def values_on(run, params, batch):
  """Return (logp_BT, entropy_BT) of the batch's own tokens, in float64 from all logits."""
  logp_BT = np.zeros(batch.tokens_BT.shape)
  entropy_BT = np.zeros_like(logp_BT)
  for b, mask_T in enumerate(batch.response_mask_BT > 0):
    if mask_T.any():
      (start, *_, last) = [*np.flatnonzero(mask_T)] * 2
      prompt, tokens = np.split(batch.tokens_BT[b, : last + 1], [start])
      routes = None if batch.routes_BTLC is None else batch.routes_BTLC[b, : last + 1]
      place = slice(start, last + 1)
      logp_BT[b, place], entropy_BT[b, place] = run.values_of(params, prompt, tokens, routes)
  return logp_BT, entropy_BT


@every_kind
def test_the_loss_of_every_update_matches_the_formula(run, base):
  """losses.formula computes it from all logits, with the parameters before the update."""
  config = run.experiment.config
  for step in some(run.steps):
    assert len(step.updates) == config.optimizer.updates_per_step
    for update in step.updates[:: config.optimizer.minibatches - 1 or 1]:
      batch = update.batch
      if (
        not update.sums['tokens'] and config.optimizer.max_kl < math.inf
      ):  # updates had stopped before
        assert update.sums['loss'] == 0
        continue
      if not batch.response_mask_BT.any():  # no question of the trained difficulty
        assert update.sums['loss'] == 0
        continue
      policy = kinds.policy_of(run, update.params, base)
      logp_BT, entropy_BT = values_on(run, policy, batch)
      expected = losses.formula(
        logp_BT,
        entropy_BT,
        batch,
        logp_BT if base is None else values_on(run, base, batch)[0],
        config.objective,
        clip=update.clip,
        first=update.is_first,
        constant=logp_BT,
        max_response=config.rollout.max_response,
      )
      expected += config.objective.balance_coefficient * update.sums.get('balance', 0)
      assert update.sums['loss'] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@of('episodes', 'lora', 'failing')
def test_the_gradient_matches_the_formula(run, base):
  """It covers the trained parameters and the policy's own tokens, in steps that replay."""
  config, rules = run.experiment.config, run.experiment.config.objective
  norms = {step.plan.step: record['gradient_norm'] for record, step in by_step(run)}
  settings = rules.beta, rules.entropy_bonus, rules.kl_coefficient, config.rollout.max_response
  with_replay = 0
  policy_of = functools.partial(lora.joined, config.lora)
  for step in some(run.steps):
    update = step.updates[0]
    reference_BT = None if base is None else values_on(run, base, update.batch)[0]
    shape, constants = run.experiment.model, (base, reference_BT)
    loss, gradient = losses.on_all_logits(
      shape, settings, policy_of, update.params, update.batch, constants
    )
    assert update.sums['loss'] == pytest.approx(float(loss), abs=1e-6)
    if config.optimizer.minibatches == 1:
      expected = pytest.approx(losses.norm(gradient), rel=1e-4, abs=1e-7)
      assert norms[step.plan.step] == expected
    with_replay += bool(np.abs(step.batch.advantage_B[step.batch.is_replay_B]).sum() > 0.5)
  assert with_replay


# ---- Metrics and checkpoints ----


@every_kind
def test_metrics_describe_the_collected_responses_and_the_buffer(run):
  for record, step in by_step(run):
    verdicts = [verdict for own in step.verdicts for verdict in own]
    correct = np.mean([verdict.correct for verdict in verdicts])
    assert record['reward'] == pytest.approx(np.mean([verdict.reward for verdict in verdicts]))
    assert record['pass_rate/all'] == record['grading/correct'] == pytest.approx(correct)
    for outcome in ('timed out', 'crashed'):
      share = np.mean([verdict.outcome == outcome for verdict in verdicts])
      assert record[f'grading/{outcome.replace(" ", "_")}'] == pytest.approx(share)
    assert record['buffer/retired'] == len(step.after.retired_epoch)
    stored = sum(value for name, value in record.items() if name.startswith('buffer/bucket_'))
    assert stored == record['buffer/questions'] == len(step.after.entries)
    lengths = [
      kinds.own_tokens(run, question, one).sum()
      for question, _, own, *_ in groups(step)
      for one in own
    ]
    assert record['length/total'] == sum(lengths)
    if ages := [step.plan.step - replayed.step for replayed in step.replays if replayed]:
      assert record['replay/age_mean'] == np.mean(ages)
    else:
      assert record.get('replay/rows', 0) == 0 and 'replay/age_mean' not in record


@of(
  *('epochs', 'episodes', 'partial_episodes', 'partial_experts', 'dynamic', 'dynamic_episodes'),
  *('lora', 'history', 'headroom_drift'),
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_run(run, tmp_path):
  """This includes environments, which are replayed from their seeds and turns."""
  workdir, last = tmp_path / 'resumed', run.steps[max(run.steps)]
  recording.resume(run, workdir, run.values.checkpoint.every)
  expected, resumed = map(run.last_snapshot, (run.workdir, workdir))
  assert resumed.cursor == expected.cursor and resumed.step == expected.step == max(run.steps)
  jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
  buffers.assert_same(resumed.buffer, expected.buffer)
  buffers.assert_same(resumed.buffer, last.after)
  left = buffers.described(last.partial_groups)
  assert buffers.described(resumed.partial_groups) == left
  assert buffers.described(expected.partial_groups) == left
  began_with = run.steps[run.values.checkpoint.every].partial_groups
  assert bool(began_with) == run.experiment.config.rollout.keeps_groups
  timed = TIMED if run.values.rollout.partial else (*TIMED, 'rollout/slots_busy')
  first, second = (
    [{k: v for k, v in record.items() if k not in timed} for record in tiny.untimed_records(where)]
    for where in (workdir, run.workdir)
  )
  assert first == second
  assert step_records.read(workdir) == step_records.read(run.workdir)


# ---- Partial rollouts: responses that span steps ----

partial = of('partial_episodes', 'partial_experts')


def numbers(plan):
  return [question.row for question in plan.questions]


def ages(step, response):
  """Return [T]: the number of steps since each token was sampled."""
  return np.concatenate(
    [np.full(span.tokens, step.plan.step - span.step) for span in response.spans]
  )


def trained_responses(step):
  return [one for own in step.responses for one in own]


@partial
def test_the_run_continues_responses_with_later_policies(run):
  spans = [len(one.spans) for step in run.steps.values() for one in trained_responses(step)]
  assert max(spans) >= 2 and min(spans) == 1
  left = [group for step in run.steps.values() for group in step.partial_groups]
  assert {bool(group.is_drawn) for group in left} == {True, False}
  begun = [one for group in left for one in group.responses]
  assert any(one.is_complete for one in begun)
  unfinished = [one for one in begun if not one.is_complete and len(one.tokens)]
  assert unfinished
  if run.values.environment.name:  # stopped within a turn and between turns
    known = [sum(t.written + t.observed for t in one.turns) for one in unfinished]
    assert {length < len(one.tokens) for length, one in zip(known, unfinished)} == {True, False}
  if run.values.rollout.router_replay:
    assert any(one.routes is not None for one in begun)
  # The policies differ enough that values from the wrong policy would be noticed.
  first, last = (run.steps[number].params for number in (1, max(run.steps)))
  gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, last)
  assert max(jax.tree.leaves(gaps)) > 0.01


@partial
def test_each_group_trains_once_when_complete_and_not_too_old(run):
  before, drawn, config = [], [], run.experiment.config.rollout
  for number, step in run.steps.items():
    in_flight = numbers(step.plan)
    assert len(set(in_flight)) == len(in_flight) == config.max_groups_in_flight
    assert in_flight[: len(before)] == [group.question_row for group in before]
    drawn += in_flight[len(before) :]
    left = [group.question_row for group in step.partial_groups]
    assert sorted(numbers(step.trained) + left) == sorted(in_flight)
    assert len(left) == config.max_groups_in_flight - config.questions
    assert step.trained.step == number and [len(own) for own in step.responses] == [
      K - bool(stored) for stored in step.trained.candidates
    ]
    before = step.partial_groups
  trained = [row for step in run.steps.values() for row in numbers(step.trained)]
  assert sorted(trained + [group.question_row for group in before]) == sorted(drawn)
  oldest = [ages(step, one).max() for step in run.steps.values() for one in trained_responses(step)]
  assert 1 <= max(oldest) <= config.max_staleness


@every_kind
def test_resumed_rows_are_packed_unless_packing_depends_on_timing(run, monkeypatch):
  """It depends on timing if an environment replies."""
  engine = getattr(run.rollout.sampler, 'engine', run.rollout.sampler)
  begun = dataclasses.replace(
    sampler.EMPTY_RESPONSE, **dict.fromkeys(('tokens', 'logp', 'entropy'), np.ones(2, np.int32))
  )
  prompt = np.ones(3, np.int32)
  requests = [sampler.Request(prompt, row, 0, 1, tiny.RESPONSE, begun) for row in range(3)]
  rows = slots.rows_of(engine.spec, requests, lambda _: jax.random.key(0))
  shared = []
  monkeypatch.setattr(resuming, 'resume', lambda *args: shared.append(args[4].segment_BT.max()))
  resuming.resumed(
    engine.model, engine.spec, engine.mesh, {}, None, rows, shares=engine.packs_resumed
  )
  assert max(shared) == (1 if run.values.environment.name else 3)


@partial
def test_groups_are_shuffled_before_they_train(run):
  """So each minibatch contains old and new groups."""
  places = [
    [numbers(step.plan).index(row) for row in numbers(step.trained)] for step in run.steps.values()
  ]
  assert any(place != sorted(place) for place in places)


@partial
def test_only_trained_groups_are_stored_or_retire(run):
  for step in run.steps.values():
    before, after = step.buffer.entries, step.after.entries
    changed = {row for row in {*before, *after} if before.get(row) is not after.get(row)}
    assert changed <= {*numbers(step.trained)}
    retired = {*step.after.retired_epoch} - {*step.buffer.retired_epoch}
    assert retired <= {*numbers(step.trained)}


@partial
def test_metrics_contain_the_staleness_of_tokens(run):
  for record, step in by_step(run):
    age = np.concatenate([ages(step, one) for one in trained_responses(step)])
    sampled = age[np.concatenate([one.own for one in trained_responses(step)])]
    assert record['staleness/mean'] == pytest.approx(sampled.mean())
    assert record['staleness/max'] == sampled.max()
    assert record['staleness/groups_left'] == len(step.partial_groups)
    masks = run.experiment.config.objective.mask_truncated
    own = [one.own & (not masks or not one.truncated) for one in trained_responses(step)]
    share = (age > 0)[np.concatenate(own)].mean()
    assert record.get('staleness/token_share', 0) == pytest.approx(share)
    # Missing in a step without anything to decode.
    assert 0 < record.get('rollout/slots_busy', 1) <= 1


@every_kind
def test_docs_list_every_metric(run):
  """In the table, `…` stands for any ending."""
  page = (REPOSITORY / 'docs' / 'observing.md').read_text()
  cells = re.findall(r'^\| (`.*?`.*?) \|', page, re.MULTILINE)
  names = [re.escape(name) for cell in cells for name in re.findall(r'`(.+?)`', cell)]
  described = re.compile('|'.join(names).replace('…', '.*') + r'|.+/epoch_\d+')
  written = {name for record, _ in by_step(run) for name in record}
  assert written and {name for name in written if not described.fullmatch(name)} == set()


# ---- Dynamic sampling ----

dynamic = of('dynamic', 'dynamic_episodes')


def is_useful(verdicts):
  return len({verdict.reward for verdict in verdicts}) > 1


@dynamic
def test_fresh_groups_with_equal_rewards_are_dropped_and_no_others(run):
  """Some are kept to fill the step if it has finished its maximum number of groups."""
  config, counts = run.experiment.config.rollout, np.zeros(3, int)
  for record, step in by_step(run):
    Q = config.questions
    fresh = [group for group, drawn in zip(groups(step), step.trained.is_drawn) if not drawn]
    useless = [group for group in fresh if not is_useful(group[3])]
    dropped = [*groups(step)][Q:]
    filled = len(useless) - len(dropped)
    assert len(step.responses) == Q + step.num_dropped
    assert not any(step.trained.is_drawn[Q:]) and not any(is_useful(group[3]) for group in dropped)
    before = [group.question_row for group in step.plan.partial_groups]
    left = [group.question_row for group in step.partial_groups]
    assert record['groups/drawn'] == sum(
      not drawn and question.row not in before
      for question, drawn in zip(step.trained.questions, step.trained.is_drawn)
    ) + sum(
      not group.is_drawn and group.question_row not in before for group in step.partial_groups
    )
    assert {*before} <= {*numbers(step.trained), *left}
    most = config.dynamic_sampling * (Q - sum(step.plan.is_drawn[len(before) :]))
    finished = [
      group
      for group in fresh
      if not any(
        one.question_row == group[0].row and len(one.verdicts) == K
        for one in step.plan.partial_groups
      )
    ]
    assert not filled or len(finished) >= most
    assert config.partial or record['groups/drawn'] <= most
    assert record['groups/filled'] == filled and record['groups/dropped'] == len(dropped)
    own = [
      kinds.own_tokens(run, q, one).sum() for q, _, all_of_q, *_ in dropped for one in all_of_q
    ]
    assert record['length/dropped'] == sum(own)
    of_trained = [
      is_useful([*verdicts, *filter(None, [replayed])])
      for *_, verdicts, replayed in trained_groups(step)
    ]
    assert record['groups/zero_advantage'] == pytest.approx(1 - np.mean(of_trained))
    counts += (len(dropped), filled, len(step.partial_groups))
  assert counts[0] > 3 and counts[2] > 0


@of('dynamic')
def test_dropped_groups_count_for_the_start_of_replay_and_for_retirement(run):
  """They count like all other fresh groups."""
  started, retired, of_dropped = False, set(), 0
  for step in run.steps.values():
    for place, (question, _, _, verdicts, replayed) in enumerate(groups(step)):
      if sum(verdict.correct for verdict in verdicts) + bool(replayed) == K:
        retired.add(question.row)
        of_dropped += place >= len(step.responses) - step.num_dropped
    correct = [verdict.correct for verdicts in step.verdicts for verdict in verdicts]
    started = started or np.mean(correct) > run.experiment.config.replay.start_pass_rate
    assert {*step.after.retired_epoch} == retired and step.after.started == started
  assert of_dropped


@dynamic
def test_records_have_dropped_groups_with_an_advantage_of_0(run):
  table = step_records.read(run.workdir)
  Q = run.experiment.config.rollout.questions
  for step in run.steps.values():
    number = step.plan.step
    asked = [row for row in table.questions.to_pylist() if row['step'] == number]
    assert [row['question'] for row in asked] == numbers(step.trained)
    dropped = [
      row for row in table.responses.to_pylist() if row['step'] == number and row['group'] >= Q
    ]
    assert len(dropped) == K * step.num_dropped
    assert {row['advantage'] for row in dropped} <= {0.0}


@of('partial_episodes')
def test_weights_of_truncated_importance_sampling_are_1_up_to_rounding(run):
  for step in run.steps.values():
    for (_, prompt, one), weight_T in zip(rows(step), step.batch.term_weight_BT, strict=True):
      if getattr(one, 'tis_weight', None) is not None:
        place = slice(len(prompt), len(prompt) + len(one.tokens))
        np.testing.assert_array_equal(weight_T[place], one.tis_weight)
        np.testing.assert_allclose(one.tis_weight, 1, atol=1e-4)


# ---- A model with experts, whose routes are replayed ----


@of('partial_experts')
def test_a_response_is_sampled_with_its_recorded_experts(run):
  """The contract compares values with these experts. Other experts give other values."""
  of_others = []
  for step in some(run.steps):
    for _, prompt, own, *_ in groups(step):
      one, number = own[0], own[0].spans[-1].step
      assert len(one.routes) == len(prompt) + len(one.tokens) and one.routes.max() < 4
      logp, _ = run.values_of(run.steps[number].params, prompt, one.tokens, (one.routes + 1) % 4)
      of_others.append(np.abs(logp - one.logp)[-one.spans[-1].tokens :].max())
  assert min(of_others) > 1e-4


# ---- Episodes ----


@of('episodes')
def test_the_run_contains_many_kinds_of_episodes(run):
  fresh = [one for step in run.steps.values() for one in trained_responses(step)]
  assert {1, 2, kinds.TURNS} <= {len(one.turns) for one in fresh}
  outcomes = {v.outcome for step in run.steps.values() for own in step.verdicts for v in own}
  assert outcomes == {'correct', 'wrong'}
  replays = [one for step in run.steps.values() for one in step.replays if one]
  assert len(replays) > 4 and any(len(one.turns) > 2 for one in replays)
  assert any(one.turns[0].written == kinds.TURN for one in fresh)


@of('episodes')
def test_metrics_count_the_policys_tokens_and_the_environments(run):
  table = step_records.read(run.workdir).responses.to_pylist()
  for record, step in by_step(run):
    fresh = trained_responses(step)
    assert record['environment/tokens_mean'] == np.mean([(~one.own).sum() for one in fresh])
    assert record['environment/turns_mean'] == np.mean([len(one.turns) for one in fresh])
    written = [row for row in table if row['step'] == step.plan.step and not row['is_replay']]
    entropies = [one.entropy[one.own].mean() for one in fresh]
    np.testing.assert_allclose([row['entropy'] for row in written], entropies, rtol=1e-5)
    assert [row['length'] for row in written] == [one.own.sum() for one in fresh]


@of('episodes')
def test_records_and_the_page_have_the_turns_of_each_episode(run):
  written = {
    (row['step'], row['group'], row['sample']): row for row in tiny.token_rows(run.workdir)
  }
  for step in run.steps.values():
    for group, (_, _, own, _, replayed) in enumerate(groups(step)):
      for sample, member in enumerate([*own, replayed] if replayed else own):
        row = written[step.plan.step, group, sample]
        assert [tuple(turn.values()) for turn in row['turns']] == list(member.turns)
        assert len(row['logp']) == len(row['entropy']) == len(row['tokens'])
        assert not np.array(row['entropy'])[~member.own].any()
  shown = experience.describe_texts(written.values(), lambda ids: list(map(str, ids)))
  first = shown['groups']['1/0'][0]
  assert first['turns'] == [list(turn) for turn in run.steps[1].responses[0][0].turns]
  last = run.steps[max(run.steps)].after
  stored = {row: entry.trajectories for row, entry in last.entries.items()}
  shown = experience.describe_stored(stored, lambda ids: list(map(str, ids)))
  row, (one, *_) = next(iter(stored.items()))
  assert shown['questions'][str(row)][0]['turns'] == one.turns


@of('episodes')
def test_a_warm_start_learns_only_the_players_tokens(run):
  learnt = warm_start.load_solutions(run.experiment)
  assert len({len(row.turns) for row in learnt}) > 2
  tokens_BT, mask_BT = warm_start.padded(learnt, max(map(len, learnt)), 0)
  data = experiment.load_questions(run.experiment, run.values.warm_start.data)
  for question, row, tokens_T, mask_T in zip(data.questions, learnt, tokens_BT, mask_BT):
    own_T, _ = kinds.read(run, question, row.tokens)
    start = len(row.prompt)
    np.testing.assert_array_equal(tokens_T[start : start + len(own_T)], row.tokens)
    np.testing.assert_array_equal(mask_T[start : start + len(own_T)], own_T)
    assert mask_T.sum() == own_T.sum()
  config = run.experiment.config
  shorter = dataclasses.replace(config.environment, max_turn_tokens=kinds.TURN - 1)
  config = dataclasses.replace(config, environment=shorter)
  with pytest.raises(InputError, match=r'max_turn_tokens=2: a turn .* is 3 tokens long\. Raise'):
    warm_start.load_solutions(dataclasses.replace(run.experiment, config=config))


@pytest.mark.full
@of('episodes')
def test_an_episode_is_played_in_the_terminal(run, capsys):
  with run.compiling():
    policy = policies.open_policy(str(run.workdir))
    prompt, episodes = responses.play(policy, 3, samples=3)
    given = dict(checkpoint=str(run.workdir), row=3, samples=3, seed=0, tokens=False)
    names = ('config', 'step', 'model', 'prompt', 'temperature', 'max_response')
    capsys.readouterr()
    generate.main(types.SimpleNamespace(**dict.fromkeys(names), **given))
  shown = capsys.readouterr().out.split('\n---')[1:]
  np.testing.assert_array_equal(prompt, run.data.prompts[3])
  (question,) = run.data.questions.read([3])
  for one, text in zip(episodes, shown, strict=True):
    own_T, success = kinds.read(run, question, one.tokens)
    np.testing.assert_array_equal(one.own, own_T)
    assert one.verdict and one.verdict.correct == success
    assert f': {counted(len(one.turns), "turn")}, reward {int(success)}' in text
    assert f'; {own_T.sum()} tokens' in text and text.count('policy: ') == len(one.turns)
    assert text.count('environment: ') == len(one.turns) - 1


@pytest.mark.full
@of('episodes')
def test_missing_rows_and_environments_are_rejected(run, recorded):
  with run.compiling():
    with_turns, single = (policies.open_policy(str(r.workdir)) for r in (run, recorded))
  with pytest.raises(InputError, match=r'--row=24: guess:train\S* only has rows 0 to 23'):
    responses.play(with_turns, 24)
  with pytest.raises(InputError, match=r"--row=0: config\.environment\.name='', so"):
    responses.play(single, 0)
  with pytest.raises(InputError, match=r"environment\.name='guess': .* asks its own questions"):
    responses.sample(with_turns, ['1-64'])


@of('failing')
def test_failing_environments_do_not_affect_other_episodes(run):
  """The contract checks the other episodes."""
  failures = set()
  for _, question, response, verdict in judged(run):
    failures.add(how := kinds.failure(run, question, response))
    assert not (how and verdict.reward)
  assert failures == {'', *kinds.FAILURES}


# ---- Several rewards ----


def components(run, row, tokens):
  """Return a response's rewards by name, as tests/helpers/ and the papers define them."""
  tokens, length, limit = tokens.tolist(), len(tokens), tiny.RESPONSE
  over = length - (limit - kinds.OVERLONG)
  is_cut = tokens[-1] not in run.rollout.tokenizer.eos_ids
  return {
    'correctness': float(is_correct(run.rollout.tokenizer.decode(tokens), str(row))),
    'overlong': -over / kinds.OVERLONG if over > 0 else 0.0,
    'weighed_length': 0.01 * length * (row % 3),
    'of_question': row + sum(tokens) / 1000 + is_cut / limit,
  }


def total(found):
  return sum(kinds.REWARDS[name] * value for name, value in found.items())


@of('rewards')
def test_a_reward_is_the_weighted_sum_and_correctness_is_the_verifiers(run):
  seen, num_replayed = {name: set() for name in kinds.REWARDS}, 0
  for _, question, response, verdict in judged(run):
    expected = components(run, question.row, response.tokens)
    assert verdict.components == pytest.approx(expected)
    assert list(verdict.components) == list(kinds.REWARDS)
    assert verdict.reward == pytest.approx(total(expected))
    assert verdict.correct == bool(expected['correctness'])
    for name, value in expected.items():
      seen[name].add(value)
  for step in run.steps.values():
    for question, *_, replayed in groups(step):
      if replayed:
        expected = total(components(run, question.row, replayed.tokens))
        assert replayed.reward == pytest.approx(expected)
        num_replayed += 1
  assert num_replayed > 5
  assert all(len(values) > 1 for values in seen.values()) and min(seen['overlong']) == -1


@of('rewards')
def test_only_the_verifier_decides_what_is_stored_and_retires(run):
  num_stored = 0
  for step in run.steps.values():
    for row, entry in step.after.entries.items():
      assert 0 < entry.correctness < 1
      for stored in entry.trajectories:
        assert components(run, row, stored.tokens)['correctness'] == 1
        num_stored += 1
    for question, _, _, verdicts, replayed in groups(step):
      correct = sum(verdict.correct for verdict in verdicts) + bool(replayed)
      entry = step.after.entries.get(question.row)
      assert (question.row in step.after.retired_epoch) >= (correct == K)
      if entry and correct and step.buffer.started:
        assert entry.correctness == correct / K
  assert num_stored


@of('rewards')
def test_each_reward_is_a_metric_and_a_column_of_the_records(run):
  table = step_records.read(run.workdir).responses
  table = table.select(['components', 'is_replay', 'step']).to_pylist()
  for record, step in by_step(run):
    found = [
      components(run, question.row, response.tokens)
      for question, _, own, *_ in groups(step)
      for response in own
    ]
    for name in kinds.REWARDS:
      assert record[f'rewards/{name}'] == pytest.approx(np.mean([one[name] for one in found]))
    written = [row for row in table if row['step'] == record['step']]
    assert len(written) == tiny.QUESTIONS * K
    fresh = [dict(row['components']) for row in written if not row['is_replay']]
    assert fresh == [pytest.approx(one) for one in found]
    assert {row['components'] for row in written if row['is_replay']} <= {None}
  (evaluated,) = (run.workdir / 'evaluation').glob(f'step_{max(run.steps):06d}_*.jsonl')
  assert all(set(json.loads(line)['correct']) <= {True, False} for line in evaluated.open())


# ---- LoRA ----

STORED = CHECKPOINTS / 'qwen2_tied'
RANK, ALPHA = 2, 8.0


@of('lora')
def test_only_adapters_change(run, base):
  """This includes steps with replay. The base stays bit for bit equal to its files."""
  assert sum(record.get('replay/rows', 0) for record in metrics.read(run.workdir)) >= 4

  def is_adapted(x):
    return isinstance(x, lora.Adapted)

  for step in (run.steps[1], run.steps[max(run.steps)]):
    frozen = jax.tree.map(
      lambda x: x.kernel if is_adapted(x) else x, step.params, is_leaf=is_adapted
    )
    jax.tree.map(np.testing.assert_array_equal, frozen, base)
  last = run.last_snapshot(run.workdir).state.params
  assert set(last) == {'layers'}  # the checkpoint contains only adapters
  earlier = run.steps[2].updates[0].params
  for before, after in zip(jax.tree.leaves(earlier), jax.tree.leaves(last), strict=True):
    assert np.abs(before).max() > 0 and not np.array_equal(before, after)


@of('lora')
def test_the_kl_term_refers_to_the_base(run):
  """The policy starts as its base, so the first minibatch has a KL of 0."""
  (first, _), *_, (last, _) = by_step(run)
  assert abs(first['kl']) < 1e-6 < last['kl']


def write(run, out, adapters):
  """Run the export command; return its folder."""
  flags = dict(checkpoint=str(run.workdir), out=str(out), adapters=adapters)
  export.main(
    types.SimpleNamespace(model=None, step=None, dtype=None, push=None, public=False, **flags)
  )
  return out


@pytest.fixture(scope='module')
def merged(run, tmp_path_factory):
  return write(run, tmp_path_factory.mktemp('exported') / 'merged', adapters=False)


@pytest.fixture(scope='module')
def adapters(run, tmp_path_factory):
  return write(run, tmp_path_factory.mktemp('exported') / 'adapters', adapters=True)


@of('lora')
def test_an_export_is_base_plus_adapters(merged, adapters):
  """Computed from the three files: W + (alpha / r) B A, in the files' layout [out, in]."""
  base, whole = (load_file(folder / 'model.safetensors') for folder in (STORED, merged))
  config = json.loads((adapters / 'adapter_config.json').read_text())
  adapter = load_file(adapters / 'adapter_model.safetensors')
  assert (config['r'], config['lora_alpha']) == (RANK, ALPHA)
  assert len(adapter) == 2 * 2 * len(config['target_modules'])  # A and B, two layers
  for name, weight in base.items():
    stem = f'base_model.model.{name.removesuffix(".weight")}'
    if f'{stem}.lora_A.weight' in adapter:
      a, b = (adapter.pop(f'{stem}.lora_{part}.weight').astype(np.float64) for part in 'AB')
      assert a.shape == (RANK, weight.shape[1]) and np.abs(b @ a).max() > 1e-3
      weight = weight + ALPHA / RANK * (b @ a)
    np.testing.assert_allclose(whole[name], weight, atol=1e-6)
  assert adapter == {}


@of('lora')
def test_adapters_name_the_commit_of_their_base(run, adapters, monkeypatch, tmp_path):
  """Otherwise, PEFT would load the newest commit of the default branch."""

  def base(folder):
    config = json.loads((folder / 'adapter_config.json').read_text())
    return config['base_model_name_or_path'], config['revision']

  assert base(adapters) == (run.values.model.path, None)
  named = hub.Repository('model', 'me/base', 'c0ffee')
  monkeypatch.setattr(
    export, 'hub_checkpoint', types.SimpleNamespace(parse_repository=lambda _: named)
  )
  assert base(write(run, tmp_path / 'named', adapters=True)) == ('me/base', 'c0ffee')


@of('lora')
def test_a_run_exports_its_last_policy_merged(run, merged):
  file = 'model.safetensors'
  last = run.workdir / 'export' / 'last' / file
  assert last.read_bytes() == (merged / file).read_bytes()


@of('lora')
def test_transformers_and_peft_compute_the_policys_logits(run, merged, adapters):
  torch, transformers, peft = map(pytest.importorskip, ('torch', 'transformers', 'peft'))
  policy, _ = policies.load_run_params(run.experiment, str(run.workdir), None)
  tokens_T = np.random.default_rng(0).integers(0, run.experiment.model.vocab_size, 40)
  hidden_BTD = model.hidden_states(run.experiment.model, policy, tokens_T[None].astype(np.int32))
  ours_TV = (hidden_BTD @ model.unembedding(run.experiment.model, policy))[0]

  def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  for theirs in (load(merged), peft.PeftModel.from_pretrained(load(STORED), adapters)):
    with torch.no_grad():
      theirs_TV = theirs.eval()(torch.tensor(tokens_T[None])).logits[0].numpy()
    assert np.abs(ours_TV - theirs_TV).max() < 1e-5


@of('lora')
def test_adapters_are_rejected_on_a_different_base(run):
  file = f'{run.values.model.path}/model.safetensors'
  shutil.copy(file, file + '.right')
  shutil.copy(run.workdir / 'export' / 'last' / 'model.safetensors', file)
  try:
    differing = re.escape("on a different base (differing arrays: base['l")
    with pytest.raises(InputError, match=differing):
      policies.load_run_params(run.experiment, str(run.workdir), None)
    with pytest.raises(InputError, match='contains adapters that were trained on a different base'):
      recording.run_training(run.experiment)
  finally:
    shutil.move(file + '.right', file)
  assert policies.load_run_params(run.experiment, str(run.workdir), None)[1] == max(run.steps)


@of('lora')
@pytest.mark.parametrize(
  ('dtype', 'changes', 'message'),
  [
    ('bfloat16', {}, 'adapters are trained and written in float32, not in'),
    (None, {'lora.rank': 0}, 'this run trained the whole model (config.lora.rank=0) and has no ad'),
    (None, {'warm_start.num_updates': 9}, 'the adapters need random or warm-started weights'),
    (None, {'model.path': ''}, 'the adapters need random or warm-started weights'),
    (None, {'model.extension.rope_theta': 1e5}, "adapters cannot store the run's config.model.ext"),
  ],
)
def test_unusable_adapters_are_not_exported(run, dtype, changes, message):
  values = ConfigDict(read_config(str(run.workdir)))
  values.update_from_flattened_dict(changes)
  with pytest.raises(InputError, match=re.escape(f'--adapters: {message}')):
    export._check_adapters(experiment.parse_config(values), dtype)


def test_a_missing_warm_start_is_not_retrained(config, tmp_path):
  config.lora.rank = RANK
  with pytest.raises(InputError, match=r'warm-start weights .* are missing from .*/warm_start'):
    warm_start.initial_params(experiment.open_experiment(config, str(tmp_path)))
