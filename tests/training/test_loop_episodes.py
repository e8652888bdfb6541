"""A run of episodes with replay, held to numbers computed without the code.

What the policy wrote and what the environment said is read from the tokens themselves, by playing
each episode again.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.commands import generate
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import responses
from exgrpo_jax.experiment import experiment, policies, warm_start
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.page import experience
from tests.helpers import buffers, guesses, recording, tiny
from tests.helpers.guesses import RESPONSE, TURN, TURNS, read

Q, STEPS, SAVED = 4, 8, 4
BONUS = 1e-4  # of entropy


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  changed = guesses.values_of(values, questions=Q)
  changed.objective.entropy_bonus = BONUS
  folder = make_once('episodes', lambda folder: recording.record(changed, folder, compiled))
  return recording.load(changed, folder, compiled)


def rows(step):
  """(question, prompt, fresh response or replayed trajectory) of each row of a step's batch."""
  groups = zip(step.plan.questions, step.plan.prompts, step.responses, step.replays, strict=True)
  for question, prompt, own, replayed in groups:
    for member in [*own, replayed] if replayed else own:
      yield question, prompt, member


def test_the_run_exercises_what_the_other_tests_check(run):
  fresh = [one for step in run.steps.values() for own in step.responses for one in own]
  assert {1, 2, TURNS} <= {len(one.turns) for one in fresh}
  outcomes = [
    verdict.outcome for step in run.steps.values() for v in step.verdicts for verdict in v
  ]
  assert {'correct', 'wrong'} == set(outcomes)
  replays = [one for step in run.steps.values() for one in step.replays if one]
  assert len(replays) > 4 and any(len(one.turns) > 2 for one in replays)
  assert any(one.turns[0].written == TURN for one in fresh)


def test_episodes_are_what_policy_and_environment_said_in_turn(run):
  for step in run.steps.values():
    for question, own, judged in zip(step.plan.questions, step.responses, step.verdicts):
      for one, verdict in zip(own, judged):
        own_T, success = read(run, question, one.tokens)
        np.testing.assert_array_equal(one.own, own_T)
        assert verdict.correct == success and verdict.reward == float(success)


def test_the_policys_tokens_alone_have_log_probabilities_and_count(run):
  for step in run.steps.values():
    for b, (question, prompt, member) in enumerate(rows(step)):
      own_T, _ = read(run, question, member.tokens)
      place = slice(len(prompt), len(prompt) + len(member.tokens))
      np.testing.assert_array_equal(step.batch.response_mask_BT[b, place], own_T)
      assert step.batch.response_mask_BT[b].sum() == own_T.sum()
      np.testing.assert_array_equal(step.batch.behaviour_logp_BT[b, place], member.logp)
      assert not member.logp[~own_T].any() and member.logp[own_T].all()
      writer = run.steps[member.step] if b in np.flatnonzero(step.batch.is_replay_B) else step
      logp, _ = run.values_of(writer.params, prompt, member.tokens)
      np.testing.assert_allclose(member.logp[own_T], logp[own_T], atol=1e-4)


def test_what_decides_on_replay_is_of_the_policys_tokens(run):
  checked = 0
  for step in run.steps.values():
    replays = zip(step.plan.questions, step.plan.prompts, step.replays, step.scores, strict=True)
    for question, prompt, replayed, scores in replays:
      if replayed:
        own_T, success = read(run, question, replayed.tokens)
        logp, entropy = run.values_of(step.params, prompt, replayed.tokens)
        assert success and len(scores.logp) == own_T.sum()
        np.testing.assert_allclose(scores.logp, logp[own_T], atol=1e-4)
        np.testing.assert_allclose(scores.entropy, entropy[own_T], atol=1e-4)
        np.testing.assert_allclose(scores.log_ratio, logp[own_T] - replayed.logp[own_T], atol=1e-4)
        checked += 1
  assert checked


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1)
def expected_loss(config, params, batch, own_BT):
  """docs/algorithm.md on all logits at once, with the mask of `read`."""
  mask_BT = own_BT[:, 1:]
  logits_BTV = model.hidden_states(config, params, batch.tokens_BT) @ model.unembedding(
    config, params
  )
  logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
  logp_BT = jnp.take_along_axis(logp_BTV, batch.tokens_BT[:, 1:, None], axis=-1)[..., 0]
  entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
  w_BT = jnp.exp(logp_BT - batch.behaviour_logp_BT[:, 1:])
  fresh_BT = jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
  term_BT = jnp.where(batch.is_replay_B[:, None], w_BT / (w_BT + 0.1), fresh_BT)
  policy = (mask_BT * term_BT * batch.advantage_B[:, None]).sum() / (len(mask_BT) * RESPONSE)
  return -policy - BONUS * (mask_BT * entropy_BT).sum() / mask_BT.sum()


def own_mask(run, step):
  """float32 [B, T], 1 where `read` says that the policy wrote the token."""
  mask_BT = np.zeros(step.batch.tokens_BT.shape, np.float32)
  for b, (question, prompt, member) in enumerate(rows(step)):
    own_T, _ = read(run, question, member.tokens)
    mask_BT[b, len(prompt) : len(prompt) + len(own_T)] = own_T
  return mask_BT


def test_loss_and_gradient_are_the_formulas(run):
  step = next(
    step
    for step in run.steps.values()
    if np.abs(step.batch.advantage_B[step.batch.is_replay_B]).sum() > 0.5
  )
  (update,) = step.updates
  mask_BT = own_mask(run, step)
  loss, gradient = expected_loss(run.experiment.model, step.params, step.batch, mask_BT)
  norm = np.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(gradient)))
  assert update.sums['loss'] == pytest.approx(float(loss), abs=1e-6)
  record = next(r for r in metrics.read(run.workdir) if r['step'] == step.plan.step)
  assert record['gradient_norm'] == pytest.approx(norm, rel=1e-4)
  # A mask that is off by one would be noticed.
  shifted, _ = expected_loss(
    run.experiment.model, step.params, step.batch, np.roll(mask_BT, 1, axis=1)
  )
  assert abs(float(shifted) - float(loss)) > 1e-4


def test_metrics_count_the_policys_tokens_and_the_environments(run):
  table = step_records.read(run.workdir).responses.to_pylist()
  for record, step in zip(metrics.read(run.workdir)[1:], run.steps.values()):
    fresh = [one for own in step.responses for one in own]
    masks = [
      read(run, question, one.tokens)[0]
      for question, own in zip(step.plan.questions, step.responses)
      for one in own
    ]
    assert record['length/total'] == sum(own_T.sum() for own_T in masks)
    assert record['environment/tokens_mean'] == np.mean([(~own_T).sum() for own_T in masks])
    assert record['environment/turns_mean'] == np.mean([len(one.turns) for one in fresh])
    assert record['parity/max'] < 1e-4
    recorded = [row for row in table if row['step'] == step.plan.step and not row['is_replay']]
    entropies = [one.entropy[own_T].mean() for one, own_T in zip(fresh, masks)]
    np.testing.assert_allclose([row['entropy'] for row in recorded], entropies, rtol=1e-5)
    assert [row['length'] for row in recorded] == [own_T.sum() for own_T in masks]


def test_records_and_the_page_have_the_turns_of_each_episode(run):
  recorded = {
    (row['step'], row['group'], row['sample']): row
    for path in step_records.files(run.workdir, 'tokens')
    for row in step_records.read_file(path, 'tokens').to_pylist()
  }
  for step in run.steps.values():
    for group, (own, replayed) in enumerate(zip(step.responses, step.replays)):
      for sample, member in enumerate([*own, replayed] if replayed else own):
        row = recorded[step.plan.step, group, sample]
        assert [tuple(turn.values()) for turn in row['turns']] == list(member.turns)
        assert len(row['logp']) == len(row['entropy']) == len(row['tokens'])
        assert not np.array(row['entropy'])[~member.own].any()
  shown = experience.describe_texts(recorded.values(), lambda ids: list(map(str, ids)))
  first = shown['groups']['1/0'][0]
  assert first['turns'] == [list(turn) for turn in run.steps[1].responses[0][0].turns]
  stored = {row: entry.trajectories for row, entry in run.steps[STEPS].after.entries.items()}
  shown = experience.describe_stored(stored, lambda ids: list(map(str, ids)))
  row, (one, *_) = next(iter(stored.items()))
  assert shown['questions'][str(row)][0]['turns'] == one.turns


def test_a_warm_start_learns_what_the_player_says_and_not_the_answers(run):
  learnt = warm_start.load_solutions(run.experiment)
  assert len({len(row.turns) for row in learnt}) > 2
  tokens_BT, mask_BT = warm_start.padded(learnt, max(map(len, learnt)), 0)
  data = experiment.load_questions(run.experiment, run.values.warm_start.data)
  for question, row, tokens_T, mask_T in zip(data.questions, learnt, tokens_BT, mask_BT):
    own_T, _ = read(run, question, row.tokens)
    start = len(row.prompt)
    np.testing.assert_array_equal(tokens_T[start : start + len(own_T)], row.tokens)
    np.testing.assert_array_equal(mask_T[start : start + len(own_T)], own_T)
    assert mask_T.sum() == own_T.sum()


def test_an_episode_is_played_in_the_terminal(run, capsys):
  with run.compiling():
    policy = policies.open_policy(str(run.workdir))
    prompt, episodes = responses.play(policy, 3, samples=3)
    args = types.SimpleNamespace(
      **dict(config=None, checkpoint=str(run.workdir), step=None, model=None, prompt=None, row=3),
      **dict(samples=3, temperature=None, max_response=None, seed=0, tokens=False),
    )
    capsys.readouterr()
    generate.main(args)
  shown = capsys.readouterr().out.split('\n---')[1:]
  np.testing.assert_array_equal(prompt, run.data.prompts[3])
  (question,) = run.data.questions.read([3])
  for one, text in zip(episodes, shown, strict=True):
    own_T, success = read(run, question, one.tokens)
    np.testing.assert_array_equal(one.own, own_T)
    assert one.verdict and one.verdict.correct == success
    assert f'{len(one.turns)} turns, reward {int(success)}' in text
    assert f'; {own_T.sum()} tokens' in text and text.count('policy: ') == len(one.turns)
    assert text.count('environment: ') == len(one.turns) - 1


def test_what_is_not_there_is_not_played(run, recorded):
  with run.compiling():
    with_turns, single = (policies.open_policy(str(r.workdir)) for r in (run, recorded))
  with pytest.raises(InputError, match=r'--row=24 must be below 24, the rows of guess:train'):
    responses.play(with_turns, 24)
  with pytest.raises(InputError, match=r"environment\.name='' has no episodes"):
    responses.play(single, 0)
  with pytest.raises(InputError, match=r"environment\.name='guess' has questions of its own"):
    responses.sample(with_turns, ['1-64'])


def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(run, tmp_path):
  workdir = tmp_path / 'resumed'
  recording.resume(run, workdir, SAVED)
  expected, resumed = map(run.last_snapshot, (run.workdir, workdir))
  jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
  buffers.assert_same(resumed.buffer, expected.buffer)
  buffers.assert_same(resumed.buffer, run.steps[STEPS].after)
  stored = [t for entry in resumed.buffer.entries.values() for t in entry.trajectories]
  assert any(len(one.turns) > 1 for one in stored)
  # Which row gets which slot depends on the order of answers; what it samples does not.
  timed = ('environment/seconds', 'environment/idle_seconds', 'rollout/slots_busy')
  first, second = (
    [{k: v for k, v in record.items() if k not in timed} for record in tiny.untimed_records(where)]
    for where in (workdir, run.workdir)
  )
  assert first == second
  assert step_records.read(workdir) == step_records.read(run.workdir)
