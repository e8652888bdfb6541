"""Tests of architecture: config.json to model.ShapeConfig and back, and unsupported models."""

import dataclasses
import json

import pytest

from benchmarks import flops
from exgrpo_jax.config import overridden
from exgrpo_jax.configs import gemma3_1b
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.policy import rotary
from tests.helpers.tiny import ROPE

# From the published config.json files of Qwen2.5-Math-1.5B and Llama-3.1-8B.
QWEN = {
  'architectures': ['Qwen2ForCausalLM'], 'hidden_act': 'silu', 'hidden_size': 1536,
  'intermediate_size': 8960, 'max_position_embeddings': 4096, 'num_attention_heads': 12,
  'num_hidden_layers': 28, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06, 'rope_theta': 10000.0,
  'sliding_window': 4096, 'tie_word_embeddings': True, 'use_sliding_window': False,
  'vocab_size': 151936,
}  # fmt: skip
LLAMA3 = {
  'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192, 'rope_type': 'llama3',
}  # fmt: skip
LLAMA = {
  'architectures': ['LlamaForCausalLM'], 'attention_bias': False, 'hidden_act': 'silu',
  'hidden_size': 4096, 'intermediate_size': 14336, 'mlp_bias': False, 'num_attention_heads': 32,
  'num_hidden_layers': 32, 'num_key_value_heads': 8, 'rms_norm_eps': 1e-05, 'rope_scaling': LLAMA3,
  'rope_theta': 500000.0, 'tie_word_embeddings': False, 'vocab_size': 128256,
}  # fmt: skip
QWEN3 = QWEN | {'architectures': ['Qwen3ForCausalLM'], 'head_dim': 64}
LLAMA_ROPE = dataclasses.replace(
  ROPE, theta=5e5, scaling='llama3', factor=8.0, original_positions=8192
)


def parse(values, **changes):
  return architecture.parse(values | changes, 'config.json', 'float32')


def read(folder, values):
  (folder / 'config.json').write_text(json.dumps(values))
  return parse(architecture.read_json(folder))


def said_back(config):
  """Return the exported config.json after checking that it is parsed to the same config."""
  said = json.loads(json.dumps(architecture.to_json(config, 4096)))
  assert parse(said) == config
  return said


def shape(config):
  return (
    *(config.vocab_size, config.width, config.num_layers, config.num_heads, config.num_kv_heads),
    *(config.head_size, config.mlp_width, config.norm_epsilon),
    *(config.attention_bias, config.query_key_norm, config.tied_embeddings),
  )


@pytest.mark.parametrize(
  ('values', 'expected', 'rope'),
  [
    (QWEN, (151936, 1536, 28, 12, 2, 128, 8960, 1e-6, True, False, True), ROPE),
    (QWEN3, (151936, 1536, 28, 12, 2, 64, 8960, 1e-6, False, True, True), ROPE),
    (LLAMA, (128256, 4096, 32, 32, 8, 128, 14336, 1e-5, False, False, False), LLAMA_ROPE),
  ],
  ids=['qwen2', 'qwen3', 'llama3'],
)
def test_a_config_json_is_parsed_and_exported_again(values, expected, rope):
  config = parse(values)
  assert (shape(config), config.rope, config.dtype) == (expected, rope, 'float32')
  assert said_back(config)['architectures'] == values['architectures']


def test_missing_fields_have_transformers_defaults():
  missing = ('num_key', 'tie', 'rms', 'rope')
  sparse = {name: value for name, value in LLAMA.items() if not name.startswith(missing)}
  config = parse(sparse)
  assert (config.num_kv_heads, config.tied_embeddings, config.norm_epsilon) == (32, False, 1e-6)
  assert config.rope == ROPE
  del sparse['hidden_act']
  assert parse(sparse, architectures=['Qwen3ForCausalLM']).head_size == 128


def test_the_last_layers_of_qwen_may_have_windows():
  config = parse(QWEN, use_sliding_window=True, max_window_layers=21)
  assert (config.layers, config.window) == ('f' * 21 + 's' * 7, 4096)
  said_back(config)


@pytest.mark.parametrize(
  ('scaling', 'expected'),
  [
    (None, rotary.RopeConfig(5e5)),
    (LLAMA3, LLAMA_ROPE),
    ({'type': 'linear', 'factor': 2.0}, rotary.RopeConfig(5e5, 'linear', 2.0)),
  ],
  ids=['none', 'llama3', 'linear'],
)
def test_rope_in_both_formats(scaling, expected):
  old = parse(LLAMA, rope_scaling=scaling)
  parameters = (scaling or {}) | {'rope_theta': 5e5}
  parameters['rope_type'] = parameters.pop('type', None) or parameters.get('rope_type', 'default')
  rest = {name: value for name, value in LLAMA.items() if not name.startswith('rope')}
  assert old.rope == parse(rest, rope_parameters=parameters).rope == expected


@pytest.mark.parametrize(
  'rope_fields',
  [{'rope_theta': 1e4}, {'rope_parameters': {'rope_theta': 1e4, 'rope_type': 'default'}}],
)
def test_extension_keeps_the_format_of_rope(rope_fields):
  values = {name: value for name, value in QWEN.items() if name != 'rope_theta'} | rope_fields
  longer = architecture.extended(
    values, architecture.Extension(rope_theta=4e4, max_position_embeddings=16384)
  )
  assert longer.keys() == values.keys()
  assert parse(longer).rope == dataclasses.replace(ROPE, theta=4e4)
  assert longer['max_position_embeddings'] == 16384
  assert architecture.extended(values, architecture.Extension()) == values


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'query_key_norm': True}, 'attention_bias=True, query_key_norm=True, so it cannot be export'),
    ({'attention_bias': False, 'output_bias': True}, 'output_bias=True, so it cannot be exported'),
    (
      {'layers': 'fs', 'window': 8, 'local_rope': rotary.RopeConfig(theta=1e3)},
      "attention_bias=True, layers='fs', local_rope different from rope, so .* cannot be exported",
    ),
    (
      {'attention_bias': False, 'num_heads': 10},
      r'model\.num_heads=10 must divide width=1536 for ',
    ),
    ({'head_size': 64}, r'config\.model\.head_size=64 must be width / num_heads for export'),
  ],
)
def test_to_json_refuses_shapes_without_a_hugging_face_architecture(changes, message):
  with pytest.raises(InputError, match=message):
    architecture.to_json(dataclasses.replace(parse(QWEN), **changes), 4096)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, r'config\.model\.path=.* contains no config\.json'),
    ('{', r'config\.json: not valid JSON'),
    ('[]', r'config\.json: not a JSON object'),
  ],
)
def test_an_unreadable_config_json_is_refused(tmp_path, content, message):
  if content:
    (tmp_path / 'config.json').write_text(content)
  with pytest.raises(InputError, match=message):
    architecture.read_json(tmp_path)
  with pytest.raises(InputError, match=r'config\.model\.path=.*absent is not a folder'):
    architecture.read_json(tmp_path / 'absent')


# ---- Published config.json files of every family, parsed and exported again ----


MISTRAL = dict(
  architectures=['MistralForCausalLM'], hidden_size=4096, intermediate_size=14336,
  num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
  rope_theta=1e4, vocab_size=32000, tie_word_embeddings=False,
)  # fmt: skip
# With images.
MINISTRAL3_8B = dict(
  architectures=['Mistral3ForConditionalGeneration'], model_type='mistral3',
  text_config=dict(
    model_type='ministral3', head_dim=128, hidden_size=4096, intermediate_size=14336,
    num_attention_heads=32, num_hidden_layers=34, num_key_value_heads=8, rms_norm_eps=1e-5,
    rope_parameters=dict(
      beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
      mscale_all_dim=1.0, original_max_position_embeddings=16384, rope_theta=1e6, rope_type='yarn',
    ),
    sliding_window=None, vocab_size=131072,
  ),
  vision_config=dict(hidden_size=1024, model_type='pixtral'),
)  # fmt: skip
SMOLLM3 = dict(
  architectures=['SmolLM3ForCausalLM'], hidden_size=2048, intermediate_size=11008,
  num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4,
  no_rope_layers=[1, 1, 1, 0] * 9, layer_types=['full_attention'] * 36, use_sliding_window=False,
  sliding_window=None, rope_theta=5e6, vocab_size=128256,
)  # fmt: skip
OLMO2 = dict(
  architectures=['Olmo2ForCausalLM'], hidden_size=4096, intermediate_size=11008,
  num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-6, rope_theta=5e5,
  vocab_size=100352,
)  # fmt: skip
OLMO3 = OLMO2 | dict(
  architectures=['Olmo3ForCausalLM'],
  layer_types=[*['sliding_attention'] * 3, 'full_attention'] * 8, sliding_window=4096,
  vocab_size=100278,
  rope_scaling=dict(
    rope_type='yarn', factor=8.0, original_max_position_embeddings=8192,
    attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1,
  ),
)  # fmt: skip
GEMMA2 = dict(
  architectures=['Gemma2ForCausalLM'], attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
  head_dim=256, hidden_act='gelu_pytorch_tanh', hidden_activation='gelu_pytorch_tanh',
  hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_hidden_layers=26,
  num_key_value_heads=4, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_theta=1e4,
  sliding_window=4096, vocab_size=256000,
)  # fmt: skip
GEMMA3_1B = dict(
  architectures=['Gemma3ForCausalLM'], attn_logit_softcapping=None, final_logit_softcapping=None,
  head_dim=256, hidden_activation='gelu_pytorch_tanh', hidden_size=1152, intermediate_size=6912,
  num_attention_heads=4, num_hidden_layers=26, num_key_value_heads=1, query_pre_attn_scalar=256,
  rms_norm_eps=1e-6, rope_local_base_freq=1e4, rope_scaling=None, rope_theta=1e6,
  sliding_window=512, sliding_window_pattern=6, vocab_size=262144,
)  # fmt: skip
# With images. Missing fields have transformers' defaults.
GEMMA3_4B = dict(
  architectures=['Gemma3ForConditionalGeneration'], model_type='gemma3',
  text_config=dict(
    hidden_size=2560, intermediate_size=10240, model_type='gemma3_text', num_hidden_layers=34,
    rope_scaling=dict(rope_type='linear', factor=8.0), sliding_window=1024,
  ),
  vision_config=dict(hidden_size=1152, model_type='siglip_vision_model'),
)  # fmt: skip
QWEN3_30B_A3B = dict(
  architectures=['Qwen3MoeForCausalLM'], attention_bias=False, decoder_sparse_step=1, head_dim=128,
  hidden_size=2048, intermediate_size=6144, max_window_layers=48, mlp_only_layers=[],
  moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
  num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, rms_norm_eps=1e-6,
  rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
  vocab_size=151936,
)  # fmt: skip
MINISTRAL3_YARN = rotary.RopeConfig(1e6, 'yarn', 16.0, original_positions=16384)
YARN = rotary.RopeConfig(
  5e5, 'yarn', 8.0, original_positions=8192, attention_factor=1.2079441541679836
)
LINEAR = rotary.RopeConfig(1e6, 'linear', 8.0)


@pytest.mark.parametrize(
  ('values', 'layers', 'window', 'rope', 'local_rope', 'billions'),
  [
    (MISTRAL | dict(sliding_window=4096), 's', 4096, 1e4, 1e4, 7.24),
    (MISTRAL | dict(sliding_window=None), 'f', 0, 1e4, None, 7.24),
    (MINISTRAL3_8B, 'f', 0, MINISTRAL3_YARN, None, 8.49),
    (SMOLLM3, 'fffn', 0, 5e6, None, 3.08),
    (OLMO2, 'f', 0, 5e5, None, 7.30),
    (OLMO3, 'sssf', 4096, YARN, 5e5, 7.30),
    (GEMMA2, 'sf', 4096, 1e4, 1e4, 2.61),
    (GEMMA3_1B, 'sssssf', 512, 1e6, 1e4, 1.00),
    (GEMMA3_4B, 'sssssf', 1024, LINEAR, 1e4, 3.88),
    (QWEN3_30B_A3B, 'f', 0, 1e6, None, 30.53),
  ],
  ids=[
    *('mistral-0.1', 'mistral-0.3', 'ministral3', 'smollm3', 'olmo2', 'olmo3', 'gemma2'),
    *('gemma3-1b', '4b', '30b'),
  ],
)
def test_published_models_have_their_known_shapes(
  tmp_path, values, layers, window, rope, local_rope, billions
):
  config = read(tmp_path, values)
  assert (config.layers, config.window) == (layers, window)
  rope = rope if isinstance(rope, rotary.RopeConfig) else rotary.RopeConfig(theta=rope)
  local_rope = rotary.RopeConfig(theta=local_rope) if local_rope else rotary.RopeConfig()
  assert (config.rope, config.local_rope) == (rope, local_rope)
  assert flops.parameter_count(config) / 1e9 == pytest.approx(billions, abs=0.01)
  said_back(config)


def test_the_config_for_gemma_3_1b_has_its_shape(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(GEMMA3_1B | {'max_position_embeddings': 32768}))
  values = overridden(gemma3_1b.get_config(), {'model.path': str(tmp_path)})
  assert experiment.model_config(parse_config(values)).window == 512  # no other shape is accepted


@pytest.mark.parametrize('values', [GEMMA2, GEMMA3_1B])
def test_a_gemma_without_windows_exports_its_layer_types(values):
  config = parse(values, layer_types=['full_attention'] * 26)
  assert (config.layers, config.window) == ('f', 0)
  said = said_back(config)
  assert said['layer_types'] == ['full_attention'] * 26 and said['sliding_window']


def test_gemmas_query_scale_is_exported_as_an_integer():
  config = parse(GEMMA3_1B)
  said = architecture.to_json(config, 4096)['query_pre_attn_scalar']
  assert said == 256 and isinstance(said, int)
  with pytest.raises(InputError, match=r'^config\.model\.query_scale=20\.5 must be a whole number'):
    architecture.to_json(dataclasses.replace(config, query_scale=20.5), 4096)


def test_ministral_3_requires_the_query_scaling():
  values = MINISTRAL3_8B['text_config'] | dict(architectures=['Ministral3ForCausalLM'])
  assert parse(values).query_beta == 0.1
  yarn = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=8192)
  with pytest.raises(InputError, match=r"^config.json: no 'llama_4_scaling_beta', which scales"):
    parse(values, rope_parameters=yarn)


@pytest.mark.parametrize('of_all', [True, False])
def test_tied_embeddings_are_read_from_the_top_level(tmp_path, of_all):
  values = json.loads(json.dumps(MINISTRAL3_8B)) | dict(tie_word_embeddings=of_all)
  values['text_config']['tie_word_embeddings'] = not of_all
  assert read(tmp_path, values).tied_embeddings == of_all


def test_an_image_model_with_an_unknown_text_part_is_refused(tmp_path):
  with pytest.raises(InputError, match="'Mistral3ForConditionalGeneration' is not supported"):
    read(tmp_path, MINISTRAL3_8B | dict(text_config=dict(model_type='other')))


def test_smollm3_sets_windows_and_positions_per_layer():
  config = parse(SMOLLM3, use_sliding_window=True, sliding_window=64, layer_types=None)
  assert (config.layers, config.window) == ('fffw', 64)
  said_back(config)


def test_yarns_attention_factor_follows_from_the_factor():
  scaling = {**OLMO3['rope_scaling'], 'attention_factor': None}
  factor = parse(OLMO3, rope_scaling=scaling).rope.attention_factor
  assert factor == pytest.approx(YARN.attention_factor)


def test_experts_have_their_own_width_and_a_router_for_each_token():
  config = parse(QWEN3_30B_A3B)
  experts = config.num_experts, config.experts_per_token, config.mlp_width
  assert experts == (128, 8, 768) and config.normalised_experts
  assert config.route_dtype == 'uint8'
  # 3 of 30 billion parameters are active per token.
  assert flops.forward_flops(config, 1, 1, 1) / 2e9 == pytest.approx(3.04, abs=0.01)
