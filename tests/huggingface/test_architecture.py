"""Tests of architecture: config.json to model.Config and back, and what is refused."""

import dataclasses
import json

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.policy import rotary
from tests.helpers.tiny import ROPE

# Of the published config.json of Qwen2.5-Math-1.5B and Llama-3.1-8B.
QWEN = {
  'architectures': ['Qwen2ForCausalLM'],
  'hidden_act': 'silu',
  'hidden_size': 1536,
  'intermediate_size': 8960,
  'max_position_embeddings': 4096,
  'num_attention_heads': 12,
  'num_hidden_layers': 28,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 10000.0,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
LLAMA3 = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
  'rope_type': 'llama3',
}
LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'intermediate_size': 14336,
  'mlp_bias': False,
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-05,
  'rope_scaling': LLAMA3,
  'rope_theta': 500000.0,
  'tie_word_embeddings': False,
  'vocab_size': 128256,
}
QWEN3 = QWEN | {'architectures': ['Qwen3ForCausalLM'], 'head_dim': 64}
LLAMA_ROPE = dataclasses.replace(
  ROPE, theta=5e5, scaling='llama3', factor=8.0, original_positions=8192
)


def parse(values, **changes):
  return architecture.parse(values | changes, 'config.json', 'float32')


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
def test_a_config_json_gives_the_models_shape_and_is_given_back(values, expected, rope):
  config = parse(values)
  assert (shape(config), config.rope, config.dtype) == (expected, rope, 'float32')
  written = json.loads(json.dumps(architecture.to_json(config, 4096)))
  assert parse(written) == config and written['architectures'] == values['architectures']


def test_missing_fields_have_the_defaults_of_transformers():
  sparse = {
    name: value
    for name, value in LLAMA.items()
    if not name.startswith(('num_key', 'tie', 'rms', 'rope'))
  }
  config = parse(sparse)
  assert (config.num_kv_heads, config.tied_embeddings, config.norm_epsilon) == (32, False, 1e-6)
  assert config.rope == ROPE
  del sparse['hidden_act']
  assert parse(sparse, architectures=['Qwen3ForCausalLM']).head_size == 128


def test_the_last_layers_of_qwen_may_have_windows():
  config = parse(QWEN, use_sliding_window=True, max_window_layers=21)
  assert (config.layers, config.window) == ('f' * 21 + 's' * 7, 4096)
  assert parse(architecture.to_json(config, 4096)) == config


@pytest.mark.parametrize(
  ('scaling', 'expected'),
  [
    pytest.param(None, dataclasses.replace(ROPE, theta=5e5), id='none'),
    pytest.param(LLAMA3, LLAMA_ROPE, id='llama3'),
    pytest.param(
      {'type': 'linear', 'factor': 2.0},
      dataclasses.replace(ROPE, theta=5e5, scaling='linear', factor=2.0),
      id='linear',
    ),
  ],
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
  no_extension = architecture.Extension(rope_theta=0.0, max_position_embeddings=0)
  assert architecture.extended(values, no_extension) == values


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'architectures': ['PhiForCausalLM']}, "'PhiForCausalLM' is not .* LlamaForCausalLM"),
    ({'architectures': None}, "architecture 'None' is not supported"),
    ({'layer_types': ['chunked_attention'] * 28}, 'layer_types=.* is not supported: a layer must'),
    ({'layer_types': ['full_attention']}, 'layer_types=.* must be a list of num_hidden_layers=28'),
    ({'rope_scaling': {'type': 'longrope', 'factor': 4.0}}, "rope type 'longrope' is not .* yarn"),
    ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, "no 'original_max_position_embeddings'"),
    ({'use_bidirectional_attention': True}, 'use_bidirectional_attention=True is not supported'),
    (
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
      "no 'original_max_position_embeddings', which",
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not supported'),
    ({'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4} is not supported"),
    ({'hidden_act': 'mish'}, "hidden_act='mish' is not supported"),
    ({'hidden_size': None}, 'hidden_size=None, which determines .* must be a whole number above 0'),
    ({'hidden_size': 'wide'}, "hidden_size='wide', which determines .* must be a whole"),
    ({'mlp_bias': True}, 'mlp_bias=True is not supported'),
    (
      {'architectures': ['MistralForCausalLM'], 'attention_bias': True},
      'attention_bias=True is not supported',
    ),
  ],
)
def test_unsupported_fields_are_refused_by_name(changes, message):
  with pytest.raises(InputError, match=f'^config.json: (architecture )?{message}'):
    parse(QWEN, **changes)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'query_key_norm': True},
      'attention_bias=True, query_key_norm=True, and none of .* has all of it',
    ),
    (
      {'attention_bias': False, 'output_bias': True},
      'output_bias=True, and none of .* has all of it',
    ),
    (
      {'layers': 'fs', 'window': 8, 'local_rope': rotary.Config(theta=1e3)},
      "attention_bias=True, layers='fs', local_rope unlike rope, and none of .* has all of it",
    ),
    (
      {'attention_bias': False, 'num_heads': 10},
      r'config\.model\.num_heads=10 must divide width=1536 for an export: transformers refuses',
    ),
    ({'head_size': 64}, r'config\.model\.head_size=64 must be width / num_heads for an export'),
  ],
)
def test_to_json_refuses_shapes_without_a_hugging_face_architecture(changes, message):
  with pytest.raises(InputError, match=message):
    architecture.to_json(dataclasses.replace(parse(QWEN), **changes), 4096)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, r'config\.model\.path=.* holds no config\.json'),
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
