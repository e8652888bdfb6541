"""Tests of architecture: config.json to model.Config and back, and what is refused."""

import dataclasses
import json

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.policy import model
from tests.helpers.tiny import ROPE

# The published config.json of Qwen2.5-Math-1.5B and Llama-3.1-8B.
QWEN = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151643,
  'hidden_act': 'silu',
  'hidden_size': 1536,
  'initializer_range': 0.02,
  'intermediate_size': 8960,
  'max_position_embeddings': 4096,
  'max_window_layers': 21,
  'model_type': 'qwen2',
  'num_attention_heads': 12,
  'num_hidden_layers': 28,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 10000.0,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'use_cache': True,
  'use_mrope': False,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'intermediate_size': 14336,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': False,
  'vocab_size': 128256,
}
LLAMA_ROPE = dataclasses.replace(
  ROPE, theta=5e5, scaling='llama3', factor=8.0, original_positions=8192
)


def parse(values, **changes):
  return architecture.parse(values | changes, 'config.json', 'float32')


def test_config_of_qwen2_5_math():
  assert parse(QWEN) == model.Config(
    vocab_size=151936,
    width=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_size=128,
    mlp_width=8960,
    rope=ROPE,
    norm_epsilon=1e-6,
    attention_bias=True,
    query_key_norm=False,
    tied_embeddings=True,
    dtype='float32',
  )


def test_config_of_llama_3_1():
  assert parse(LLAMA) == model.Config(
    vocab_size=128256,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_width=14336,
    rope=LLAMA_ROPE,
    norm_epsilon=1e-5,
    attention_bias=False,
    query_key_norm=False,
    tied_embeddings=False,
    dtype='float32',
  )


def test_qwen3_has_query_key_norm_and_no_bias():
  config = parse(QWEN, architectures=['Qwen3ForCausalLM'], head_dim=64)
  assert (config.query_key_norm, config.attention_bias, config.head_size) == (True, False, 64)


def test_missing_fields_have_the_defaults_of_transformers():
  sparse = {
    name: value
    for name, value in LLAMA.items()
    if name
    not in (
      'num_key_value_heads',
      'tie_word_embeddings',
      'rms_norm_eps',
      'rope_theta',
      'rope_scaling',
    )
  }
  config = parse(sparse)
  assert (config.num_kv_heads, config.tied_embeddings, config.norm_epsilon) == (32, False, 1e-6)
  assert config.rope == ROPE


@pytest.mark.parametrize(
  ('scaling', 'expected'),
  [
    pytest.param(None, dataclasses.replace(ROPE, theta=5e5), id='none'),
    pytest.param(LLAMA['rope_scaling'], LLAMA_ROPE, id='llama3'),
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
    (
      {'architectures': ['MistralForCausalLM']},
      "architecture 'MistralForCausalLM' is not supported; supported are Qwen2ForCausalLM, "
      'Qwen3ForCausalLM, LlamaForCausalLM.',
    ),
    ({'architectures': None}, "architecture 'None' is not supported"),
    ({'use_sliding_window': True}, 'use_sliding_window=True is not supported: every layer must'),
    ({'layer_types': ['full_attention', 'sliding_attention']}, 'layer_types=.* is not supported'),
    (
      {'rope_scaling': {'type': 'yarn', 'factor': 4.0}},
      "rope type 'yarn' is not supported; supported are default, linear, llama3.",
    ),
    (
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
      "no 'low_freq_factor', which rope type 'llama3' needs.",
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not supported'),
    (
      {'quantization_config': {'quant_method': 'gptq'}},
      "quantization_config={'quant_method': 'gptq'} is not supported: weights must be float32",
    ),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported: the MLP's gate uses silu."),
    ({'hidden_size': None}, "no 'hidden_size', which determines the model's shape."),
  ],
)
def test_unsupported_fields_are_refused_by_name(changes, message):
  with pytest.raises(InputError, match=f'^config.json: {message}'):
    parse(QWEN, **changes)


@pytest.mark.parametrize('field', ['mlp_bias', 'attention_bias'])
def test_optional_biases_of_llama_are_refused(field):
  with pytest.raises(InputError, match=f'config.json: {field}=True is not supported'):
    parse(LLAMA, **{field: True})


@pytest.mark.parametrize(
  'values',
  [
    QWEN,
    LLAMA,
    QWEN | {'architectures': ['Qwen3ForCausalLM'], 'head_dim': 64},
    LLAMA | {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}},
  ],
  ids=['qwen2', 'llama3', 'qwen3', 'linear'],
)
def test_parse_inverts_to_json(values):
  config = parse(values)
  written = json.loads(json.dumps(architecture.to_json(config, 4096)))
  assert parse(written) == config
  assert written['architectures'] == values['architectures']


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'query_key_norm': True},
      r'config\.model\.attention_bias and config\.model\.query_key_norm are both True, and no '
      'Hugging Face architecture has both',
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
    (None, r'config\.model\.path=.* holds no config\.json; it must be a Hugging Face checkpoint'),
    ('{', r'config\.json: not valid JSON'),
    ('[]', r'config\.json: not a JSON object'),
  ],
)
def test_an_unreadable_config_json_is_refused(tmp_path, content, message):
  if content:
    (tmp_path / 'config.json').write_text(content)
  with pytest.raises(InputError, match=message):
    architecture.read_json(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
  with pytest.raises(InputError, match='absent is not a folder; it must be'):
    architecture.read_json(tmp_path / 'absent')
