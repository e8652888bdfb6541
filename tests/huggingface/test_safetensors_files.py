"""Tests of safetensors files: incomplete, damaged and unexpected ones must be refused."""

import json

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import weights
from tests.huggingface.stored_checkpoints import INDEX, SHARDED, SINGLE, read_config, rewrite

FILE = 'model.safetensors'
SECOND, THIRD = (f'model-0000{n}-of-00003.safetensors' for n in (2, 3))


def update(file, tensor, change):
  """A function of a folder that sets a tensor of a file to `change` of all, or removes it."""

  def damage(folder):
    def apply(content):
      value = change(content)
      if value is None:
        del content[tensor]
      else:
        content[tensor] = value

    rewrite(folder / file, apply)

  return damage


def truncate(size):
  return lambda folder: (folder / THIRD).write_bytes((folder / THIRD).read_bytes()[:size])


def write_index(text):
  return lambda folder: (folder / INDEX).write_text(text)


def forget_in_the_index(folder):
  index = json.loads((folder / INDEX).read_text())
  del index['weight_map']['lm_head.weight'], index['weight_map']['model.norm.weight']
  (folder / INDEX).write_text(json.dumps(index))


def remove_from_its_file(folder):
  file = json.loads((folder / INDEX).read_text())['weight_map']['lm_head.weight']
  update(file, 'lm_head.weight', lambda _: None)(folder)


def extra(_):
  return np.zeros(2, np.float32)


DAMAGES = {
  'no_tensor': (
    SINGLE,
    update(FILE, 'model.norm.weight', lambda _: None),
    f'{FILE}: tensor model.norm.weight is missing; config.json requires it, with shape [56].',
  ),
  'not_in_the_index': (
    SHARDED,
    forget_in_the_index,
    f'{INDEX}: tensor model.norm.weight is missing; .* with shape [32] (and 1 more).',
  ),
  'not_in_its_file': (
    SHARDED,
    remove_from_its_file,
    '.safetensors: tensor lm_head.weight of shape [96, 32] is missing',
  ),
  'unexpected': (SINGLE, update(FILE, 'extra', extra), f'{FILE}: tensor extra is unexpected; '),
  'unexpected_in_one_file': (
    SHARDED,
    update(SECOND, 'extra', extra),
    f'{SECOND}: tensor extra is unexpected; ',
  ),
  'unembedding_of_a_tied_model': (
    'qwen2_tied',
    update(FILE, 'lm_head.weight', lambda content: content['model.embed_tokens.weight']),
    'tensor lm_head.weight is unexpected',
  ),
  'shape': (
    SINGLE,
    update(FILE, 'lm_head.weight', lambda content: content['lm_head.weight'].T.copy()),
    f'{FILE}: tensor lm_head.weight has shape [56, 96]; config.json requires [96, 56].',
  ),
  'quantised': (
    SINGLE,
    update(FILE, 'lm_head.weight', lambda content: content['lm_head.weight'].astype(np.int8)),
    'tensor lm_head.weight has dtype I8; it must be one of F32, BF16, F16',
  ),
  'empty': (SHARDED, truncate(0), f'{THIRD}: not a complete safetensors file, at 0 bytes ('),
  'cut': (SHARDED, truncate(100), f'{THIRD}: not a complete safetensors file, at 100 bytes ('),
  'cut_at_the_end': (SHARDED, truncate(-100), f'{THIRD}: not a complete safetensors file, at '),
  'no_file': (
    SHARDED,
    lambda folder: (folder / SECOND).unlink(),
    f'{INDEX}: lists {SECOND} as the file of model.',
  ),
  'index_no_json': (SHARDED, write_index('{'), f'{INDEX}: not an index of safetensors files'),
  'index_without_map': (SHARDED, write_index('{}'), f'{INDEX}: not an index of safetensors files'),
  'no_safetensors': (
    SINGLE,
    lambda folder: (folder / FILE).rename(folder / 'pytorch_model.bin'),
    f': holds neither {FILE} nor {INDEX}; weights must be safetensors',
  ),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_tensor(
  damage, copy_checkpoint, mesh
):
  name, apply, message = DAMAGES[damage]
  folder = copy_checkpoint(name)
  apply(folder)
  with pytest.raises(InputError) as raised:
    weights.load(folder, read_config(folder), mesh)
  assert str(raised.value).startswith(str(folder))
  for part in message.split('.*'):
    assert part in str(raised.value)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  update(FILE, 'model.layers.0.self_attn.rotary_emb.inv_freq', extra)(folder)
  weights.load(folder, read_config(folder), mesh)
