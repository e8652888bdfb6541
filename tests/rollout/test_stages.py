"""The stages of a step, on plans of the recorded run (conftest.py)."""

import dataclasses
import re
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import objective, question_stream, replay
from exgrpo_jax.datatypes import (
  Cursor,
  GradedGroups,
  PartialGroup,
  Plan,
  ReplayScores,
  Response,
  Trajectory,
  Verdict,
)
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.generation import make_rollout
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import scoring, stages
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE
from tests.helpers import tiny
from tests.helpers.decoding import ScriptedSampler

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS


def rows_of(plan):
  return [question.row for question in plan.questions]


def changed(rollout, **configs):
  """Return the setup with changed configs, for example replay_config={'ratio': 0.25}."""
  return dataclasses.replace(
    rollout,
    **{
      name: dataclasses.replace(getattr(rollout, name), **values)
      for name, values in configs.items()
    },
  )


@pytest.fixture(scope='module')
def chosen(recorded):
  """A step with several stored trajectories to choose from for each replayed question."""
  return next(
    step
    for step in reversed(recorded.steps.values())
    if sum(len(stored) > 1 for stored in step.plan.candidates) >= 2
  )


@pytest.fixture(scope='module')
def params(chosen):
  return jax.device_put(chosen.params, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


# ---- Plan ----


def test_the_stream_reads_retired_questions_if_too_few_others_are_left(recorded):
  size = len(recorded.data.questions)
  for num_retired, reads in ((size - Q, False), (size - Q + 1, True)):
    retired = dict.fromkeys(range(num_retired), 0)
    assert question_stream.reads_retired(1, size, retired, Q) == reads
    assert not question_stream.reads_retired(0, size, retired, Q)  # the epoch of their retirement


def test_a_plan_is_a_function_of_buffer_cursor_and_step(recorded):
  cursor = Cursor()
  for number, step in recorded.steps.items():
    for _ in range(2):
      plan = stages.plan_step(recorded.rollout, step.buffer, cursor, number)
      assert rows_of(plan) == rows_of(step.plan) and plan.candidates == step.plan.candidates
      assert plan.cursor == step.plan.cursor and plan.step == number
    cursor = step.plan.cursor


def test_groups_are_shuffled_by_seed_and_step(recorded):
  buffer = replay.Buffer()
  first = stages.plan_step(recorded.rollout, buffer, Cursor(), 1)
  later = stages.plan_step(recorded.rollout, buffer, Cursor(), 2)
  assert set(rows_of(first)) == set(rows_of(later)) and rows_of(first) != rows_of(later)

  def generator(purpose, place):
    return np.random.default_rng(np.random.SeedSequence(tiny.SEED, spawn_key=(purpose, place)))

  read = generator(7, 0).permutation(tiny.POOL)[:Q]  # the stream's order in epoch 0
  order = generator(5, 1).permutation(Q)  # the order of step 1's groups
  assert rows_of(first) == read[order].tolist()


def test_a_group_that_an_earlier_step_began_keeps_a_stored_response(recorded, chosen, params):
  """It has only K - 1 fresh responses. If all stored ones drifted too far, it keeps the nearest."""
  begun = [len(own) > 1 for own in chosen.plan.candidates].index(True) + 1
  plan = dataclasses.replace(chosen.plan, partial_groups=(None,) * begun)
  assert any(plan.candidates[begun:])
  drifts = [
    [np.square(recorded.values_of(params, p, one.tokens)[0] - one.logp).mean() for one in own]
    for p, own in zip(plan.prompts, plan.candidates)
  ]
  least, *_, most = sorted(drifts[begun - 1])
  for limit in (-1.0, (least + most) / 2):  # all drifted too far, or some of the last begun group's
    gate = {'question_selection': 'headroom_drift', 'max_drift': limit}
    admitted = stages.admit(changed(recorded.rollout, replay_config=gate), params, plan)
    for group, (own, found) in enumerate(zip(plan.candidates, drifts)):
      bar = max(limit, min(found)) if own and group < begun else limit
      near = [one for one, drift in zip(own, found) if drift <= bar]
      assert [id(one) for one in admitted.candidates[group]] == [id(one) for one in near]
    assert len(admitted.candidates[begun - 1]) < len(plan.candidates[begun - 1])
  assert stages.admit(recorded.rollout, params, plan) is plan


@pytest.mark.parametrize(
  ('missing', 'drawn', 'expected'),
  [(0, 20, []), (1, 20, [10, 18]), (1, 21, [18]), (1, 28, [18])],  # at most 10 steps old
)
def test_a_begun_group_has_stored_responses_that_were_new_enough_when_it_was_drawn(
  recorded, missing, drawn, expected
):
  rollout = changed(recorded.rollout, replay_config={'max_age': 10.0})
  step = next(step for step in recorded.steps.values() if step.buffer.entries)
  row, entry = next(iter(step.buffer.entries.items()))
  stored = tuple(dataclasses.replace(entry.trajectories[0], step=step) for step in (10, 18))
  buffer = replay.Buffer({row: dataclasses.replace(entry, trajectories=stored)}, started=True)
  own = (EMPTY_RESPONSE,) * (K - missing)
  group = PartialGroup(row, drawn=drawn, is_drawn=True, responses=own, verdicts=())
  plan = stages.plan_step(rollout, buffer, Cursor(), 29, (group,))
  assert [one.step for one in plan.candidates[0]] == expected


# ---- Pick among stored trajectories ----


def test_the_trajectory_of_lowest_entropy_is_replayed_with_its_scores(recorded, chosen, params):
  """Compare with values from all logits in float64; see docs/algorithm.md."""
  replays, all_scores = stages.pick_replays(recorded.rollout, params, chosen.plan)
  groups = zip(chosen.plan.prompts, chosen.plan.candidates, replays, all_scores, strict=True)
  for prompt, stored, picked, scores in groups:
    assert bool(picked) == bool(scores) == bool(stored)
    if stored:
      found = [recorded.values_of(chosen.params, prompt, t.tokens) for t in stored]
      means = [entropy.mean() for _, entropy in found]
      assert scores.candidate_entropies == pytest.approx(means, abs=1e-5)
      best = int(np.argmin(means))
      assert picked is stored[best]
      logp, entropy = found[best]
      np.testing.assert_allclose(scores.logp, logp, atol=1e-5)
      np.testing.assert_allclose(scores.entropy, entropy, atol=1e-5)
      np.testing.assert_allclose(scores.log_ratio, logp - picked.logp, atol=1e-5)
      w = np.exp(logp - picked.logp)
      np.testing.assert_allclose(scores.shaped, w / (w + 0.1), atol=1e-5)


def test_a_trajectory_with_a_wrong_step_is_not_replayed_if_another_is_valid(
  recorded, chosen, params, monkeypatch
):
  """The checker accepts only the trajectories that the entropy rule would choose last."""
  decode = recorded.rollout.tokenizer.decode
  other_way = changed(recorded.rollout, replay_config={'trajectory_selection': 'highest_entropy'})
  last, _ = stages.pick_replays(other_way, params, chosen.plan)
  valid = {decode(stored.tokens) for stored in last if stored}
  monkeypatch.setattr(stages, 'step_checker', lambda _: valid.__contains__)
  rollout = changed(recorded.rollout, replay_config={'trajectory_selection': 'valid_steps'})
  replays, _ = stages.pick_replays(rollout, params, chosen.plan)
  as_paper, _ = stages.pick_replays(recorded.rollout, params, chosen.plan)
  assert {decode(picked.tokens) for picked in replays if picked} <= valid
  assert not {decode(picked.tokens) for picked in as_paper if picked} <= valid


def test_the_released_rule_compares_padding_and_prompts_by_the_lengths_of_the_last_eight(
  recorded, chosen, params, monkeypatch
):
  """The expected cost averages right-aligned entropies from another response's length on."""
  rollout = changed(recorded.rollout, replay_config={'trajectory_selection': 'released'})
  stored = [
    (prompt, one) for prompt, own in zip(chosen.plan.prompts, chosen.plan.candidates) for one in own
  ]
  lengths = [sum(token != rollout.tokenizer.pad_id for token in one.tokens) for _, one in stored]
  starts = [*lengths[8 * ((len(stored) - 1) // 8) :], *[0] * 8]
  expected = []
  for place, (prompt, one) in enumerate(stored):
    sequence = np.concatenate([prompt, one.tokens])
    _, entropy = recorded.values_of(chosen.params, sequence[:1], sequence[1:])
    window = [*np.zeros(tiny.RESPONSE), *entropy][-tiny.RESPONSE :]
    expected.append(np.mean(window[starts[place % 8] :]))
  pick, seen = scoring.pick, []

  def note(*arguments):
    seen.extend(arguments[-1])
    return pick(*arguments)

  monkeypatch.setattr(scoring, 'pick', note)
  replays, scores = stages.pick_replays(rollout, params, chosen.plan)
  np.testing.assert_allclose(seen, expected, atol=1e-5)
  costs = iter(seen)
  for own, picked, of_picked in zip(chosen.plan.candidates, replays, scores, strict=True):
    assert bool(own) == bool(picked) == bool(of_picked)
    if own:
      assert picked is own[int(np.argmin([next(costs) for _ in own]))]


def test_shaped_ratios_follow_the_configured_shaping(recorded, chosen, params):
  paper, normalised = (
    stages.pick_replays(
      changed(recorded.rollout, objective_config={'shaping': shaping}), params, chosen.plan
    )[1]
    for shaping in ('policy_shaping', 'unit_slope')
  )
  for of_paper, of_normalised in zip(paper, normalised):
    if of_paper:
      np.testing.assert_allclose(of_normalised.shaped, 12.1 * of_paper.shaped, rtol=1e-5)


def test_without_importance_correction_a_replay_has_the_log_probabilities_of_the_current_policy(
  recorded, chosen, params
):
  as_stored, _ = stages.pick_replays(recorded.rollout, params, chosen.plan)
  rollout = changed(recorded.rollout, objective_config={'importance_correction': False})
  replays, _ = stages.pick_replays(rollout, params, chosen.plan)
  moved = 0.0
  for prompt, stored, rescored in zip(chosen.plan.prompts, as_stored, replays, strict=True):
    if stored is None:
      assert rescored is None
      continue
    logp, _ = recorded.values_of(chosen.params, prompt, stored.tokens)
    np.testing.assert_allclose(rescored.logp, logp, atol=1e-4)
    assert vars(rescored) | {'logp': stored.logp} == vars(stored)  # the rest is unchanged
    moved = max(moved, np.abs(stored.logp - logp).max())
  assert moved > 0.01


@pytest.mark.usefixtures('large_passes')
def test_a_scoring_pass_has_at_most_a_microbatch_of_tokens(recorded, monkeypatch):
  config = recorded.experiment.config
  microbatch = dataclasses.replace(config.microbatch, tokens=4 * tiny.LENGTH + 1)
  opened = dataclasses.replace(
    recorded.experiment, config=dataclasses.replace(config, microbatch=microbatch)
  )
  seen = []

  def stub(_config, _params, tokens_BT, *_):
    seen.append(tokens_BT.shape)
    return np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)

  monkeypatch.setattr(scoring, 'score_tokens', stub)
  row = np.zeros(tiny.PROMPT, np.int32), np.zeros(tiny.RESPONSE, np.int32)
  scoring.score(make_rollout(opened, recorded.data).score_spec, {}, [row] * 6)
  assert seen == [(4, tiny.LENGTH)] * 2


# ---- Generate ----


@pytest.fixture(scope='module')
def generation(recorded, chosen, params):
  """Return (responses, submissions by (group, sample)). The first question is a sum."""
  submitted, rollout = {}, recorded.rollout
  first, *others = chosen.plan.questions
  questions = (dataclasses.replace(first, source='arithmetic'), *others)
  plan = dataclasses.replace(chosen.plan, questions=questions)
  decode_params = model.decode_layout(recorded.experiment.model, params, recorded.experiment.meshes)
  responses, _ = stages.generate(rollout, decode_params, plan, submitted.setdefault)
  return responses, submitted


@pytest.fixture(scope='module')
def responses(generation):
  """The generated responses, by group."""
  return generation[0]


def test_each_response_is_submitted_to_the_grader_with_its_questions_answer(
  recorded, chosen, generation
):
  """A replayed question has one response fewer. Steps are checked if the task supports it."""
  responses, submitted = generation
  decode = recorded.experiment.tokenizer.decode
  counts = [K - 1 if stored else K for stored in chosen.plan.candidates]
  assert [len(group) for group in responses] == counts and {*counts} == {K - 1, K}
  row = chosen.plan.questions[0].row  # this question asks for row + 0
  for g, group in enumerate(responses):
    for k, response in enumerate(group):
      given = submitted.pop((g, k))
      question = chosen.plan.questions[g]
      assert (given.text(), given.answer) == (decode(response.tokens), question.answer)
      assert bool(given.check_steps) == (g == 0) and given.kind == 'math'
      if given.check_steps:
        assert given.check_steps(rf'{row}+0={row} \boxed{{{row}}}')
        assert not given.check_steps(rf'{row}+1={row + 1} \boxed{{{row + 1}}}')
  assert not submitted


# ---- Old log-probabilities ----


def flatten(groups):
  return [response for group in groups for response in group]


def test_the_sampler_and_the_trainer_agree_on_log_probabilities(
  recorded, chosen, params, responses
):
  rollout = changed(recorded.rollout, objective_config={'old_logprobs': 'recompute'})
  recomputed, mismatch = stages.old_logprobs(rollout, params, chosen.plan, responses)
  differences = []
  for sampled, scored in zip(flatten(responses), flatten(recomputed), strict=True):
    np.testing.assert_array_equal(sampled.tokens, scored.tokens)
    differences.append(np.abs(sampled.logp - scored.logp))
  assert (
    0 < mismatch['rollout_mismatch/logprob_mean'] < mismatch['rollout_mismatch/logprob_max'] < 1e-4
  )
  assert mismatch['rollout_mismatch/logprob_max'] == np.concatenate(differences).max()
  assert mismatch['rollout_mismatch/logprob_mean'] == pytest.approx(
    np.concatenate(differences).mean()
  )


def at_step(plan, step):
  return dataclasses.replace(plan, step=step)


def test_a_large_mismatch_with_the_sampler_stops_the_run(recorded, chosen, params, responses):
  wrong = [
    [dataclasses.replace(response, logp=response.logp - 0.25) for response in group]
    for group in responses
  ]
  rollout = changed(recorded.rollout, logprob_check={'max': 0.2, 'every': 10})
  for step in (1, 11, 21):
    with pytest.raises(
      InputError,
      match=re.escape(
        f'config.logprob_check.max=0.2: at step {step} the log-probabilities of the sampler and '
        'the trainer differ by up to 0.25 nats (mean 0.25), so importance weights would be wrong'
      ),
    ):
      stages.old_logprobs(rollout, params, at_step(chosen.plan, step), wrong)
  assert stages.old_logprobs(rollout, params, at_step(chosen.plan, 2), wrong) == (
    wrong,
    {},
  )  # not compared
  lenient = changed(rollout, logprob_check={'max': 0.3})
  _, mismatch = stages.old_logprobs(lenient, params, at_step(chosen.plan, 1), wrong)
  assert mismatch['rollout_mismatch/logprob_max'] == pytest.approx(0.25, abs=1e-3)


def test_a_nan_log_probability_stops_the_run(recorded, chosen, params, responses):
  (first, *others), *other_groups = responses
  broken = [[dataclasses.replace(first, logp=first.logp * np.nan), *others], *other_groups]
  with pytest.raises(InputError, match='by up to nan nats'):
    stages.old_logprobs(recorded.rollout, params, at_step(chosen.plan, 1), broken)


# ---- Grade ----


def test_verdicts_are_in_the_order_of_the_responses_not_of_arrival(recorded, chosen, responses):
  expected = [[10.0 * g + k for k in range(len(group))] for g, group in enumerate(responses)]
  verdicts = {
    (g, k): Verdict(reward, 'wrong')
    for g, rewards in reversed([*enumerate(expected)])
    for k, reward in enumerate(rewards)
  }
  grader = types.SimpleNamespace(collect=lambda: verdicts)
  trained = stages.collect_verdicts(recorded.rollout, chosen.plan, responses, grader)
  assert [[v.reward for v in group] for group in trained.verdicts] == expected
  assert (trained.plan, trained.responses, trained.partial_groups) == (chosen.plan, responses, ())


# ---- Assemble ----


def assemble(rollout, step):
  trained = GradedGroups(step.plan, step.responses, step.verdicts)
  return stages.assemble(rollout, trained, step.replays, step.scores)


def assert_differs_only_in_what_trains(batch, full_batch, trains_B):
  np.testing.assert_array_equal(
    batch.response_mask_BT, full_batch.response_mask_BT * trains_B[:, None]
  )
  for name in ('tokens_BT', 'old_logp_BT', 'advantage_B', 'is_replay_B', 'policy_step_B'):
    np.testing.assert_array_equal(getattr(batch, name), getattr(full_batch, name), err_msg=name)


@pytest.mark.parametrize(
  ('difficulty', 'successes'),
  [('easy', {3, 4}), ('medium', {2}), ('hard', {0, 1}), ('all', {0, 1, 2, 3, 4})],
)
def test_training_on_one_difficulty_masks_the_other_groups(difficulty, successes, recorded):
  rollout = changed(recorded.rollout, replay_config={'difficulty': difficulty})
  seen = set()
  for step in recorded.steps.values():
    batch = assemble(rollout, step)
    solved_Q = np.array(
      [
        sum(v.correct for v in verdicts) + (replayed is not None)
        for verdicts, replayed in zip(step.verdicts, step.replays)
      ]
    )
    trains_B = np.repeat(np.isin(solved_Q, list(successes)), K)
    assert_differs_only_in_what_trains(batch, step.batch, trains_B)
    seen |= set(solved_Q)
  assert seen == {0, 1, 2, 3, 4}


def test_replayed_rows_that_do_not_train_leave_the_second_moment_of_the_others_alone():
  """The first group is half solved. The second is hard: its ratios are near 1 but do not count."""
  rollout = types.SimpleNamespace(
    config=types.SimpleNamespace(longest_row=8, router_replay=False, keeps_groups=False),
    replay_config=replay.ReplayConfig(difficulty='medium'),
    objective_config=objective.ObjectiveConfig(m2po_threshold=0.04),
    tokenizer=types.SimpleNamespace(pad_id=0),
  )
  nothing, log_ratios = np.zeros(1, np.float32), np.float32([[0.3, 0.1], [0.01, 0.01]])
  fresh = Response(np.int32([1]), nothing, entropy=nothing, truncated=False)
  stored = Trajectory(np.int32([2, 3]), np.zeros(2, np.float32), reward=1.0, step=1)
  scores = [ReplayScores(stored, x, entropy=x, shaped=x, log_ratio=x) for x in log_ratios]
  right, wrong = Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')
  plan = Plan(2, Cursor(), True, (None,) * 2, (np.int32([5]),) * 2, ((stored,),) * 2, (True,) * 2)
  trained = GradedGroups(plan, [[fresh] * 3] * 2, [[right, wrong, wrong], [wrong] * 3])
  batch = stages.assemble(rollout, trained, [stored] * 2, scores)
  is_own_BT = (batch.response_mask_BT > 0) & batch.is_replay_B[:, None]
  assert batch.term_weight_BT[is_own_BT].tolist() == [0, 1]  # (.3^2 + .1^2) / 2 > .04


def test_padding_is_the_pad_token_on_the_right_to_a_bucketed_length(recorded, chosen):
  rollout = changed(recorded.rollout, config={'max_response': 1000})
  batch = assemble(rollout, chosen)
  assert batch.tokens_BT.shape == batch.response_mask_BT.shape == (Q * K, 32)
  lengths = [
    len(prompt) + len(member.tokens)
    for prompt, group, replayed in zip(chosen.plan.prompts, chosen.responses, chosen.replays)
    for member in (*group, *filter(None, [replayed]))
  ]
  is_padding_BT = np.arange(32) >= np.array(lengths)[:, None]
  assert (batch.tokens_BT[is_padding_BT] == rollout.tokenizer.pad_id).all()
  assert (batch.response_mask_BT[is_padding_BT] == 0).all()
  assert assemble(recorded.rollout, chosen).tokens_BT.shape == (Q * K, tiny.LENGTH)  # the limit


def test_only_fresh_rows_of_the_batch_have_tis_weights(recorded, chosen, monkeypatch):
  """The trainer's probabilities are alternately 1.2 and 2 times the sampler's; the limit is 1.5."""
  rollout = changed(
    recorded.rollout, objective_config={'old_logprobs': 'recompute', 'tis_limit': 1.5}
  )
  logps = [
    response.logp + np.float32(np.log((1.2, 2.0)[i % 2]))
    for i, response in enumerate(flatten(chosen.responses))
  ]
  monkeypatch.setattr(scoring, 'score', lambda *_: (logps, None))
  responses, _ = stages.old_logprobs(rollout, None, chosen.plan, chosen.responses)
  batch = assemble(rollout, dataclasses.replace(chosen, responses=responses))
  is_fresh_B = ~batch.is_replay_B
  for i, b in enumerate(np.flatnonzero(is_fresh_B)):
    is_response_T = batch.response_mask_BT[b] > 0
    np.testing.assert_array_equal(batch.old_logp_BT[b, is_response_T], logps[i])
    np.testing.assert_allclose(batch.term_weight_BT[b, is_response_T], (1.2, 1.5)[i % 2], rtol=1e-5)
    assert (batch.term_weight_BT[b, ~is_response_T] == 1).all()
  assert batch.is_replay_B.any() and (batch.term_weight_BT[~is_fresh_B] == 1).all()
  assert (chosen.batch.term_weight_BT == 1).all()  # without a limit


def test_truncated_responses_are_masked_but_keep_their_rows_and_rewards(recorded, chosen):
  rollout = changed(recorded.rollout, objective_config={'mask_truncated': True})
  responses = [
    [dataclasses.replace(one, truncated=(g + k) % 3 == 0) for k, one in enumerate(group)]
    for g, group in enumerate(chosen.responses)
  ]
  batch = assemble(rollout, dataclasses.replace(chosen, responses=responses))
  trains_B = np.ones(Q * K, bool)
  trains_B[~batch.is_replay_B] = [not one.truncated for one in flatten(responses)]
  assert batch.is_replay_B.any() and not trains_B.all()
  assert_differs_only_in_what_trains(batch, chosen.batch, trains_B)


# ---- Samplers ----


def test_the_stages_work_with_any_sampler(recorded):
  def script(request):
    return [request.question, request.sample] * (1 + request.sample)

  rollout = dataclasses.replace(recorded.rollout, sampler=ScriptedSampler(script))
  plan, submitted = stages.plan_step(rollout, replay.Buffer(), Cursor(), 1), {}
  responses, _ = stages.generate(rollout, None, plan, submitted.setdefault)
  for group, (question, own) in enumerate(zip(plan.questions, responses, strict=True)):
    for sample, one in enumerate(own):
      assert one.tokens.tolist() == [question.row, sample] * (1 + sample)
      assert submitted[group, sample].answer == question.answer
