"""What is drawn, what is said of it, and that nobody's company matters."""

import dataclasses

import jax
import numpy as np
import pytest
from devices import on_eight_devices
from tiny import ROPE

from exgrpo_jax import draw, model, sampler, sharding

CONFIG = model.Config(
    vocab_size=40, width=32, num_layers=1, num_heads=4, num_kv_heads=2, head_size=8, mlp_width=48,
    rope=ROPE, norm_epsilon=1e-6, attention_bias=True, query_key_norm=False, tied_embeddings=False,
    dtype='float32')
NEVER = CONFIG.vocab_size  # an end token that no row can draw
SCALE = .2 * CONFIG.width**.5  # initial weights have standard deviation 1 / sqrt(width)
SETTINGS = sampler.Settings(draw=draw.Config(), slots=4, max_response=12, eos_ids=(3, 7), pad_id=0)
KEY = jax.random.key(5)
PROMPTS = [np.array(prompt, np.int32) for prompt in (
    [5, 6, 9], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 9], [30, 31], [0, 0, 12], [39] * 20)]
ROWS = [10, 11, 12, 10, 13, 14, 15]
SAMPLES = [0, 0, 0, 1, 2, 0, 3]  # prompts 0 and 3 are two samples of one question


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.Config(data=-1, fsdp=1, tensor=1))


@pytest.fixture(scope='module')
def params(mesh):
  """Wide enough apart that logits spread over some nats."""
  return jax.tree.map(lambda x: SCALE * x if x.ndim > 1 else x,
                      model.init(CONFIG, jax.random.key(0), mesh))


@pytest.fixture(scope='module')
def generate(params, mesh):
  def call(order=range(7), key=KEY, on_finish=None, prompts=PROMPTS, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return sampler.generate(
        CONFIG, params, [prompts[i] for i in order], [ROWS[i] for i in order],
        [SAMPLES[i] for i in order], key, settings, mesh, on_finish)

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
    return np.float64(logits_TV[len(prompt) - 1:len(tokens) - 1])

  return call


def log_softmax(logits):
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_same_tokens(found, expected):
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


@pytest.mark.parametrize('length, limit, expected', [
    (1, 512, 32), (32, 512, 32), (33, 512, 48), (48, 512, 48), (49, 512, 64), (65, 512, 96),
    (300, 512, 384), (385, 512, 512), (385, 400, 400), (20, 20, 20)])
def test_lengths_fall_into_powers_of_two_and_their_middles(length, limit, expected):
  assert sampler.bucket(length, limit) == expected


def test_greedy_takes_the_most_probable_token(generate, logits):
  """And tells its log-probability and the entropy at temperature 1."""
  for prompt, response in zip(PROMPTS, generate(draw=draw.Config(0.))):
    logp_TV = log_softmax(logits(prompt, response))
    np.testing.assert_array_equal(response.tokens, logp_TV.argmax(-1))
    np.testing.assert_allclose(response.logp, logp_TV.max(-1), atol=1e-5)
    np.testing.assert_allclose(
        response.entropy, -(np.exp(logp_TV) * logp_TV).sum(-1), atol=1e-5)


@pytest.mark.parametrize('temperature', [1., .6])
def test_logp_and_entropy_are_those_of_the_whole_sequence(generate, logits, temperature):
  for prompt, response in zip(PROMPTS, generate(draw=draw.Config(temperature))):
    logp_TV = log_softmax(logits(prompt, response) / temperature)
    assert response.logp.dtype == response.entropy.dtype == np.float32
    np.testing.assert_allclose(
        response.logp, logp_TV[np.arange(len(logp_TV)), response.tokens], atol=1e-5)
    np.testing.assert_allclose(
        response.entropy, -(np.exp(logp_TV) * logp_TV).sum(-1), atol=1e-5)


def test_a_response_ends_with_its_first_end_token_or_is_truncated(responses):
  assert {response.truncated for response in responses} == {True, False}  # both occur here
  for response in responses:
    is_end = np.isin(response.tokens, SETTINGS.eos_ids)
    assert response.tokens.dtype == np.int32
    assert not is_end[:-1].any()
    assert is_end[-1] != response.truncated
    assert len(response.tokens) == SETTINGS.max_response or not response.truncated


def test_an_end_token_at_the_limit_is_not_truncation(generate):
  whole, = generate(order=[2], eos_ids=(NEVER,))
  assert whole.truncated and len(whole.tokens) == 12
  last = int(whole.tokens[-1])
  limit = int(np.argmax(whole.tokens == last)) + 1  # where that token first comes
  ended, = generate(order=[2], eos_ids=(last,), max_response=limit)
  assert not ended.truncated and len(ended.tokens) == limit


def test_the_first_token_may_end_a_response(generate):
  whole, = generate(order=[0], eos_ids=(NEVER,))
  ended, = generate(order=[0], eos_ids=(int(whole.tokens[0]),))
  np.testing.assert_array_equal(ended.tokens, whole.tokens[:1])
  assert not ended.truncated and len(ended.logp) == len(ended.entropy) == 1


def test_a_pad_token_may_be_part_of_a_response(generate):
  """Lengths come from the loop: here the padding is a token that the row does write."""
  whole, = generate(order=[0], eos_ids=(NEVER,))
  found, = generate(order=[0], eos_ids=(NEVER,), pad_id=int(whole.tokens[-1]))
  np.testing.assert_array_equal(found.tokens, whole.tokens)


def test_padding_with_an_end_token_changes_nothing(generate, responses):
  """As where a checkpoint has no padding token of its own, or pads with its end token."""
  padded = generate(pad_id=SETTINGS.eos_ids[0])
  for own, other in zip(responses, padded, strict=True):
    np.testing.assert_array_equal(own.tokens, other.tokens)
    assert own.truncated == other.truncated
  assert any(own.tokens[-1] in SETTINGS.eos_ids for own in responses)


def test_the_same_key_gives_the_same_responses(generate, responses):
  assert_same_tokens(generate(), responses)
  other = generate(key=jax.random.key(6))
  assert any(len(a.tokens) != len(b.tokens) or (a.tokens != b.tokens).any()
             for a, b in zip(other, responses))


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
  found = generate(on_finish=lambda index, response: reported.append((index, response)))
  assert sorted(index for index, _ in reported) == list(range(len(PROMPTS)))
  assert all(response is found[index] for index, response in reported)


def test_no_prompts_give_no_responses(generate):
  assert generate(order=[]) == []


def test_eight_devices_sample_what_one_does(responses):
  """Rows over four devices, heads over two."""
  script = f"""
import jax, numpy as np
from exgrpo_jax import draw, model, sampler, sharding
from exgrpo_jax.rotary import Config  # as the repr of `rope` has it
config = model.{CONFIG!r}
settings = sampler.Settings(
    draw=draw.Config(), slots=4, max_response=12, eos_ids=(3, 7), pad_id=0)
prompts = {[prompt.tolist() for prompt in PROMPTS]}
expected = {[response.tokens.tolist() for response in responses]}
mesh = sharding.make_mesh(sharding.Config(data=2, fsdp=2, tensor=2))
params = jax.tree.map(lambda x: {SCALE} * x if x.ndim > 1 else x,
                      model.init(config, jax.random.key(0), mesh))
found = sampler.generate(
    config, params, [np.array(prompt, np.int32) for prompt in prompts], {ROWS}, {SAMPLES},
    jax.random.key(5), settings, mesh)
assert [response.tokens.tolist() for response in found] == expected
"""
  on_eight_devices(script)
