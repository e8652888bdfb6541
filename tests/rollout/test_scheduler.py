"""The slot engine: its samples, its progress messages, and independence from other rows."""

import dataclasses
import itertools
import re
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import kv_cache, logprobs, model, sharding
from exgrpo_jax.rollout import decode_loop, resuming, scheduler, slots, token_sampling
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE
from exgrpo_jax.runtime import activity, compilations, randomness
from tests.helpers import tiers
from tests.helpers.decoding import decoding_by, generated
from tests.helpers.meshes import initial_params

CONFIG = model.ShapeConfig(
  vocab_size=40,
  width=32,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_size=8,
  mlp_width=48,
  tied_embeddings=False,
  dtype='float32',
)
NEVER = CONFIG.vocab_size  # an end token that no row can draw
SCALE = 0.2 * CONFIG.width**0.5  # initial weights have standard deviation 1 / sqrt(width)
SPEC = decode_loop.DecodeSpec(
  distribution=token_sampling.Distribution(),
  slots=4,
  prompts=4,
  max_prompt=64,
  max_response=12,
  eos_ids=(3, 7),
  pad_id=0,
)
KEY = jax.random.key(5)
PROMPTS = [
  np.array(prompt, np.int32)
  for prompt in (
    [5, 6, 9],
    [8],
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [5, 6, 9],
    [30, 31],
    [0, 0, 12],
    [39] * 20,
  )
]
ROWS = [10, 11, 12, 10, 13, 14, 15]
SAMPLES = [0, 0, 0, 1, 2, 0, 3]  # prompts 0 and 3 are two samples of one question


def make_params(config, mesh):
  """Initial parameters, scaled so that logits spread over a few nats."""
  return initial_params(config, mesh, lambda x: SCALE * x if x.std() else x)


@pytest.fixture(scope='module')
def params(mesh):
  return make_params(CONFIG, mesh)


@pytest.fixture(scope='module')
def decoding(params, mesh):
  return model.decode_layout(CONFIG, params, sharding.Meshes(mesh, mesh))


@pytest.fixture(scope='module')
def generate(decoding, mesh):
  """Return a function that samples prompts, given by index; `changes` apply to the spec."""

  def call(order=range(7), *, key=KEY, prompts=PROMPTS, limits=None, engine=(), **changes):
    spec = dataclasses.replace(SPEC, **changes)
    rows = [[values[i] for i in order] for values in (prompts, ROWS, SAMPLES)]
    return generated(CONFIG, decoding, *rows, key, spec, mesh, limits=limits, **dict(engine))

  return call


@pytest.fixture(scope='module')
def samples_of(decoding, mesh):
  """Return a function from the number of samples per prompt to the responses."""

  def call(counts, prompts=PROMPTS, **changes):
    rows = [i for i, count in enumerate(counts) for _ in range(count)]
    samples = [k for count in counts for k in range(count)]
    spec = dataclasses.replace(SPEC, **changes)
    asked = [prompts[i] for i in rows]
    return generated(CONFIG, decoding, asked, rows, samples, KEY, spec, mesh)

  return call


@pytest.fixture(scope='module')
def responses(generate):
  return generate()


@pytest.fixture(scope='module')
def logits(params):
  """Return a function that computes a response's logits with one whole forward pass."""

  @jax.jit
  def padded(tokens_BT):
    return model.hidden_states(CONFIG, params, tokens_BT) @ model.unembedding(CONFIG, params)

  def call(prompt, response):
    tokens = np.concatenate([prompt, response.tokens])
    logits_TV = padded(np.pad(tokens, (0, 40 - len(tokens)))[None])[0]
    return np.float64(logits_TV[len(prompt) - 1 : len(tokens) - 1])

  return call


def log_softmax(logits):
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_same_tokens(found, expected):
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def assert_same_responses(found, expected, atol=0.0):
  """Check for equal tokens, and for log-probabilities and entropies equal within `atol`."""
  assert_same_tokens(found, expected)
  for ours, theirs in zip(found, expected):
    np.testing.assert_allclose(ours.logp, theirs.logp, rtol=0, atol=atol)
    np.testing.assert_allclose(ours.entropy, theirs.entropy, rtol=0, atol=atol)


def test_progress_is_reported_while_decoding(generate, responses):
  seen = []
  generate(engine={'on_finish': lambda index, one: seen.append((index, one, activity.now()))})
  finished, unfinished = 0, []  # tokens
  for number, (index, one, said) in enumerate(seen, 1):
    count, tokens = map(int, re.match(r'(\d) of 7 responses, (\d+) tokens', said).groups())
    finished += len(responses[index].tokens)
    unfinished.append(tokens - finished)
    assert count == number
    np.testing.assert_array_equal(one.tokens, responses[index].tokens)
  assert sorted(index for index, *_ in seen) == list(range(7))
  assert min(unfinished) == unfinished[-1] == 0 < max(unfinished)
  assert activity.now() == ''


@pytest.mark.parametrize('temperature', [0.0, 1.0, 0.6])
def test_logp_and_entropy_match_a_pass_over_the_whole_sequence(generate, logits, temperature):
  """Temperature 0 takes the most probable token, with both values at temperature 1."""
  found = generate(distribution=token_sampling.Distribution(temperature))
  for prompt, response in zip(PROMPTS, found):
    logp_TV = log_softmax(logits(prompt, response) / (temperature or 1))
    if not temperature:
      np.testing.assert_array_equal(response.tokens, logp_TV.argmax(-1))
    assert response.logp.dtype == response.entropy.dtype == np.float32
    expected = logp_TV[np.arange(len(logp_TV)), response.tokens]
    np.testing.assert_allclose(response.logp, expected, atol=1e-5)
    np.testing.assert_allclose(response.entropy, -(np.exp(logp_TV) * logp_TV).sum(-1), atol=1e-5)


def test_each_token_is_drawn_with_the_noise_of_its_question_sample_and_position(generate, logits):
  found = generate(eos_ids=(NEVER,))
  for prompt, response, row, sample in zip(PROMPTS, found, ROWS, SAMPLES, strict=True):
    T = SPEC.max_response
    keys = randomness.row_keys(KEY, np.full(T, row), np.full(T, sample))
    token_T, *_ = token_sampling.sample_token(
      SPEC.distribution,
      np.float32(logits(prompt, response)),
      randomness.uniforms(keys, np.arange(T)),
    )
    np.testing.assert_array_equal(response.tokens, token_T)


@pytest.mark.full
def test_a_response_ends_with_its_first_end_token_or_is_truncated(generate):
  (whole, other) = generate([2, 0], eos_ids=(NEVER,))
  assert whole.truncated and len(whole.tokens) == SPEC.max_response
  ends = int(other.tokens[0]), int(whole.tokens[-1])
  for limit in (
    12,
    int(np.argmax(np.isin(whole.tokens, ends))) + 1,
    1,
  ):  # the second is just enough
    found = generate([2, 0], eos_ids=ends, limits=[limit] * 2)
    for response, free in zip(found, (whole, other)):
      is_end = np.isin(free.tokens[:limit], ends)
      length = int(np.argmax(is_end)) + 1 if is_end.any() else limit
      np.testing.assert_array_equal(response.tokens, free.tokens[:length])
      assert response.tokens.dtype == np.int32 and response.truncated == (not is_end.any())
  assert len(found[1].tokens) == 1 and not found[1].truncated  # the first token may be an end token


@pytest.mark.parametrize('order', [list(range(7)), [6, 2, 0, 5, 3, 1, 4], [1], [5], []])
@pytest.mark.parametrize('changes', [{'slots': 3}, {'slots': 8}, {'pad_id': SPEC.eos_ids[0]}])
def test_neither_slots_nor_order_nor_other_rows_nor_padding_change_samples(
  generate, responses, order, changes
):
  """With 3 slots, rows are refilled. With 8 slots, one slot stays free."""
  assert_same_tokens(generate(order, **changes), [responses[i] for i in order])


def test_longer_prompts_in_other_rows_do_not_change_samples(generate, responses):
  longer = [*PROMPTS[:6], np.full(40, 39, np.int32)]
  assert_same_tokens(generate(prompts=longer)[:6], responses[:6])


def test_a_pad_token_may_be_part_of_a_response(generate):
  """Lengths come from the loop, so the row can also sample the padding token."""
  (whole,) = generate([0], eos_ids=(NEVER,))
  (found,) = generate([0], eos_ids=(NEVER,), pad_id=int(whole.tokens[-1]))
  np.testing.assert_array_equal(found.tokens, whole.tokens)


def test_samples_depend_on_the_key_and_the_sample_index(generate, responses):
  assert_same_tokens(generate(), responses)
  other = generate(key=jax.random.key(6))
  assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(other, responses))
  first, second = generate([0, 3], eos_ids=(NEVER,))
  np.testing.assert_array_equal(PROMPTS[0], PROMPTS[3])
  assert (first.tokens != second.tokens).any()


# ---- Slots and their refills ----


def test_slots_of_finished_rows_are_refilled_at_once(generate):
  """While the first row decodes 12 tokens, the other slot serves five rows in turn."""
  reported = []
  limits = [12, 2, 2, 2, 2, 2, 4]
  engine = {'on_finish': lambda index, _: reported.append(index)}
  found = generate(slots=2, eos_ids=(NEVER,), limits=limits, engine=engine)
  assert reported == [1, 2, 3, 4, 5, 0, 6]
  assert [len(response.tokens) for response in found] == limits
  assert all(response.truncated for response in found)


@pytest.mark.full
def test_interrupted_responses_are_resumed(generate, responses, monkeypatch):
  """Stop after each complete response, then resume in other slots with several prefill lengths."""
  monkeypatch.setattr(slots, 'SHORTEST_PREFILL', 8)
  resumed, resume = [], resuming.resume

  def watched(config, params, state, tokens_PT, segments, insertion, routes_PTLC):
    resumed.append(tokens_PT.shape[1])
    return resume(config, params, state, tokens_PT, segments, insertion, routes_PTLC)

  monkeypatch.setattr(resuming, 'resume', watched)
  found, complete, syncs, calls = [EMPTY_RESPONSE] * 7, [], [], 0
  engine = dict(
    resumes=True, on_finish=lambda index, _: complete.append(index) or True, on_sync=syncs.append
  )
  while left := [i for i, one in enumerate(found) if not one.is_complete]:
    before, calls = [found[i] for i in left], calls + 1
    complete.clear()
    now = generate(left, slots=3, engine=engine | {'begun': before})
    assert [place for place, one in enumerate(now) if one.is_complete] == sorted(complete)
    for i, was, one in zip(left, before, now):
      np.testing.assert_array_equal(one.tokens[: len(was.tokens)], was.tokens)
      np.testing.assert_array_equal(one.logp[: len(was.tokens)], was.logp)
      assert one.is_complete or not one.truncated
      found[i] = one
  assert calls > 2 and len({*resumed}) > 1
  assert_same_responses(found, responses, 1e-5)
  written = sum(len(one.tokens) for one in responses)
  assert sum(sync.tokens for sync in syncs) == written
  share = written / sum(3 * sync.steps for sync in syncs)
  assert slots.metrics(syncs) == {'rollout/slots_busy': share} and 0.5 < share < 1
  assert slots.metrics([]) == {}


@pytest.mark.full
@pytest.mark.parametrize('resumes', [False, True])
def test_decoding_in_parts_changes_no_bit(generate, monkeypatch, resumes):
  """This includes the rows left unfinished when the engine stops after four of seven."""

  def outcome(seconds):
    monkeypatch.setattr(scheduler, '_PART', seconds)
    seen, syncs, parts, decode = [], [], [], decode_loop.decode
    monkeypatch.setattr(decode_loop, 'decode', lambda *args: parts.append(0) or decode(*args))
    engine = {'on_finish': lambda index, _: seen.append(index) or (resumes and len(seen) > 3)}
    engine |= {'resumes': resumes, 'on_sync': syncs.append}
    found = generate(engine=engine, slots=3, max_response=90, eos_ids=(NEVER, 5))
    monkeypatch.setattr(decode_loop, 'decode', decode)
    return found, seen, syncs, len(parts)

  whole, *expected, _ = outcome(1e9)
  single, *others, parts = outcome(0)
  assert parts == sum(sync.steps for sync in others[1]) > len(others[1])
  assert others == expected
  assert_same_responses(single, whole)
  for one, other in zip(single, whole):
    assert (one.is_complete, one.truncated) == (other.is_complete, other.truncated)


@pytest.mark.full
def test_progress_is_updated_every_ten_seconds(generate, monkeypatch):
  """A token takes 2 s, so a part has five tokens, once compilation (60 s) is over."""
  clock, said, decode = [60.0], [], decode_loop.decode

  def slow(*args):
    said.append((clock[0], int(re.search(r'(\d+) tokens?', activity.now())[1])))
    before = np.asarray(args[3].length_B).max()
    state, decoded = decode(*args)
    clock[0] += 2.0 * (np.asarray(decoded.length_B).max() - before) + 60 * (len(said) == 1)
    return state, decoded

  monkeypatch.setattr(decode_loop, 'decode', slow)
  monkeypatch.setattr(scheduler.time, 'monotonic', lambda: clock[0])
  generate([0], slots=1, max_response=40, eos_ids=(NEVER,))
  assert [tokens for _, tokens in said] == [0, 1, 2, 7, 12, 17, 22, 27, 32, 37]
  assert {later - earlier for (earlier, _), (later, _) in itertools.pairwise(said[2:])} == {10.0}


def test_progress_counts_the_prefilled_prompts(generate, monkeypatch):
  said, prefill = [], decode_loop.prefill
  monkeypatch.setattr(decode_loop, 'prefill', lambda *a: said.append(activity.now()) or prefill(*a))
  monkeypatch.setattr(slots, 'PREFILL_TOKENS', 128)
  generate([0, 1, 2, 4])
  found = [re.search(r'(\d of \d prompts) prefilled', text)[1] for text in said]
  assert found == ['0 of 4 prompts', '2 of 4 prompts']


@pytest.fixture
def watched(monkeypatch):
  """Record the prompt lengths of prefills, and the cache lengths and slots of decode calls."""
  seen = types.SimpleNamespace(prefills=[], caches=[], widths=[])
  prefill, decode = decode_loop.prefill, decode_loop.decode

  def watched_prefill(config, params, prompts, tokens_PT, lengths_P, place_P):
    num_places = len(prompts.hidden_WD)
    found = [length for length, place in zip(lengths_P.tolist(), place_P) if place < num_places]
    seen.prefills.append((tokens_PT.shape, found))
    return prefill(config, params, prompts, tokens_PT, lengths_P, place_P)

  def watched_decode(*args):
    seen.caches.append(kv_cache.length(args[3].cache[0]))
    seen.widths.append(len(args[3].live_B))
    return decode(*args)

  watched_prefill.clear_cache = prefill.clear_cache  # for `decoding_by`
  monkeypatch.setattr(decode_loop, 'prefill', watched_prefill)
  monkeypatch.setattr(decode_loop, 'decode', watched_decode)
  return seen


def test_a_prompt_is_prefilled_once_for_all_its_samples(samples_of, watched):
  """This also holds if the samples do not fit into the slots together: 8 + 7 + 8 in 3 slots."""
  prompts = [PROMPTS[0], np.arange(40, dtype=np.int32) % 30, PROMPTS[4]]
  found = samples_of((8, 7, 8), prompts, slots=3)
  assert sorted(length for _, lengths in watched.prefills for length in lengths) == [2, 3, 40]
  assert {shape for shape, _ in watched.prefills} == {(4, 64)}
  assert_same_tokens(found[15:], samples_of((0, 0, 8), prompts, slots=8))


def test_prompts_are_prefilled_in_fixed_shapes_up_front(samples_of, watched, monkeypatch):
  """Seven prompts, at most four kept at once, are padded to 16, 32 or 64 tokens."""
  monkeypatch.setattr(slots, 'PREFILL_TOKENS', 64)
  monkeypatch.setattr(slots, 'SHORTEST_PREFILL', 16)
  prompts = [np.resize(prompt, size) for prompt, size in zip(PROMPTS, (1, 16, 17, 3, 33, 4, 64))]
  found = samples_of((1,) * 7, prompts, slots=8)
  assert watched.prefills == [
    ((4, 16), [1, 16, 3]),
    ((2, 32), [17]),
    ((4, 16), [4]),
    ((1, 64), [33]),
    ((1, 64), [64]),
  ]
  for row in (2, 6):
    counts = [int(other == row) for other in range(7)]
    assert_same_tokens(samples_of(counts, prompts, slots=8), [found[row]])


def test_prompts_that_were_dropped_are_prefilled_again(decoding, mesh, watched):
  """Eight questions in turn with four prompts kept. No row waits forever for a free place."""
  spec, order = dataclasses.replace(SPEC, slots=3), [*range(8)] * 2
  prompts = [(*PROMPTS, PROMPTS[0])[i] for i in order]
  samples = [0] * 8 + [1] * 8
  assert len(generated(CONFIG, decoding, prompts, order, samples, KEY, spec, mesh)) == 16
  assert sum(len(lengths) for _, lengths in watched.prefills) == 16


@pytest.mark.full
@pytest.mark.parametrize(
  ('backend', 'limits', 'most', 'expected'),
  [
    # As long as the rows need, not as long as the limit.
    ('transposed', [4, 4, 300, 4, 4, 4], 4096, [128, 256, 512]),
    ('transposed', [4, 4, 300, 300, 4], 4096, [128, 256, 512, 128]),  # shrinks for short rows
    # In whole blocks, as on accelerators: the 500 positions of the longest row become 512.
    ('dense', [4, 4, 430, 430, 4], 436, [128, 256, 512, 128]),
  ],
)
def test_the_cache_follows_the_rows(generate, watched, backend, limits, most, expected):
  with decoding_by(backend):
    generate(range(len(limits)), limits=limits, max_response=most, eos_ids=(NEVER,), slots=2)
  assert [length for length, _ in itertools.groupby(watched.caches)] == expected


@pytest.mark.full
def test_the_cache_never_outgrows_the_limit(generate, watched):
  """The limit is 20 + 90 tokens, not the next power of two (128); prompts are not padded to 64."""
  found = generate([6], slots=1, max_prompt=20, max_response=90, eos_ids=(NEVER,))
  assert [shape for shape, _ in watched.prefills] == [(4, 20)]
  assert set(watched.caches) == {110}
  assert [len(response.tokens) for response in found] == [90]


@pytest.mark.full
def test_the_last_rows_are_compacted_unless_attention_is_ragged(generate, watched, monkeypatch):
  """First seven of the 32 slots are in use, then only one. Compaction keeps the tokens."""
  widths, caches = watched.widths, watched.caches
  changes = dict(slots=32, max_response=300, eos_ids=(NEVER,))
  found = generate(limits=[1, 1, 1, 250, 80, 1, 1], **changes)
  assert list(dict.fromkeys(widths)) == [32, 8, 2] and set(caches) == {128, 256}
  assert_same_tokens(generate([4], limits=[80], **changes), [found[4]])
  widths.clear(), caches.clear()
  monkeypatch.setattr(kv_cache, 'is_ragged', bool)
  assert_same_tokens(generate(limits=[1, 1, 1, 250, 80, 1, 1], **changes), found)
  assert set(widths) == {32} and set(caches) == {364}


@pytest.mark.parametrize(
  ('platform', 'longest', 'expected'),
  [
    ('cpu', 9216, [128, 256, 512, 1024, 2048, 4096, 9216]),
    ('gpu', 88, [88]),
    ('cpu', 192, [128, 192]),
    ('tpu', 9216, [9216]),
  ],
)
def test_cache_lengths_are_powers_of_two_and_the_limit(platform, longest, expected):
  assert scheduler.cache_lengths(longest, platform) == expected


@pytest.mark.full
def test_few_shapes_are_compiled(samples_of):
  """This holds for any number of prompts, samples and refilled rows, and any temperature."""
  with compilations.counted() as compiled:
    spec = {'max_prompt': 63, 'slots': 5}  # not used by any other test
    samples_of((3, 2, 3), **spec)
    samples_of((1, 5, 2, 4, 1, 1), distribution=token_sampling.Distribution(0.6), **spec)
  assert compiled.names == {'empty': 1, 'prefill': 1, 'insert': 1, 'decode': 1}


# ---- Against the trainer ----


WINDOWED = dict(layers='s', window=20, logit_cap=2.0)


@pytest.mark.parametrize(
  ('changes', 'limit'),
  tiers.full_after_first(
    [(dict(dtype='float32'), 1e-4), (dict(dtype='bfloat16'), 0.2), (WINDOWED, 1e-4)]
  ),
  ids=['float32', 'bfloat16', 'windows'],
)
def test_log_probabilities_match_the_trainer(params, mesh, changes, limit):
  """Compare over 1,000 tokens, with mixed row lengths, refills and several cache lengths."""
  config = dataclasses.replace(CONFIG, **changes)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 40, rng.integers(1, 60)).astype(np.int32) for _ in range(24)]
  limits = rng.integers(1, 150, 24)
  spec = dataclasses.replace(SPEC, slots=8, eos_ids=(NEVER,), max_response=300)
  found = generated(
    config,
    model.decode_layout(config, params, sharding.Meshes(mesh, mesh)),
    prompts,
    range(24),
    [0] * 24,
    KEY,
    spec,
    mesh,
    limits=limits.tolist(),
  )
  tokens_BT = np.zeros((24, 210), np.int32)
  for b, (prompt, response) in enumerate(zip(prompts, found)):
    tokens_BT[b, : len(prompt) + len(response.tokens)] = [*prompt, *response.tokens]
  hidden_BTD = jax.jit(model.hidden_states, static_argnums=0)(config, params, tokens_BT)
  logits_BTV = np.float32(hidden_BTD @ model.unembedding(config, params))
  logp_BTV = jax.nn.log_softmax(logprobs.capped(logits_BTV, config.logit_cap))
  off = []
  for b, (prompt, response) in enumerate(zip(prompts, found)):
    places = len(prompt) + np.arange(len(response.tokens))
    off.append(np.abs(np.asarray(logp_BTV)[b, places - 1, response.tokens] - response.logp))
  off = np.concatenate(off)
  print(f'{changes}: {len(off)} tokens, off by {off.mean():.1e}, at most {off.max():.1e}')
  assert len(off) >= 1000 and off.max() < limit
