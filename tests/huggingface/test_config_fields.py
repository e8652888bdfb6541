"""Tests that all config.json fields of transformers are read alike, refused, or without effect.

If transformers is installed, tests also check its configuration classes and compare logits.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.huggingface.families import FAMILIES, REFUSED
from exgrpo_jax.policy import logprobs, model
from tests.helpers import cases, tiers

BASE = dict(
  vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
  intermediate_size=48, max_position_embeddings=128, rms_norm_eps=1e-5, initializer_range=0.2,
  tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
GEMMA = dict(head_dim=12, sliding_window=7, query_pre_attn_scalar=20)
OWN = {
  'Qwen3ForCausalLM': dict(head_dim=12),
  'Qwen3MoeForCausalLM': dict(moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3),
  'MistralForCausalLM': dict(sliding_window=7, head_dim=12),
  'MinistralForCausalLM': dict(sliding_window=7, head_dim=12),
  'Ministral3ForCausalLM': dict(head_dim=12), 'SmolLM3ForCausalLM': dict(sliding_window=7),
  'Olmo3ForCausalLM': dict(sliding_window=7), 'Gemma2ForCausalLM': GEMMA,
  'Gemma3ForCausalLM': GEMMA | dict(sliding_window_pattern=2),
}  # fmt: skip
# Another value of each supported field. Per-layer values differ from the default pattern.
ALTERED = dict(
  vocab_size=80, hidden_size=36, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3,
  head_dim=10, intermediate_size=40, max_position_embeddings=64, rms_norm_eps=1e-2,
  tie_word_embeddings=True, hidden_act='gelu', hidden_activation='relu', attention_bias=True,
  mlp_bias=True, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
  norm_topk_prob=True, query_pre_attn_scalar=9, attn_logit_softcapping=3.0,
  final_logit_softcapping=4.0, use_sliding_window=True, sliding_window=5, max_window_layers=2,
  no_rope_layer_interval=2, no_rope_layers=[0, 1, 1, 0, 0],
  layer_types=[f'{kind}_attention' for kind in ('full', 'sliding') * 2 + ('sliding',)],
  rope_parameters=dict(rope_type='linear', rope_theta=3e4, factor=2.0),
)  # fmt: skip
NESTED = dict(
  full_attention=dict(rope_type='linear', rope_theta=3e4, factor=2.0),
  sliding_attention=dict(rope_type='default', rope_theta=2e3),
)  # fmt: skip
GROWING = dict(
  rope_type='yarn', rope_theta=3e4, factor=4.0, original_max_position_embeddings=9,
  llama_4_scaling_beta=0.3,
)  # fmt: skip
# Fields outside the configuration classes, tested by `CASES`.
BESIDE = (
  *('rope_scaling', 'rope_theta', 'rope_local_base_freq', 'original_max_position_embeddings'),
  *('sliding_window_pattern', 'num_local_experts'),
)
# Fields of the classes that do not affect our computation -> another value.
WITHOUT_EFFECT = dict(
  attention_dropout=0.5, initializer_range=0.3,  # training
  output_router_logits=False, router_aux_loss_coef=0.1, pretraining_tp=2,
  # returned values, and details of the computation
  chunk_size_feed_forward=1, output_hidden_states=True, return_dict=True, use_cache=False,
  id2label={0: 'a', 1: 'b', 2: 'c'}, label2id={'a': 0}, problem_type='regression',  # classifiers
  bos_token_id=1, eos_token_id=2, pad_token_id=3,  # tokenizer and generation
  dtype='float32', transformers_version='4.0',  # config.model.dtype decides
  architectures=None,  # chooses the class
)  # fmt: skip
# Attributes that transformers' sources read, but that are not fields of text models.
NO_FIELDS = {
  *('allow_is_causal_skip', 'default_theta', 'json', 'token_type_ids', 'image_token_id'),
  *('mm_tokens_per_image', 'text_config', 'vision_config'),
}
QWEN3, OLMO3, GEMMA3 = (f'{name}ForCausalLM' for name in ('Qwen3', 'Olmo3', 'Gemma3'))
THETA = dict(rope_type='default', rope_theta=1e6)
YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type='linear', factor=8.0)
# name -> (architecture, changes, error message or expected values of the model.ShapeConfig).
CASES = {
  row['case']: (row['architecture'], row['changes'], row.get('refusal') or row['config'])
  for row in cases.rows('huggingface', 'config_fields.jsonl')
}


def tiny(name, **changes):
  own = dict(architectures=[name], model_type=FAMILIES[name].model_type)
  return json.loads(json.dumps(BASE | OWN.get(name, {}) | own | changes))


def parse(values):
  return architecture.parse(values, 'config.json', 'float32')


@pytest.mark.parametrize(('name', 'changes', 'expected'), CASES.values(), ids=CASES)
def test_a_field_is_read_as_in_transformers_or_refused(name, changes, expected):
  values = tiny(name, **changes)
  if isinstance(expected, str):
    with pytest.raises(InputError, match=f'^config.json: {expected}'):
      parse(values)
    return
  config = parse(values)
  for field, value in expected.items():
    given = getattr(config, field)
    read = {key: getattr(given, key) for key in value} if isinstance(value, dict) else given
    assert read == value


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('field', REFUSED)
def test_unsupported_fields_are_refused_unless_they_have_no_effect(name, field):
  for value in REFUSED[field][1]:
    assert parse(tiny(name, **{field: value})) == parse(tiny(name))
  with pytest.raises(InputError, match=rf'^config\.json: {field}=7 is not supported: .* {field} '):
    parse(tiny(name, **{field: 7}))


@pytest.mark.parametrize('name', FAMILIES)
def test_fields_without_effect_are_ignored(name):
  assert parse(tiny(name, **WITHOUT_EFFECT | dict(architectures=[name]))) == parse(tiny(name))


def test_top_level_fields_of_an_image_model_do_not_affect_its_text_part(tmp_path):
  text = tiny(GEMMA3)
  name = 'Gemma3ForConditionalGeneration'
  values = dict(architectures=[name], text_config=text, rope_scaling=LINEAR, is_causal=False)
  (tmp_path / 'config.json').write_text(json.dumps(values))
  assert parse(architecture.read_json(tmp_path)) == parse(text)


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    (GEMMA3, dict(rope_scaling=LINEAR)),
    (GEMMA3, dict(rope_scaling=LINEAR | dict(rope_theta=2e3), rope_parameters=NESTED)),
    (OLMO3, dict(rope_parameters=dict(sliding_attention=THETA))),
    (QWEN3, dict(rope_scaling=YARN, rope_parameters=THETA, rope_theta=1e6)),
    (QWEN3, dict(rope_scaling=YARN | THETA, rope_parameters=THETA)),
  ],
)
def test_an_extension_changes_the_base_wherever_it_is_read(name, changes):
  values = tiny(name, **changes)
  before, extension = parse(values), architecture.Extension(rope_theta=4e4)
  after = parse(architecture.extended(values, extension))
  longer = dataclasses.replace(before.rope, theta=4e4)
  local = before.local_rope if FAMILIES[name].local_theta else after.local_rope
  assert after == dataclasses.replace(before, rope=longer, local_rope=local)


# ---- Compared with transformers ----


def altered(name):
  """Return a config.json in which every field of the class differs from `tiny`."""
  family = FAMILIES[name]
  rope = NESTED if family.local_theta else ALTERED['rope_parameters']
  rope = GROWING if 'query_beta' in family.options else rope
  known = {field.name for field in dataclasses.fields(configuration(name))}
  changes = {field: value for field, value in ALTERED.items() if field in known}
  return tiny(name, **changes | dict(rope_parameters=rope))


def configuration(name):
  """Return the configuration class of transformers."""
  transformers = pytest.importorskip('transformers')
  return transformers.CONFIG_MAPPING[FAMILIES[name].model_type]


@pytest.mark.full
@pytest.mark.parametrize('name', tiers.full_after_first(FAMILIES))
def test_every_field_of_transformers_is_known(name):
  own = configuration(name)
  sources = [own.__module__, own.__module__.replace('configuration', 'modeling')]
  sources += ['transformers.masking_utils', 'transformers.modeling_rope_utils']
  pytest.importorskip('torch')
  text = '\n'.join(inspect.getsource(importlib.import_module(source)) for source in sources)
  read = {
    *re.findall(r'\bconfig\.([a-z]\w+)\b(?!\()', text),
    *re.findall(r'attr\((?:self\.)?(?:config|self), ["\']([a-z]\w+)["\']', text),
    *re.findall(r'kwargs\.(?:get|pop)\(["\'](\w+)["\']', text),
  }
  fields = {field.name for field in dataclasses.fields(own)}
  unknown = fields | read - NO_FIELDS
  assert unknown - {*ALTERED, *BESIDE, *REFUSED, *WITHOUT_EFFECT} == set()


@pytest.mark.full
@pytest.mark.parametrize('name', FAMILIES)
def test_a_missing_field_is_transformers_default_or_refused(name):
  for values in (tiny(name), altered(name)):
    for field in dataclasses.fields(configuration(name)):
      rest = {key: value for key, value in values.items() if key != field.name}
      if field.name != 'architectures' and (without := outcome(rest)):
        assert without == outcome(rest | {field.name: field.default}), field.name


def outcome(values):
  try:
    return parse(values)
  except InputError:
    return None


@pytest.mark.parametrize('name', FAMILIES)
def test_every_altered_field_changes_the_shape(name):
  values = altered(name)
  without_effect = {'max_position_embeddings', 'no_rope_layer_interval', 'max_window_layers'}
  if name == GEMMA3:
    without_effect |= {'attn_logit_softcapping'}
  if FAMILIES[name].numbers:
    without_effect |= {'intermediate_size'}
  for field in {*values} & {*ALTERED} - without_effect:
    changed = values | {field: tiny(name).get(field)}
    assert outcome(changed) != parse(values), field


@pytest.mark.full
@pytest.mark.parametrize('name', FAMILIES)
def test_logits_of_an_altered_model_equal_transformers_logits(name, mesh, tmp_path):
  values = altered(name)
  assert_logits_agree(values, mesh, tmp_path)
  assert_logits_agree(values | dict(layer_types=None, no_rope_layers=None), mesh, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('case', [case for case in CASES if not isinstance(CASES[case][2], str)])
def test_logits_equal_transformers_logits(case, mesh, tmp_path):
  name, changes, _ = CASES[case]
  assert_logits_agree(tiny(name, **changes), mesh, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('name', FAMILIES)
def test_fields_without_effect_do_not_change_transformers_logits(name, tmp_path):
  own = dict(architectures=[name], initializer_range=BASE['initializer_range'])
  others = {f: v for f, v in WITHOUT_EFFECT.items() if f not in ('pad_token_id', 'return_dict')}
  given, changed = tiny(name), tiny(name, **others | own)
  np.testing.assert_array_equal(theirs(given, tmp_path), theirs(changed, tmp_path))


def assert_logits_agree(values, mesh, folder):
  expected = theirs(values, folder)
  config = parse(architecture.read_json(folder))
  with jax.set_mesh(mesh):
    params = weights.load(folder, config, mesh)
    hidden_TD = _forward(config, params, TOKENS_BT)[0]
    logits_TV = (hidden_TD @ model.unembedding(config, params)).astype(jnp.float32)
  ours = logprobs.capped(logits_TV, config.logit_cap)
  np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


TOKENS_BT = np.random.default_rng(0).integers(0, 80, (1, 40), np.int32)
_forward = functools.partial(jax.jit, static_argnums=0)(model.hidden_states)


def theirs(values, folder):
  """Create a transformers model, write it to `folder`, and return its logits, [T, V]."""
  torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
  (folder / 'config.json').write_text(json.dumps(values))
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(folder)
  policy = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, parameter in policy.named_parameters():
      if 'norm' in name or name.endswith('bias'):
        parameter.add_(0.2 * torch.randn_like(parameter))
    logits_TV = policy(torch.tensor(TOKENS_BT)).logits[0].numpy()
  policy.save_pretrained(folder)
  (folder / 'config.json').write_text(json.dumps(values))
  return logits_TV
