"""The stages of a step, on plans of the recorded run (conftest.py)."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Trajectory, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import scoring, stages
from exgrpo_jax.runtime.randomness import Purpose
from tests.helpers import tiny

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS


def rows_of(plan):
  return [question.row for question in plan.questions]


def changed(rollout, **configs):
  """The Rollout with other values in some of its Configs, as in replay={'ratio': 0.25}."""
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


def test_with_fewer_than_a_steps_questions_left_the_stream_reads_retired_ones(recorded):
  size = len(recorded.data.questions)
  for num_retired, reads in ((size - Q, False), (size - Q + 1, True)):
    buffer = replay.Buffer(retired_epoch=dict.fromkeys(range(num_retired), 0), started=True)
    assert recorded.rollout.reads_retired(buffer, epoch=1) == reads
    assert not recorded.rollout.reads_retired(buffer, epoch=0)  # the epoch in which they retired


def test_a_plan_is_a_function_of_buffer_cursor_and_step(recorded):
  cursor = Cursor()
  for number, step in recorded.steps.items():
    for _ in range(2):
      plan, after = recorded.rollout.plan(step.buffer, cursor, number)
      assert rows_of(plan) == rows_of(step.plan) and plan.candidates == step.plan.candidates
      assert after == step.cursor and plan.epoch == after.epoch and plan.step == number
    cursor = step.cursor


def test_a_plan_holds_each_questions_own_prompt(recorded, chosen):
  for question, prompt in zip(chosen.plan.questions, chosen.plan.prompts):
    text = recorded.experiment.tokenizer.decode(prompt)
    assert text == f'{question.row}+0\n' and question.answer == str(question.row)


def test_groups_are_shuffled_by_seed_and_step(recorded):
  buffer = replay.Buffer()
  first, _ = recorded.rollout.plan(buffer, Cursor(), 1)
  later, _ = recorded.rollout.plan(buffer, Cursor(), 2)
  assert set(rows_of(first)) == set(rows_of(later)) and rows_of(first) != rows_of(later)

  def generator(purpose, place):
    return np.random.default_rng(np.random.SeedSequence(tiny.SEED, spawn_key=(purpose, place)))

  read = generator(7, 0).permutation(tiny.POOL)[:Q]  # as the stream gives them in epoch 0
  order = generator(5, 1).permutation(Q)  # of the groups of step 1
  assert rows_of(first) == read[order].tolist()


# ---- Pick among stored trajectories ----


def costs(recorded, step, kind):
  """For each group, the cost of each stored trajectory, in float64 from all logits."""
  for prompt, stored in zip(step.plan.prompts, step.plan.candidates):
    group_costs = []
    for t in stored:
      logp_TV = tiny.full_log_probabilities(
        step.params, recorded.experiment.model, np.concatenate([prompt, t.tokens])
      )[len(prompt) - 1 :]
      entropy = -(np.exp(logp_TV) * logp_TV).sum(-1).mean()
      perplexity = np.exp(-logp_TV[np.arange(len(t.tokens)), t.tokens].mean())
      group_costs.append(
        {
          'lowest_entropy': entropy,
          'highest_entropy': -entropy,
          'lowest_perplexity': perplexity,
          'highest_perplexity': -perplexity,
          'newest': -len(group_costs),
        }[kind]
      )
    yield group_costs


@pytest.mark.parametrize(
  'kind',
  ['lowest_entropy', 'highest_entropy', 'lowest_perplexity', 'highest_perplexity', 'newest'],
)
def test_the_stored_trajectory_is_picked_by(kind, recorded, chosen, params):
  rollout = changed(recorded.rollout, replay={'trajectory_selection': kind})
  replays, _ = rollout.pick_replays(params, chosen.plan)
  for picked, stored, cost in zip(replays, chosen.plan.candidates, costs(recorded, chosen, kind)):
    if stored:
      assert [t is picked for t in stored].index(True) == int(np.argmin(cost))
    else:
      assert picked is None


def test_a_random_pick_is_uniform_and_repeats_with_seed_and_step(recorded, chosen, params):
  rollout = changed(recorded.rollout, replay={'trajectory_selection': 'random'})
  group = next(i for i, stored in enumerate(chosen.plan.candidates) if len(stored) == 3)

  def pick(step):
    plan = dataclasses.replace(chosen.plan, step=step)
    picked = rollout.pick_replays(params, plan)[0][group]
    return [t is picked for t in plan.candidates[group]].index(True)

  picks = [pick(step) for step in range(300)]
  assert picks[:20] == [pick(step) for step in range(20)]
  assert ((np.bincount(picks, minlength=3) - 100) ** 2 / 100).sum() < 13.8  # chi-square, p = .001


@pytest.mark.parametrize(
  'kind', ['lowest_entropy', 'highest_entropy', 'lowest_perplexity', 'highest_perplexity']
)
def test_a_tie_goes_to_the_oldest(kind, recorded, chosen, params):
  group = next(i for i, stored in enumerate(chosen.plan.candidates) if len(stored) > 1)
  stored = chosen.plan.candidates[group][0]
  copies = tuple(dataclasses.replace(stored, step=step) for step in (3, 5, 9))
  candidates = tuple(copies if i == group else () for i in range(Q))
  rollout = changed(recorded.rollout, replay={'trajectory_selection': kind})
  picked, _ = rollout.pick_replays(params, dataclasses.replace(chosen.plan, candidates=candidates))
  assert picked[group].step == 3


@pytest.mark.parametrize('kind', ['lowest_entropy', 'newest', 'random'])
def test_what_is_replayed_has_the_scores_of_the_current_policy(kind, recorded, chosen, params):
  rollout = changed(recorded.rollout, replay={'trajectory_selection': kind})
  candidates = list(chosen.plan.candidates)
  several = next(group for group, own in enumerate(candidates) if len(own) > 1)
  candidates[several] = candidates[several][:1]  # nothing to choose from
  plan = dataclasses.replace(chosen.plan, candidates=tuple(candidates))
  replays, all_scores = rollout.pick_replays(params, plan)
  for group, (picked, scores) in enumerate(zip(replays, all_scores, strict=True)):
    prompt, own = plan.prompts[group], candidates[group]
    assert bool(picked) == bool(scores) == bool(own)
    if not picked:
      continue
    (logp,), (entropy,) = rollout.score(params, [(prompt, picked.tokens)])
    np.testing.assert_allclose(scores.logp, logp, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=1e-5)
    w = np.exp(logp.astype(np.float64) - picked.logp)
    np.testing.assert_allclose(scores.weight, w / (w + 0.1), atol=1e-5)
    if kind == 'lowest_entropy':
      assert scores.candidate_entropies == pytest.approx(
        [float(np.mean(rollout.score(params, [(prompt, t.tokens)])[1][0])) for t in own], abs=1e-5
      )
      assert np.mean(scores.entropy) == min(scores.candidate_entropies)
    else:
      assert scores.candidate_entropies is None


def test_only_what_decides_or_is_replayed_is_scored(recorded, chosen, params, monkeypatch):
  rows = []
  score = stages.Rollout.score
  monkeypatch.setattr(
    stages.Rollout, 'score', lambda *args: rows.append(len(args[2])) or score(*args)
  )
  stored = [len(own) for own in chosen.plan.candidates]
  for kind in ('lowest_perplexity', 'newest'):
    changed(recorded.rollout, replay={'trajectory_selection': kind}).pick_replays(
      params, chosen.plan
    )
  assert rows == [sum(stored), sum(map(bool, stored))] and rows[0] > rows[1]


def test_without_importance_correction_a_replay_has_the_log_probabilities_of_the_current_policy(
  recorded, chosen, params
):
  as_stored, _ = recorded.rollout.pick_replays(params, chosen.plan)
  rollout = changed(recorded.rollout, objective={'importance_correction': False})
  replays, _ = rollout.pick_replays(params, chosen.plan)
  moved = 0.0
  for prompt, stored, rescored in zip(chosen.plan.prompts, as_stored, replays, strict=True):
    if stored is None:
      assert rescored is None
      continue
    logp_TV = tiny.full_log_probabilities(
      chosen.params, recorded.experiment.model, np.concatenate([prompt, stored.tokens])
    )[len(prompt) - 1 :]
    logp = logp_TV[np.arange(len(stored.tokens)), stored.tokens]
    np.testing.assert_allclose(rescored.logp, logp, atol=1e-4)
    assert dataclasses.replace(rescored, logp=stored.logp) == stored  # the rest stays
    moved = max(moved, np.abs(stored.logp - logp).max())
  assert moved > 0.01


@pytest.mark.usefixtures('large_passes')
def test_a_forward_pass_that_scores_keeps_to_the_tokens_of_a_microbatch(recorded, monkeypatch):
  config = recorded.experiment.config
  gradient = dataclasses.replace(config.gradient, tokens_per_microbatch=4 * tiny.LENGTH + 1)
  opened = dataclasses.replace(
    recorded.experiment, config=dataclasses.replace(config, gradient=gradient)
  )
  seen = []

  def stub(_config, _params, tokens_BT, *_):
    seen.append(tokens_BT.shape)
    return np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)

  monkeypatch.setattr(scoring, 'score_tokens', stub)
  row = np.zeros(tiny.PROMPT, np.int32), np.zeros(tiny.RESPONSE, np.int32)
  experiment.make_rollout(opened, recorded.data).score({}, [row] * 6)
  assert seen == [(4, tiny.LENGTH)] * 2


# ---- Generate ----


@pytest.fixture(scope='module')
def generation(recorded, chosen, params):
  """(responses, what the grader was given by (group, sample)); the first question's are sums."""
  submitted, rollout = {}, recorded.rollout
  first, *others = chosen.plan.questions
  questions = (dataclasses.replace(first, source='arithmetic'), *others)
  responses, _ = rollout.generate(
    model.decode_layout(rollout.model, params, rollout.meshes),
    dataclasses.replace(chosen.plan, questions=questions),
    Purpose.ROLLOUT,
    submitted.setdefault,
  )
  return responses, submitted


def test_by_default_as_many_groups_are_in_flight_as_keep_the_slots_busy(recorded):
  def in_flight(**values):
    rollout = changed(recorded.rollout, config={'questions': 3, 'samples': 4, **values})
    return rollout.config.groups_in_flight

  assert in_flight(carry=False, in_flight=9) == 3
  assert in_flight(carry=True, in_flight=9) == 9
  assert in_flight(carry=True, slots=5, max_age=8) == 3 + 3 * 2
  assert in_flight(carry=True, slots=99, max_age=2) == 9  # no more can train in time


def test_neither_the_steps_that_a_response_spans_nor_its_slots_change_what_is_drawn(
  recorded, params
):
  """Four steps under one policy, and one that waits for all of the first step's groups."""
  rollout = changed(
    recorded.rollout,
    config={'carry': True, 'questions': 2, 'in_flight': 6, 'slots': 5, 'max_age': 4},
  )
  decode_params = model.decode_layout(rollout.model, params, rollout.meshes)

  def generate(rollout, plan):
    return rollout.generate(decode_params, plan, Purpose.ROLLOUT, lambda *_: None)[0]

  plan, cursor = rollout.plan(replay.Buffer(), Cursor(), 1)
  rows, at_once = rows_of(plan), generate(changed(rollout, config={'carry': False}), plan)
  found, begun_before = {}, 0
  for step in range(2, 6):
    responses = generate(rollout, plan)
    verdicts = [[None] * sum(one.is_complete for one in own) for own in responses]
    trained, own, _, carried = rollout.split(plan, responses, verdicts)
    found |= dict(zip(rows_of(trained), own))
    begun_before += sum(len(one.spans) > 1 for group in own for one in group)
    plan, cursor = rollout.plan(replay.Buffer(), cursor, step, carried)
    assert plan.drawn == [group.drawn for group in carried] + [step] * 2
  assert begun_before > 2 and {*rows} <= {*found}
  for row, group in zip(rows, at_once):
    for one, other in zip(found[row], group, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)


@pytest.fixture(scope='module')
def responses(generation):
  """Generated responses, by group."""
  return generation[0]


def test_a_replayed_question_gets_one_response_fewer(chosen, responses):
  assert [len(group) for group in responses] == [
    K - 1 if stored else K for stored in chosen.plan.candidates
  ]
  assert {K - 1, K} == {len(group) for group in responses}


def test_each_response_is_submitted_to_the_grader_with_its_questions_answer(
  recorded, chosen, generation
):
  responses, submitted = generation
  decode = recorded.experiment.tokenizer.decode
  assert {key: (given.text(), given.answer, given.kind) for key, given in submitted.items()} == {
    (g, k): (decode(response.tokens), chosen.plan.questions[g].answer, 'math')
    for g, group in enumerate(responses)
    for k, response in enumerate(group)
  }


def test_steps_are_checked_of_the_questions_whose_task_can(chosen, generation):
  row = chosen.plan.questions[0].row  # which asks for the sum of it and 0
  for (group, _), submission in generation[1].items():
    check_steps = submission.check_steps
    if group:
      assert check_steps is None
    else:
      assert check_steps(rf'{row}+0={row} \boxed{{{row}}}')
      assert not check_steps(rf'{row}+1={row + 1} \boxed{{{row + 1}}}')


# ---- Old log-probabilities ----


def flatten(groups):
  return [response for group in groups for response in group]


def test_the_sampler_and_the_trainer_agree_on_log_probabilities(
  recorded, chosen, params, responses
):
  rollout = changed(recorded.rollout, objective={'old_logprobs': 'recompute'})
  recomputed, parity = rollout.old_logprobs(params, chosen.plan, responses)
  differences = []
  for sampled, scored in zip(flatten(responses), flatten(recomputed), strict=True):
    np.testing.assert_array_equal(sampled.tokens, scored.tokens)
    differences.append(np.abs(sampled.logp - scored.logp))
  assert 0 < parity['parity/mean'] < parity['parity/max'] < 1e-4
  assert parity['parity/max'] == np.concatenate(differences).max()
  assert parity['parity/mean'] == pytest.approx(np.concatenate(differences).mean())


def test_recomputed_log_probabilities_are_the_scorers(
  recorded, chosen, params, responses, monkeypatch
):
  rollout = changed(recorded.rollout, objective={'old_logprobs': 'recompute'})

  def score(_, params, rows):
    del params
    return [np.full(len(tokens), -float(prompt[0]) - len(tokens)) for prompt, tokens in rows], None

  monkeypatch.setattr(stages.Rollout, 'score', score)
  recomputed, _ = rollout.old_logprobs(params, chosen.plan, responses)
  for prompt, group in zip(chosen.plan.prompts, recomputed):
    for response in group:
      assert set(response.logp) == {-float(prompt[0]) - len(response.tokens)}


def at_step(plan, step):
  return dataclasses.replace(plan, step=step)


def test_a_sampler_that_is_off_stops_the_run(recorded, chosen, params, responses):
  wrong = [
    [dataclasses.replace(response, logp=response.logp - 0.25) for response in group]
    for group in responses
  ]
  rollout = changed(recorded.rollout, parity={'max': 0.2, 'every': 10})
  for step in (1, 11, 21):
    with pytest.raises(
      InputError,
      match=re.escape(
        f"step {step}: the sampler's log-probabilities differ from the trainer's by up to 0.25 "
        'nats (mean 0.25), more than config.parity.max=0.2, so importance weights would be wrong'
      ),
    ):
      rollout.old_logprobs(params, at_step(chosen.plan, step), wrong)
  assert rollout.old_logprobs(params, at_step(chosen.plan, 2), wrong) == (wrong, {})  # not compared
  _, parity = changed(rollout, parity={'max': 0.3}).old_logprobs(
    params, at_step(chosen.plan, 1), wrong
  )
  assert parity['parity/max'] == pytest.approx(0.25, abs=1e-3)


def test_a_log_probability_that_is_not_a_number_stops_the_run(recorded, chosen, params, responses):
  (first, *others), *other_groups = responses
  broken = [[dataclasses.replace(first, logp=first.logp * np.nan), *others], *other_groups]
  with pytest.raises(InputError, match='by up to nan nats'):
    recorded.rollout.old_logprobs(params, at_step(chosen.plan, 1), broken)


# ---- Grade ----


def test_verdicts_are_in_the_order_of_the_responses_whichever_came_first(
  recorded, chosen, responses
):
  class GraderInReverse:
    def collect(self):
      return dict(
        reversed(
          [
            ((g, k), Verdict(10.0 * g + k, 'wrong'))
            for g, group in enumerate(responses)
            for k in range(len(group))
          ]
        )
      )

  verdicts = recorded.rollout.grade(chosen.plan, responses, GraderInReverse())
  assert [[v.reward for v in group] for group in verdicts] == [
    [10.0 * g + k for k in range(len(group))] for g, group in enumerate(responses)
  ]


# ---- Assemble ----


def assemble(rollout, step):
  return rollout.assemble(step.plan, step.responses, step.replays, step.verdicts)


@pytest.mark.parametrize(
  ('difficulty', 'successes'),
  [('easy', {3, 4}), ('medium', {2}), ('hard', {0, 1}), ('all', {0, 1, 2, 3, 4})],
)
def test_training_on_one_difficulty_masks_the_other_groups(difficulty, successes, recorded):
  rollout = changed(recorded.rollout, replay={'difficulty': difficulty})
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
    np.testing.assert_array_equal(
      batch.response_mask_BT, step.batch.response_mask_BT * trains_B[:, None]
    )
    for name in ('tokens_BT', 'behaviour_logp_BT', 'advantage_B', 'is_replay_B', 'policy_step_B'):
      np.testing.assert_array_equal(getattr(batch, name), getattr(step.batch, name), err_msg=name)
    seen |= set(solved_Q)
  assert seen == {0, 1, 2, 3, 4}


def test_rewards_other_than_0_and_1_and_the_replayed_one_make_the_advantage(recorded, chosen):
  verdicts = [
    [Verdict(float(g + 2 * k), 'wrong') for k in range(len(group))]
    for g, group in enumerate(chosen.responses)
  ]
  replays = [
    trajectory and dataclasses.replace(trajectory, reward=-5.0) for trajectory in chosen.replays
  ]
  batch = recorded.rollout.assemble(chosen.plan, chosen.responses, replays, verdicts)
  reward_QK = np.array(
    [
      [v.reward for v in group] + ([-5.0] if trajectory else [])
      for group, trajectory in zip(verdicts, replays)
    ]
  )
  np.testing.assert_allclose(
    batch.advantage_B, (reward_QK - reward_QK.mean(axis=1, keepdims=True)).ravel(), atol=1e-5
  )


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


def test_the_arrays_of_the_batch_have_the_types_that_the_loss_expects(chosen):
  assert chosen.batch.is_carried_BT is None
  arrays = {name: array for name, array in vars(chosen.batch).items() if array is not None}
  assert {name: str(array.dtype) for name, array in arrays.items()} == {
    'tokens_BT': 'int32',
    'response_mask_BT': 'float32',
    'behaviour_logp_BT': 'float32',
    'advantage_B': 'float32',
    'is_replay_B': 'bool',
    'policy_step_B': 'int32',
    'tis_weight_BT': 'float32',
  }


def test_only_fresh_rows_of_the_batch_have_tis_weights(recorded, chosen, monkeypatch):
  """The trainer's probabilities are 1.2 or 2 times the sampler's, by turns; the limit is 1.5."""
  rollout = changed(recorded.rollout, objective={'old_logprobs': 'recompute', 'tis_limit': 1.5})
  logps = [
    response.logp + np.float32(np.log((1.2, 2.0)[i % 2]))
    for i, response in enumerate(flatten(chosen.responses))
  ]
  monkeypatch.setattr(stages.Rollout, 'score', lambda *_: (logps, None))
  responses, _ = rollout.old_logprobs(None, chosen.plan, chosen.responses)
  batch = rollout.assemble(chosen.plan, responses, chosen.replays, chosen.verdicts)
  is_fresh_B = ~batch.is_replay_B
  for i, b in enumerate(np.flatnonzero(is_fresh_B)):
    is_response_T = batch.response_mask_BT[b] > 0
    np.testing.assert_array_equal(batch.behaviour_logp_BT[b, is_response_T], logps[i])
    np.testing.assert_allclose(batch.tis_weight_BT[b, is_response_T], (1.2, 1.5)[i % 2], rtol=1e-5)
    assert (batch.tis_weight_BT[b, ~is_response_T] == 1).all()
  assert batch.is_replay_B.any() and (batch.tis_weight_BT[~is_fresh_B] == 1).all()
  assert (chosen.batch.tis_weight_BT == 1).all()  # without a limit


def test_a_trajectory_of_an_earlier_step_keeps_that_step(recorded, chosen):
  trajectory = Trajectory(
    tokens=np.array([5], np.int32), logp=np.array([-1.5], np.float32), reward=1.0, step=2
  )
  replays = [trajectory if replayed else None for replayed in chosen.replays]
  batch = recorded.rollout.assemble(chosen.plan, chosen.responses, replays, chosen.verdicts)
  assert set(batch.policy_step_B[batch.is_replay_B]) == {2}
  assert set(batch.policy_step_B[~batch.is_replay_B]) == {chosen.plan.step}
  assert (batch.behaviour_logp_BT[batch.is_replay_B].sum(axis=1) == -1.5).all()
