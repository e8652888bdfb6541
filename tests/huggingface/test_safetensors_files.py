"""Tests of safetensors files: incomplete, damaged and unexpected ones must be refused."""

import json

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import weights
from tests.huggingface.stored_checkpoints import INDEX, SHARDED, SINGLE, read_config, rewrite


def error_of_load(folder, mesh):
  with pytest.raises(InputError) as raised:
    weights.load(folder, read_config(folder), mesh)
  return str(raised.value)


def test_a_missing_tensor_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  rewrite(folder / 'model.safetensors', lambda content: content.pop('model.norm.weight'))
  assert error_of_load(folder, mesh) == (
    f'{folder}/model.safetensors: tensor model.norm.weight is missing; config.json requires it, '
    'with shape [56].'
  )


def test_a_tensor_missing_from_the_index_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SHARDED)
  index = json.loads((folder / INDEX).read_text())
  del index['weight_map']['lm_head.weight'], index['weight_map']['model.norm.weight']
  (folder / INDEX).write_text(json.dumps(index))
  assert error_of_load(folder, mesh) == (
    f'{folder}/{INDEX}: tensor model.norm.weight is missing; config.json requires it, with shape '
    '[32] (and 1 more).'
  )


def test_a_tensor_missing_from_the_file_in_the_index_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SHARDED)
  file = json.loads((folder / INDEX).read_text())['weight_map']['lm_head.weight']
  rewrite(folder / file, lambda content: content.pop('lm_head.weight'))
  assert error_of_load(folder, mesh) == (
    f'{folder}/{file}: tensor lm_head.weight of shape [96, 32] is missing; according to the index '
    'it is in this file.'
  )


@pytest.mark.parametrize(
  ('name', 'file'), [(SINGLE, 'model.safetensors'), (SHARDED, 'model-00002-of-00003.safetensors')]
)
def test_an_unexpected_tensor_is_refused(copy_checkpoint, mesh, name, file):
  folder = copy_checkpoint(name)
  rewrite(folder / file, lambda content: content.update(extra=np.zeros(2, np.float32)))
  assert f'{folder}/{file}: tensor extra is unexpected; ' in error_of_load(folder, mesh)


def test_an_unembedding_in_a_tied_model_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint('qwen2_tied')
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['model.embed_tokens.weight']}),
  )
  assert 'tensor lm_head.weight is unexpected' in error_of_load(folder, mesh)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update(
      {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(4, np.float32)}
    ),
  )
  weights.load(folder, read_config(folder), mesh)


def test_a_tensor_of_the_wrong_shape_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['lm_head.weight'].T.copy()}),
  )
  assert error_of_load(folder, mesh) == (
    f'{folder}/model.safetensors: tensor lm_head.weight has shape [56, 96]; config.json requires '
    '[96, 56].'
  )


def test_quantised_weights_are_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['lm_head.weight'].astype(np.int8)}),
  )
  assert 'tensor lm_head.weight has dtype I8; it must be one of F32, BF16, F16' in error_of_load(
    folder, mesh
  )


@pytest.mark.parametrize('size', [0, 100, -100])
def test_a_truncated_file_is_refused(copy_checkpoint, mesh, size):
  folder = copy_checkpoint(SHARDED)
  file = folder / 'model-00003-of-00003.safetensors'
  file.write_bytes(file.read_bytes()[:size])
  expected = f'{file}: not a complete safetensors file, at {file.stat().st_size} bytes ('
  assert error_of_load(folder, mesh).startswith(expected)


def test_an_index_that_lists_a_missing_file_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SHARDED)
  (folder / 'model-00002-of-00003.safetensors').unlink()
  message = error_of_load(folder, mesh)
  assert message.startswith(
    f'{folder}/{INDEX}: lists model-00002-of-00003.safetensors as the file of model.'
  )
  assert message.endswith(', and there is no such file; download the checkpoint again.')


@pytest.mark.parametrize('content', ['{', '{}', '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(copy_checkpoint, mesh, content):
  folder = copy_checkpoint(SHARDED)
  (folder / INDEX).write_text(content)
  assert f'{folder}/{INDEX}: not an index of safetensors files' in error_of_load(folder, mesh)


def test_a_folder_without_safetensors_is_refused(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
  assert error_of_load(folder, mesh) == (
    f'{folder}: holds neither model.safetensors nor {INDEX}; weights must be safetensors, because '
    'other formats can execute code when they are loaded.'
  )
