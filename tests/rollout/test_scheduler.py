"""What is drawn, what is said of it, and that nobody's company matters."""

import dataclasses
import re
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import carry, decode_loop, prefilled, scheduler, slots, token_sampling
from exgrpo_jax.runtime import activity, compilations, randomness
from tests.helpers.meshes import initial_params

CONFIG = model.Config(
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
  """Initial parameters, wide enough apart that logits spread over some nats."""
  return initial_params(config, mesh, lambda x: SCALE * x if x.std() else x)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=-1, fsdp=1, tensor=1))


@pytest.fixture(scope='module')
def params(mesh):
  return make_params(CONFIG, mesh)


@pytest.fixture(scope='module')
def decoding(params, mesh):
  return model.decode_layout(CONFIG, params, sharding.Meshes(mesh, mesh))


@pytest.fixture(scope='module')
def generate(decoding, mesh):
  def call(order=range(7), key=KEY, prompts=PROMPTS, more=types.MappingProxyType({}), **changes):
    """`changes` are those of the spec, `more` further arguments of `scheduler.generate`."""
    spec = dataclasses.replace(SPEC, **changes)
    return scheduler.generate(
      CONFIG,
      decoding,
      [prompts[i] for i in order],
      [ROWS[i] for i in order],
      [SAMPLES[i] for i in order],
      key,
      spec,
      mesh,
      **more,
    )

  return call


@pytest.fixture(scope='module')
def responses(generate):
  return generate()


@pytest.fixture(scope='module')
def logits(params):
  """The logits from which each token of a response was drawn, by one whole forward pass."""

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


def test_it_says_how_far_it_is_while_it_decodes(generate, responses):
  seen = []
  generate(more={'on_finish': lambda index, _: seen.append((index, activity.now()))})
  finished, unfinished = 0, []  # tokens
  for number, (index, said) in enumerate(seen, 1):
    count, tokens = map(int, re.match(r'(\d) of 7 responses, (\d+) tokens', said).groups())
    finished += len(responses[index].tokens)
    unfinished.append(tokens - finished)
    assert count == number
  assert min(unfinished) == unfinished[-1] == 0 < max(unfinished)
  assert activity.now() == ''


@pytest.mark.parametrize(
  ('length', 'limit', 'expected'),
  [
    (1, 512, 32),
    (32, 512, 32),
    (33, 512, 48),
    (48, 512, 48),
    (49, 512, 64),
    (65, 512, 96),
    (300, 512, 384),
    (385, 512, 512),
    (385, 400, 400),
    (20, 20, 20),
  ],
)
def test_lengths_fall_into_powers_of_two_and_their_middles(length, limit, expected):
  assert length_bucket(length, limit) == expected


def test_greedy_takes_the_most_probable_token(generate, logits):
  """And tells its log-probability and the entropy at temperature 1."""
  for prompt, response in zip(PROMPTS, generate(distribution=token_sampling.Distribution(0.0))):
    logp_TV = log_softmax(logits(prompt, response))
    np.testing.assert_array_equal(response.tokens, logp_TV.argmax(-1))
    np.testing.assert_allclose(response.logp, logp_TV.max(-1), atol=1e-5)
    np.testing.assert_allclose(response.entropy, -(np.exp(logp_TV) * logp_TV).sum(-1), atol=1e-5)


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_logp_and_entropy_are_those_of_the_whole_sequence(generate, logits, temperature):
  for prompt, response in zip(
    PROMPTS, generate(distribution=token_sampling.Distribution(temperature))
  ):
    logp_TV = log_softmax(logits(prompt, response) / temperature)
    assert response.logp.dtype == response.entropy.dtype == np.float32
    np.testing.assert_allclose(
      response.logp, logp_TV[np.arange(len(logp_TV)), response.tokens], atol=1e-5
    )
    np.testing.assert_allclose(response.entropy, -(np.exp(logp_TV) * logp_TV).sum(-1), atol=1e-5)


def test_a_response_ends_with_its_first_end_token_or_is_truncated(responses):
  assert {response.truncated for response in responses} == {True, False}  # both occur here
  for response in responses:
    is_end = np.isin(response.tokens, SPEC.eos_ids)
    assert response.tokens.dtype == np.int32
    assert not is_end[:-1].any()
    assert is_end[-1] != response.truncated
    assert len(response.tokens) == SPEC.max_response or not response.truncated


def test_an_end_token_at_the_limit_is_not_truncation(generate):
  whole, other = generate(order=[2, 0], eos_ids=(NEVER,))
  assert whole.truncated and len(whole.tokens) == 12
  ends = int(other.tokens[0]), int(whole.tokens[-1])
  limit = int(np.argmax(np.isin(whole.tokens, ends))) + 1  # where the first of them comes
  (ended,) = generate(order=[2], eos_ids=ends, more={'limits': [limit]})
  assert not ended.truncated and len(ended.tokens) == limit


def test_the_first_token_may_end_a_response(generate):
  other, whole = generate(order=[2, 0], eos_ids=(NEVER,))
  (ended,) = generate(order=[0], eos_ids=(int(whole.tokens[0]), int(other.tokens[-1])))
  np.testing.assert_array_equal(ended.tokens, whole.tokens[:1])
  assert not ended.truncated and len(ended.logp) == len(ended.entropy) == 1


def test_a_pad_token_may_be_part_of_a_response(generate):
  """Lengths come from the loop: here the padding is a token that the row does write."""
  (whole,) = generate(order=[0], eos_ids=(NEVER,))
  (found,) = generate(order=[0], eos_ids=(NEVER,), pad_id=int(whole.tokens[-1]))
  np.testing.assert_array_equal(found.tokens, whole.tokens)


def test_padding_with_an_end_token_changes_nothing(generate, responses):
  """As where a checkpoint has no padding token of its own, or pads with its end token."""
  padded = generate(pad_id=SPEC.eos_ids[0])
  for own, other in zip(responses, padded, strict=True):
    np.testing.assert_array_equal(own.tokens, other.tokens)
    assert own.truncated == other.truncated
  assert any(own.tokens[-1] in SPEC.eos_ids for own in responses)


def test_the_same_key_gives_the_same_responses(generate, responses):
  assert_same_tokens(generate(), responses)
  other = generate(key=jax.random.key(6))
  assert any(
    len(a.tokens) != len(b.tokens) or (a.tokens != b.tokens).any() for a, b in zip(other, responses)
  )


def test_samples_of_one_question_differ(generate):
  first, second = generate(order=[0, 3], eos_ids=(NEVER,))
  np.testing.assert_array_equal(PROMPTS[0], PROMPTS[3])
  assert (first.tokens != second.tokens).any()


@pytest.mark.parametrize('slots', [3, 8])
def test_slots_do_not_change_what_is_sampled(generate, responses, slots):
  """3 leaves a last batch of one row and two dummies, 8 a dummy beside all."""
  assert_same_tokens(generate(slots=slots), responses)


def test_order_and_company_do_not_change_what_is_sampled(generate, responses):
  order = [6, 2, 0, 5, 3, 1, 4]
  assert_same_tokens(generate(order=order), [responses[i] for i in order])
  assert_same_tokens(generate(order=[1]), [responses[1]])  # alone among dummies


def test_longer_company_does_not_change_what_is_sampled(generate, responses):
  """A prompt of 40 tokens moves the padding from 32 to 64."""
  longer = [*PROMPTS[:6], np.full(40, 39, np.int32)]
  assert_same_tokens(generate(prompts=longer)[:6], responses[:6])


def test_each_row_is_reported_once(generate):
  reported = []
  found = generate(more={'on_finish': lambda index, one: reported.append((index, one))})
  assert sorted(index for index, _ in reported) == list(range(len(PROMPTS)))
  assert all(response is found[index] for index, response in reported)


def test_no_prompts_give_no_responses(generate):
  assert generate(order=[]) == []


# Slots and their refills.


def test_rows_that_finish_make_room_at_once(generate):
  """Two slots: while the first row writes 12 tokens, the other slot serves five rows in turn."""
  reported = []
  limits = [12, 2, 2, 2, 2, 2, 4]
  arguments = {'limits': limits, 'on_finish': lambda index, _: reported.append(index)}
  found = generate(slots=2, eos_ids=(NEVER,), more=arguments)
  assert reported == [1, 2, 3, 4, 5, 0, 6]
  assert [len(response.tokens) for response in found] == limits
  assert all(response.truncated for response in found)


def test_a_limit_of_its_own_cuts_a_row_and_changes_no_token(generate, responses):
  limits = [1, 12, 3, 1, 7, 12, 2]
  for cut, whole, limit in zip(generate(more={'limits': limits}), responses, limits, strict=True):
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:limit])
    assert cut.truncated == (len(whole.tokens) > limit or whole.truncated)


def test_responses_go_on_from_where_they_were_left(generate, responses, monkeypatch):
  """Stopped whenever another is complete: in other slots, prefilled in rows of several lengths."""
  monkeypatch.setattr(prefilled, '_SHORTEST', 8)
  resumed, resume = [], decode_loop.resume

  def watched(config, params, state, tokens_PT, insertion):
    resumed.append(tokens_PT.shape[1])
    return resume(config, params, state, tokens_PT, insertion)

  monkeypatch.setattr(decode_loop, 'resume', watched)
  found, complete, syncs, calls = [carry.UNBEGUN] * 7, [], [], 0
  arguments = dict(
    on_finish=lambda index, _: complete.append(index),
    is_enough=lambda: bool(complete),
    on_sync=syncs.append,
  )
  while left := [i for i, one in enumerate(found) if not one.is_complete]:
    before, calls = [found[i] for i in left], calls + 1
    complete.clear()
    now = generate(order=left, slots=3, more=arguments | {'begun': before})
    assert [place for place, one in enumerate(now) if one.is_complete] == sorted(complete)
    for i, was, one in zip(left, before, now):
      np.testing.assert_array_equal(one.tokens[: len(was.tokens)], was.tokens)
      np.testing.assert_array_equal(one.logp[: len(was.tokens)], was.logp)
      found[i] = one
  assert calls > 2 and len({*resumed}) > 1
  assert_same_tokens(found, responses)
  for i in range(7):
    for name in ('logp', 'entropy'):
      np.testing.assert_allclose(getattr(found[i], name), getattr(responses[i], name), atol=1e-5)
  written = sum(len(one.tokens) for one in responses)
  assert sum(sync.tokens for sync in syncs) == written
  share = written / sum(3 * sync.steps for sync in syncs)
  assert slots.metrics(syncs) == {'rollout/slots_busy': share} and 0.5 < share < 1
  assert slots.metrics([]) == {}


def test_nothing_is_decoded_where_it_is_enough_already(generate, monkeypatch):
  monkeypatch.setattr(decode_loop, 'decode', None)
  for one in generate(more={'is_enough': lambda: True}):
    assert not one.is_complete and not one.truncated and one.tokens.shape == (0,)


def test_one_sample_of_one_question_needs_one_slot(generate, responses):
  for count in (1, 8):
    assert_same_tokens(generate(order=[5], slots=count), [responses[5]])


@pytest.fixture
def watched(monkeypatch):
  """Lengths of the prompts of each prefill, and of the cache of each stretch of decoding."""
  prefills, caches = [], []
  prefill, decode = decode_loop.prefill, decode_loop.decode

  def watched_prefill(config, params, prompts, tokens_PT, lengths_P, place_P):
    num_places = len(prompts.hidden_WD)
    found = [length for length, place in zip(lengths_P.tolist(), place_P) if place < num_places]
    prefills.append((tokens_PT.shape, found))
    return prefill(config, params, prompts, tokens_PT, lengths_P, place_P)

  def watched_decode(*args):
    caches.append(kv_cache.length(args[3].cache))
    return decode(*args)

  monkeypatch.setattr(decode_loop, 'prefill', watched_prefill)
  monkeypatch.setattr(decode_loop, 'decode', watched_decode)
  return prefills, caches


def samples_of(decoding, mesh, counts, prompts, slots, **changes):
  """`counts[i]` samples of prompt i, one question after the other."""
  rows = [i for i, count in enumerate(counts) for _ in range(count)]
  spec = dataclasses.replace(SPEC, slots=slots, **changes)
  return scheduler.generate(
    CONFIG,
    decoding,
    [prompts[i] for i in rows],
    rows,
    [k for count in counts for k in range(count)],
    KEY,
    spec,
    mesh,
  )


def test_a_prompt_is_prefilled_once_for_all_its_samples(decoding, mesh, watched):
  """Also where its samples do not fit into the slots together: 8 + 7 + 8 in 3 slots."""
  long = np.arange(40, dtype=np.int32) % 30
  found = samples_of(decoding, mesh, (8, 7, 8), [PROMPTS[0], long, PROMPTS[4]], 3)
  prefills, _ = watched
  assert sorted(length for _, lengths in prefills for length in lengths) == [2, 3, 40]
  assert {shape for shape, _ in prefills} == {(4, 64)}
  alone = samples_of(decoding, mesh, (0, 0, 8), [PROMPTS[0], long, PROMPTS[4]], 8)
  assert_same_tokens(found[15:], alone)


def test_prompts_are_prefilled_in_fixed_shapes_up_front(decoding, mesh, watched, monkeypatch):
  """Seven prompts, four of which are kept at once, in rows of 16 tokens, 32 and 64."""
  monkeypatch.setattr(prefilled, 'PREFILL_TOKENS', 64)
  monkeypatch.setattr(prefilled, '_SHORTEST', 16)
  prompts = [np.resize(prompt, size) for prompt, size in zip(PROMPTS, (1, 16, 17, 3, 33, 4, 64))]
  found = samples_of(decoding, mesh, (1,) * 7, prompts, 8)
  prefills, _ = watched
  assert prefills == [
    ((4, 16), [1, 16, 3]),
    ((2, 32), [17]),
    ((4, 16), [4]),
    ((1, 64), [33]),
    ((1, 64), [64]),
  ]
  for row in range(7):
    counts = [int(other == row) for other in range(7)]
    assert_same_tokens(samples_of(decoding, mesh, counts, prompts, 8), [found[row]])


def test_prompts_that_come_again_after_others_are_prefilled_again(decoding, mesh, watched):
  """Eight questions in turn, four prompts kept: no row waits for a place that never gets free."""
  spec = dataclasses.replace(SPEC, slots=3)
  order = [*range(8)] * 2
  found = scheduler.generate(
    CONFIG,
    decoding,
    [(*PROMPTS, PROMPTS[0])[i] for i in order],
    order,
    [0] * 8 + [1] * 8,
    KEY,
    spec,
    mesh,
  )
  assert len(found) == 16
  prefills, _ = watched
  assert sum(len(lengths) for _, lengths in prefills) == 16


def test_the_cache_is_as_long_as_the_rows_need_and_not_as_the_limit(decoding, mesh, watched):
  spec = dataclasses.replace(SPEC, max_response=4096, eos_ids=(NEVER,), slots=2)
  scheduler.generate(
    CONFIG,
    decoding,
    PROMPTS[:6],
    ROWS[:6],
    SAMPLES[:6],
    KEY,
    spec,
    mesh,
    limits=[4, 4, 300, 4, 4, 4],
  )
  _, caches = watched
  assert caches[0] == 128 and max(caches) == 512 and caches[-1] == 512
  assert sorted(set(caches)) == [128, 256, 512]


def test_an_attention_that_is_ragged_needs_one_cache_and_all_slots(
  decoding, mesh, watched, monkeypatch
):
  """One program of each kind, and the same tokens."""
  spec = dataclasses.replace(SPEC, slots=32, max_response=300, eos_ids=(NEVER,))
  args = CONFIG, decoding, PROMPTS, ROWS, SAMPLES, KEY, spec, mesh
  limits = [1, 1, 1, 250, 80, 1, 1]
  expected = scheduler.generate(*args, limits=limits)
  _, caches = watched
  assert set(caches) == {128, 256}
  caches.clear()
  monkeypatch.setattr(kv_cache, 'is_ragged', bool)
  monkeypatch.setattr(decode_loop, 'select_slots', None)
  assert_same_tokens(scheduler.generate(*args, limits=limits), expected)
  assert set(caches) == {364}


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


def test_the_cache_never_outgrows_the_limit(decoding, mesh, watched):
  """20 + 90 tokens are the limit, and not 128, the next power of two; nor are prompts 64 long."""
  limits = {'max_prompt': 20, 'max_response': 90, 'eos_ids': (NEVER,)}
  found = samples_of(decoding, mesh, (1,), [PROMPTS[6]], 1, **limits)
  prefills, caches = watched
  assert [shape for shape, _ in prefills] == [(4, 20)]
  assert set(caches) == {110}
  assert [len(response.tokens) for response in found] == [90]


def test_a_long_cache_is_given_up_when_rows_are_short_again(decoding, mesh, watched):
  spec = dataclasses.replace(SPEC, max_response=4096, eos_ids=(NEVER,), slots=2)
  limits = [4, 4, 300, 300, 4]
  scheduler.generate(
    CONFIG, decoding, PROMPTS[:5], ROWS[:5], SAMPLES[:5], KEY, spec, mesh, limits=limits
  )
  _, caches = watched
  assert (caches[0], max(caches), caches[-1]) == (128, 512, 128)


def test_the_last_rows_close_up(decoding, mesh, monkeypatch):
  """32 slots, seven rows, then one that is left: 32, 8 and 2 slots, and the same tokens."""
  widths, decode = [], decode_loop.decode

  def watched(*args):
    widths.append(args[3].live_B.shape[0])
    return decode(*args)

  monkeypatch.setattr(decode_loop, 'decode', watched)
  spec = dataclasses.replace(SPEC, slots=32, max_response=300, eos_ids=(NEVER,))
  found = scheduler.generate(
    CONFIG, decoding, PROMPTS, ROWS, SAMPLES, KEY, spec, mesh, limits=[1, 1, 1, 250, 80, 1, 1]
  )
  assert widths == [32, 8, 2, 2]
  for row, limit in ((3, 250), (4, 80)):
    alone = scheduler.generate(
      CONFIG,
      decoding,
      [PROMPTS[row]],
      [ROWS[row]],
      [SAMPLES[row]],
      KEY,
      spec,
      mesh,
      limits=[limit],
    )
    assert_same_tokens([found[row]], alone)


def test_few_shapes_are_compiled(decoding, mesh):
  """Whatever the number of prompts, of samples and of rows refilled, and the temperature."""
  with compilations.counted() as compiled:
    spec = {'max_prompt': 63, 'slots': 5}  # of no other test
    samples_of(decoding, mesh, (3, 2, 3), PROMPTS, **spec)
    cooler = token_sampling.Distribution(0.6)
    samples_of(decoding, mesh, (1, 5, 2, 4, 1, 1), PROMPTS, distribution=cooler, **spec)
  assert compiled.names == {'empty': 1, 'prefill': 1, 'insert': 1, 'decode': 1}


# Against the trainer.


@pytest.mark.parametrize(('dtype', 'limit'), [('float32', 1e-4), ('bfloat16', 0.2)])
def test_log_probabilities_are_the_trainers(params, mesh, dtype, limit):
  """Over 1,000 tokens of mixed lengths, with refills and caches of several lengths."""
  config = dataclasses.replace(CONFIG, dtype=dtype)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 40, rng.integers(1, 60)).astype(np.int32) for _ in range(24)]
  limits = rng.integers(1, 150, 24)
  spec = dataclasses.replace(SPEC, slots=8, eos_ids=(NEVER,), max_response=300)
  found = scheduler.generate(
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
  logp_BTV = jax.nn.log_softmax(np.float32(hidden_BTD @ model.unembedding(config, params)))
  off = []
  for b, (prompt, response) in enumerate(zip(prompts, found)):
    places = len(prompt) + np.arange(len(response.tokens))
    off.append(np.abs(np.asarray(logp_BTV)[b, places - 1, response.tokens] - response.logp))
  off = np.concatenate(off)
  print(f'{dtype}: {len(off)} tokens, off by {off.mean():.1e}, at most {off.max():.1e}')
  assert len(off) >= 1000 and off.max() < limit


def test_at_a_large_vocabulary_only_draws_on_a_boundary_differ(mesh):
  """The first tokens that other slots change lie within 1e-5 of a boundary; other keys' do not."""
  config = dataclasses.replace(CONFIG, vocab_size=32_000)
  params = make_params(config, mesh)
  decoding = model.decode_layout(config, params, sharding.Meshes(mesh, mesh))

  def sample(slots, key=KEY):
    spec = dataclasses.replace(SPEC, slots=slots, eos_ids=(32_000,), max_response=24)
    return scheduler.generate(config, decoding, PROMPTS, ROWS, SAMPLES, key, spec, mesh)

  base = sample(4)
  other = sample(32)
  off = [distance(config, params, i, base[i], other[i]) for i in range(7)]
  assert max(off) < 1e-5
  elsewhere = sample(4, jax.random.key(6))
  assert np.median([distance(config, params, i, base[i], elsewhere[i]) for i in range(7)]) > 1e-5


def distance(config, params, row, ours, theirs):
  """How far the draw of the first token that differs was from the nearest boundary; 0 for none."""
  differs = np.flatnonzero(ours.tokens != theirs.tokens)
  if not differs.size:
    return 0.0
  place = differs[0]
  tokens_T = np.concatenate([PROMPTS[row], ours.tokens[:place]])
  padded_T = np.pad(tokens_T, (0, 48 - len(tokens_T)))
  hidden_TD = jax.jit(model.hidden_states, static_argnums=0)(config, params, padded_T[None])[0]
  logits_V = np.float64(hidden_TD[len(tokens_T) - 1] @ model.unembedding(config, params))
  p_V = np.exp(logits_V - logits_V.max())
  blocks_CW = np.asarray(token_sampling._blocks(p_V[None], len(p_V))[0], np.float64)
  key_B = randomness.row_keys(KEY, np.array([ROWS[row]]), np.array([SAMPLES[row]]))
  uniforms = np.asarray(randomness.uniforms(key_B, np.array([place])))[0]
  block = ours.tokens[place] // blocks_CW.shape[1]
  levels = (blocks_CW.sum(axis=1), blocks_CW[block])
  return min(
    np.abs(np.cumsum(level) / level.sum() - uniform).min()
    for level, uniform in zip(levels, uniforms)
  )
