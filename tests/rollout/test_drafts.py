"""Drafts: the proposals, and that decoding with drafts gives the same tokens as without."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import drafts, programs, scheduler, slots, token_sampling
from exgrpo_jax.rollout.sampler import Request
from exgrpo_jax.rollout.scheduler import SlotEngine
from tests.helpers import tiers
from tests.helpers.decoding import decoding_by, plain_kernel
from tests.rollout import test_scheduler, test_slots
from tests.rollout.test_scheduler import (
  CONFIG,
  KEY,
  NEVER,
  SPEC,
  assert_same_responses,
  assert_same_tokens,
)

PROMPTS = [np.array(prompt, np.int32) for prompt in ([5, 6, 9], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9])]
COUNTS = (5, 4, 6)  # responses per prompt
LOCAL = dict(num_layers=2, window=3)  # shorter than a pass
EXPERTS = dict(num_experts=8, experts_per_token=2, mlp_width=16)


@functools.cache
def decoding_params(config, mesh):
  params = test_scheduler.make_params(config, mesh)
  return model.decode_layout(config, params, sharding.Meshes(mesh, mesh))


@pytest.fixture(scope='module')
def generate(mesh):
  """Return a function from (drafts, spec changes) to (responses to PROMPTS, metrics)."""

  def call(setting, config=CONFIG, limits=None, resumes=False, **changes):
    spec = dataclasses.replace(SPEC, drafts=setting, **{'max_response': 40, **changes})
    places = [(row, sample) for row, count in enumerate(COUNTS) for sample in range(count)]
    limits = limits or [spec.max_response] * len(places)
    requests = [
      Request(PROMPTS[row], row, sample, 0, limit) for (row, sample), limit in zip(places, limits)
    ]
    engine = SlotEngine(config, spec, mesh, lambda _: KEY, resumes=resumes)
    return engine.generate(decoding_params(config, mesh), requests)

  return call


# ---- The model: several tokens of a row in one pass ----


@pytest.mark.parametrize('backend', ['transposed', 'dense', 'ragged'])
@pytest.mark.parametrize(
  'changes',
  tiers.full_after_first(
    [
      dict(num_layers=2),
      dict(LOCAL, layers='sf'),
      dict(LOCAL, layers='s'),
      EXPERTS,
      dict(attention_cap=2.0),
      dict(query_beta=0.3),
    ]
  ),
  ids=str,
)
def test_a_pass_over_several_tokens_equals_several_steps(mesh, backend, changes):
  """Rows of several lengths keep one, some or all of five tokens before the next pass."""
  config = dataclasses.replace(CONFIG, **changes)
  params, rng = decoding_params(config, mesh), np.random.default_rng(0)
  B, T, length = 6, 5, 24
  length_B = np.array([1, 2, 3, 8, 15, 19], np.int32)
  count_B = jnp.array([1, 5, 2, 4, 3, 5])
  tokens_BT = rng.integers(0, 40, (B, length)).astype(np.int32)
  prefill = jax.jit(model.prefill, static_argnums=(0, 4))
  single, several, keep = (
    jax.jit(function, static_argnums=0) for function in (model.decode, model.decode_new, model.keep)
  )
  new_BT = rng.integers(0, 40, (B, 2 * T)).astype(np.int32)
  with decoding_by(backend), plain_kernel(), jax.set_mesh(mesh):
    _, cache, _ = prefill(config, params, tokens_BT[:, :19], length_B, length)
    hidden_BTD, new, routes_BTLC = several(config, params, new_BT[:, :T], length_B, cache)
    one_by_one = cache
    for t in range(T):
      hidden_BD, one_by_one, routes = single(config, params, new_BT[:, t], length_B + t, one_by_one)
      np.testing.assert_allclose(hidden_BTD[:, t], hidden_BD, atol=2e-5)
      if routes is not None:
        np.testing.assert_array_equal(routes_BTLC[:, t], routes[:, 0])
    kept, wanted = keep(config, cache, new, jnp.asarray(length_B), count_B), cache
    for t in range(T):  # rows past their count repeat their last token, which is allowed
      at_B = np.minimum(t, np.asarray(count_B) - 1)
      token_B = new_BT[np.arange(B), at_B]
      _, wanted, _ = single(config, params, token_B, length_B + at_B, wanted)
    after_B = np.minimum(length_B + np.asarray(count_B), length - 1)
    found_BD, expected_BD = (
      single(config, params, new_BT[:, T], after_B, after)[0] for after in (kept, wanted)
    )
    np.testing.assert_allclose(found_BD, expected_BD, atol=2e-5)


# ---- Drafts do not change the tokens ----


CASES = {
  'eight slots': dict(slots=8),
  'four slots': dict(),
  'free slots': dict(slots=40),
  'no end': dict(eos_ids=(NEVER,), slots=8),
  'temperature .3': dict(distribution=token_sampling.Distribution(0.3), slots=8),
  'greedy': dict(distribution=token_sampling.Distribution(0.0), slots=8),
  'top 5': dict(distribution=token_sampling.Distribution(1.0, top_k=5), slots=8),
  'resuming': dict(slots=8, resumes=True),
  'limits': dict(slots=8, limits=[*range(1, 13), 40, 39, 38]),
  'growing cache': dict(slots=8, max_response=300, eos_ids=(NEVER,)),
  'a window': dict(config=dataclasses.replace(CONFIG, layers='sf', **LOCAL), slots=8),
  'windows': dict(config=dataclasses.replace(CONFIG, layers='s', **LOCAL), slots=8),
  'experts': dict(config=dataclasses.replace(CONFIG, **EXPERTS), slots=8),
}


@pytest.mark.parametrize('setting', ['0', '3', '7'])
def test_results_do_not_depend_on_the_number_of_passes_per_call(generate, setting, monkeypatch):
  """The clock decides the number. The model is wide enough for its sums to round."""
  wide = dataclasses.replace(CONFIG, width=128, head_size=32, mlp_width=256)
  found = []
  for seconds in (0, 1e9):
    monkeypatch.setattr(scheduler, '_PART', seconds)
    responses, metrics = generate(setting, config=wide, slots=16, eos_ids=(NEVER,))
    # The metrics include drafts that were copied from finished rows.
    found.append(([(one.tokens.tolist(), one.logp.tolist()) for one in responses], metrics))
  assert found[0] == found[1]


@pytest.mark.parametrize('name', tiers.full_after_first(CASES))
@pytest.mark.parametrize('setting', ['3', '7'])
def test_drafts_change_no_token(generate, setting, name):
  case = CASES[name]
  expected, _ = generate('0', **case)
  found, metrics = generate(setting, **case)
  assert_same_responses(found, expected, 2e-5)
  assert [one.truncated for one in found] == [one.truncated for one in expected]
  assert metrics['rollout/tokens_per_pass'] > 1
  assert metrics['rollout/draft_width'] == int(setting)
  assert 0 < metrics['rollout/slots_busy'] <= 1


@pytest.mark.full
@pytest.mark.parametrize('backend', ['dense', 'ragged'])
def test_drafts_change_no_token_with_accelerator_caches(generate, backend):
  expected, _ = generate('0', **CASES['a window'])
  with decoding_by(backend), plain_kernel():
    drafts.decode.clear_cache()
    found, metrics = generate('3', **CASES['a window'])
    drafts.decode.clear_cache()
  assert_same_tokens(found, expected)
  assert metrics['rollout/tokens_per_pass'] > 1


@pytest.fixture
def proposing(monkeypatch):
  """Replace `propose` by another function of (texts, num)."""

  def call(function):
    drafts.decode.clear_cache()
    monkeypatch.setattr(drafts, 'propose', function)

  yield call
  drafts.decode.clear_cache()


def test_all_perfect_drafts_are_kept(generate, proposing):
  """If every draft is the next token, a pass adds four tokens, or fewer at a row's end."""
  expected, _ = generate('0', slots=15, eos_ids=(NEVER,))
  known_QT = np.zeros((15, 9 + 80), np.int32)
  places = [row for row, count in enumerate(COUNTS) for _ in range(count)]
  for text_T, row, response in zip(known_QT, places, expected):
    text = [*PROMPTS[row], *response.tokens]
    text_T[: len(text)] = text

  def oracle(texts, num):
    place_BK = texts.length_R[:15, None] + jnp.arange(num)
    tokens_BK = jnp.asarray(known_QT)[jnp.arange(15)[:, None], place_BK]
    return tokens_BK, jnp.zeros_like(tokens_BK)

  proposing(oracle)
  found, metrics = generate('3', slots=15, eos_ids=(NEVER,))
  assert_same_tokens(found, expected)
  assert metrics['rollout/tokens_per_pass'] == 4  # 40 tokens in ten passes


@pytest.mark.parametrize('token', [-1, 0, 39])
def test_wrong_drafts_change_nothing(generate, proposing, token):
  expected, _ = generate('0', slots=8)

  def wrong(texts, num):
    tokens_BK = jnp.full((len(texts.peers_BM), num), token)
    return tokens_BK, jnp.zeros_like(tokens_BK)

  proposing(wrong)
  found, metrics = generate('3', slots=8)
  assert_same_tokens(found, expected)
  assert metrics['rollout/tokens_per_pass'] < 1.2


# ---- The distribution ----


@pytest.mark.full
def test_responses_come_from_the_exact_distribution(mesh):
  """Chi-square test over all responses of up to 4 tokens, with a vocabulary of 3."""
  config = dataclasses.replace(CONFIG, vocab_size=3)
  params = test_scheduler.make_params(config, mesh)
  end, limit, prompt, draws = 2, 4, np.array([0, 1], np.int32), 40_000
  written = itertools.product(range(3), repeat=limit)
  ends = {one[: one.index(end) + 1] if end in one else one for one in written}
  chances = exact_chances(config, params, prompt, sorted(ends))
  assert abs(sum(chances.values()) - 1) < 1e-5
  spec = dataclasses.replace(
    SPEC, slots=512, prompts=1, max_prompt=2, max_response=limit, eos_ids=(end,), drafts='3'
  )
  engine = SlotEngine(config, spec, mesh, lambda _: KEY)
  requests = [Request(prompt, 0, sample, 0, limit) for sample in range(draws)]
  decoding = model.decode_layout(config, params, sharding.Meshes(mesh, mesh))
  responses, metrics = engine.generate(decoding, requests)
  counts = dict.fromkeys(chances, 0)
  for response in responses:
    counts[tuple(response.tokens.tolist())] += 1
  assert sum(len(one.tokens) for one in responses) > 100_000
  assert metrics['rollout/tokens_per_pass'] > 1.2
  expected = draws * np.array([*chances.values()])
  p = scipy.stats.chisquare(np.array([*counts.values()]), expected * draws / expected.sum()).pvalue
  print(f'{len(chances)} responses, p = {p:.3f}, {metrics}')
  assert p > 1e-3


def exact_chances(config, params, prompt, responses):
  """Compute the probability of each response with whole forward passes."""
  longest = max(map(len, responses))
  rows = [np.pad([*prompt, *one], (0, longest - len(one))) for one in responses]
  hidden_BTD = jax.jit(model.hidden_states, static_argnums=0)(config, params, np.int32(rows))
  logits = np.float64(hidden_BTD @ model.unembedding(config, params))
  logp_BTV = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  first = len(prompt) - 1
  return {
    one: float(np.exp(sum(logp_TV[first + t, token] for t, token in enumerate(one))))
    for one, logp_TV in zip(responses, logp_BTV)
  }


# ---- Proposals ----


def reference(texts, num):
  """Run `drafts.propose` in plain Python."""
  tokens, lengths, starts, peers = (np.asarray(x).tolist() for x in texts)
  kinds = [0, 1, 2]
  for slot, own in enumerate(peers):
    end = tokens[slot][: lengths[slot]][-5:]
    matches = []
    for number, text in enumerate(own):
      best = 0, 0
      for place in range(lengths[text] - 1 if text >= 0 else 0):
        if number and place + 1 < starts[text]:
          continue
        size = 0
        while size < min(len(end), place + 1) and tokens[text][place - size] == end[-1 - size]:
          size += 1
        best = max(best, (size, place))
      matches.append(best)
    longest = max(matches)[0]
    votes = [n for n, (size, _) in enumerate(matches) if size == longest > 0]
    for ahead in range(1, num + 1):
      votes = [n for n in votes if matches[n][1] + ahead < lengths[own[n]]]
      says = [tokens[own[n]][matches[n][1] + ahead] for n in votes]
      if not says:
        yield -1, None
        continue
      winner = max(range(len(says)), key=lambda n: (says.count(says[n]), -n))
      number = votes[winner]
      yield says[winner], 0 if number == 0 else kinds[1 if own[number] < len(peers) else 2]
      votes = [n for n, token in zip(votes, says) if token == says[winner]]


@pytest.mark.parametrize('alphabet', [2, 4, 12])
def test_proposals_follow_the_majority_of_texts(alphabet):
  rng = np.random.default_rng(alphabet)
  B, R, S, M = 12, 20, 30, 6
  propose = jax.jit(drafts.propose, static_argnums=1)
  for _ in range(8):
    length_R = rng.integers(1, S + 1, R).astype(np.int32)
    peers_BM = np.stack([[b, *rng.permutation(R)[: M - 1]] for b in range(B)])
    peers_BM[:, 1:][rng.random((B, M - 1)) < 0.3] = -1
    texts = drafts.Texts(
      rng.integers(0, alphabet, (R, S)).astype(np.int32),
      length_R,
      rng.integers(0, length_R, R).astype(np.int32),
      peers_BM.astype(np.int32),
    )
    tokens_BK, source_BK = propose(texts, 4)
    expected = np.array([*reference(texts, 4)], object).reshape(B, 4, 2)
    np.testing.assert_array_equal(tokens_BK, expected[..., 0].astype(int))
    known = expected[..., 0] != -1
    np.testing.assert_array_equal(np.asarray(source_BK)[known], expected[..., 1][known].astype(int))


def row(question, sample, response, prompt=(1, 2)):
  made = Request(np.array(prompt, np.int32), question, sample, 0, 9)
  pieces = [(np.array(response, np.int32),) * 3]
  return slots.Row(0, made, np.zeros(2, np.uint32), pieces, len(response))


def test_rows_draft_only_from_their_own_question():
  """Two rows of question 7, one of 8 and a free slot. A row's own past response is left out."""
  seven = row(7, 0, [3, 4]), row(7, 1, [5])
  own = [seven[0], row(8, 0, [6]), seven[1], None]
  past = {7: {1: np.array([9]), 2: np.array([10, 11]), -1: np.array([12])}, 8: {}}
  texts = slots.texts_of(own, past, 4)
  assert texts.tokens_RS[:3].tolist() == [[1, 2, 3, 4], [1, 2, 6, 0], [1, 2, 5, 0]]
  assert texts.tokens_RS[4:6].tolist() == [[1, 2, 12, 0], [1, 2, 10, 11]]  # latest first
  assert texts.length_R[:6].tolist() == [4, 3, 3, 0, 3, 4] and set(texts.start_R[:3]) == {2}
  peers = [[one for one in row if one >= 0] for row in texts.peers_BM.tolist()]
  assert peers == [[0, 2, 4, 5], [1], [2, 0, 4, 5], [3]]


def test_many_questions_share_the_space_for_past_responses():
  own = [row(question, 0, [3]) for question in range(32)]
  past = {question: {-n: np.array([n]) for n in range(1, 9)} for question in range(32)}
  texts = slots.texts_of(own, past, 8)
  assert (np.asarray(texts.peers_BM) >= 0).sum(axis=1).tolist() == [2] * 32
  assert len(texts.tokens_RS) == 64


@pytest.mark.parametrize(
  ('setting', 'rows', 'expected'),
  [('0', 4, 0), ('3', 500, 3), ('7', 1, 7), ('auto', 1, 7), ('auto', 2, 3), ('auto', 5, 0)],
)
def test_auto_drafts_as_many_tokens_as_are_almost_free(one_device, setting, rows, expected):
  assert drafts.width(setting, rows, one_device) == expected


def test_auto_decodes_many_rows_with_the_program_without_drafts(one_device):
  def decoding(setting):
    spec = dataclasses.replace(SPEC, drafts=setting, slots=16)
    engine = SlotEngine(CONFIG, spec, one_device, lambda _: KEY)
    listed = programs.of_engine(engine, decoding_params(CONFIG, one_device), only_longest=True)
    [program] = [one for one in listed if one.name == 'decode']
    return program.lowered.as_text()

  assert decoding('auto') == decoding('0') != decoding('1')


# ---- Episodes: rows that read ----


@pytest.mark.full
@pytest.mark.parametrize('layers', ['f', 'sf'])
@pytest.mark.parametrize('parked', [0, test_slots.EPISODES])
def test_episodes_have_the_same_tokens(mesh, layers, parked):
  """Some observations contain end tokens or are longer than the decoding between two syncs."""
  config = dataclasses.replace(test_slots.CONFIG, layers=layers, window=9 if 's' in layers else 0)
  params = test_scheduler.make_params(config, mesh)
  expected = test_slots.play(params, mesh, parked, config=config)
  found = test_slots.play(params, mesh, parked, config=config, drafts='3')
  assert_same_responses(found, expected, 2e-5)


@pytest.mark.full
def test_routes_are_kept(mesh):
  config, params = test_slots.EXPERTS, test_scheduler.make_params(test_slots.EXPERTS, mesh)
  expected = test_slots.play(params, mesh, 30, config=config, keeps_routes=True)
  found = test_slots.play(params, mesh, 30, config=config, keeps_routes=True, drafts='3')
  for one, other in zip(found, expected):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.routes, other.routes)


def test_responses_that_span_steps_are_the_same(generate, mesh):
  """Each step stops once four responses are complete. The next step continues the others."""
  expected, _ = generate('0')
  requests = [
    Request(PROMPTS[row], row, sample, 0, 40)
    for row, count in enumerate(COUNTS)
    for sample in range(count)
  ]
  spec = dataclasses.replace(SPEC, drafts='3', max_response=40)
  engine = SlotEngine(CONFIG, spec, mesh, lambda _: KEY, resumes=True)
  params, complete = decoding_params(CONFIG, mesh), itertools.count(1)
  steps, left = 0, list(range(len(requests)))
  while left:
    begun, steps = [requests[index] for index in left], steps + 1
    responses, _ = engine.generate(params, begun, lambda *_: next(complete) % 4 == 0)
    for index, response in zip(left, responses):
      requests[index] = dataclasses.replace(requests[index], prefix=response)
    left = [index for index in left if not requests[index].prefix.is_complete]
  assert steps > 2
  assert_same_tokens([request.prefix for request in requests], expected)
