"""What the environment says is appended as tokens, as the chat template has it."""

import numpy as np
import pytest

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message
from tests.helpers.paths import CHECKPOINTS

SAID, MORE = 'Two.', Message('user', 'Zürich, \U0001f600?')


@pytest.mark.parametrize('is_cut', [False, True])
@pytest.mark.parametrize('template', ['plain', 'chat'])
def test_an_observation_is_appended_as_tokens(template, is_cut):
  """The turn stays as it was written; where it was cut, its end token comes first."""
  loaded, config = tokenizer.load(CHECKPOINTS / 'qwen2_tied'), prompt.Config(template)
  (end,) = loaded.encode('<|im_end|>')
  assert end == loaded.eos_ids[0]
  turn = np.array(loaded.encode(SAID) + [end] * (not is_cut), np.int32)
  text = loaded.decode(
    tokenizer.observed_tokens(loaded, config, turn, [MORE._asdict()]), special=True
  )
  after = {
    'plain': f'{MORE.content}\n',
    'chat': f'\n<|im_start|>user\n{MORE.content}<|im_end|>\n<|im_start|>assistant\n',
  }[template]
  assert text == '<|im_end|>' * is_cut + after
