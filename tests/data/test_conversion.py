"""A tokenizer.json has the ids and the text of the SentencePiece model it was made from."""

import json
import random

import pytest
import sentencepiece

from exgrpo_jax.data import conversion, tokenizer

TEXTS = [
  '12+7+31\n',
  r'7+31=38 38+12=50 \boxed{50}',
  'abab ababab (aa) aaaa',
  'Zürich  hat   Züge\n\nund 日本語',
] * 20
ODD = [
  *(' ', '  ', '     ', '\n', '\n\n', '\r\n', '\t', '0', '12345', 'aaaaa', 'ababab'),
  *('\u2581', ' \u2581 ', '</s>', '<pad>', '<unk>', '<0x0A>', '<0x41>', " 's", ' .', ' ,'),
  *('e\u0301', '\U0001f600', '\x00', '\xa0', '\u3000', '\ufffd', '\ufeff', '\uff21', '\ufb01'),
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """What saving a trained tokenizer writes."""
  path = tmp_path_factory.mktemp('conversion')
  tokenizer.train(TEXTS, 330, path / 'trained.model')
  tokenizer.load(path / 'trained.model').save(path / 'saved')
  return path / 'saved'


@pytest.fixture(scope='module')
def original(folder):
  return tokenizer.load(folder / 'tokenizer.model')


@pytest.fixture(scope='module')
def converted(folder):
  return tokenizer.load(folder)


def random_texts(original, count):
  """Texts of pieces, of odd ones and of any characters."""
  rng = random.Random(0)
  pieces = [original.decode([i]) for i in range(original.vocab_size)]

  def part():
    anything = chr(rng.choice([rng.randint(0, 0x2FFF), rng.randint(0xE000, 0x10FFFF)]))
    return rng.choice([rng.choice(pieces), rng.choice(ODD), rng.choice(TEXTS)[:9], anything])

  return [''.join(part() for _ in range(rng.randint(0, 20))) for _ in range(count)]


def test_ids_and_text_are_the_same(original, converted):
  assert isinstance(original, tokenizer.SentencePieceTokenizer)
  assert isinstance(converted, tokenizer.JsonTokenizer)
  for text in random_texts(original, 500):
    ids = original.encode(text)
    assert converted.encode(text) == ids, text
    assert converted.decode(ids) == original.decode(ids) == text


def test_end_padding_size_and_prompts_are_the_same(original, converted):
  for name in ('eos_ids', 'pad_id', 'vocab_size'):
    assert getattr(converted, name) == getattr(original, name)
  assert converted.chat.template is None and converted.chat.begin == ''
  every = [*range(-2, original.vocab_size + 2)]
  special = [i for i in every if not original.decode([i])]
  assert [i for i in every if not converted.decode([i])] == special


def test_of_bytes_that_are_not_utf8_the_valid_neighbours_are_lost_too(original, converted):
  """The one difference: a tokenizer.json decodes neighbouring bytes as a whole or not at all."""
  a, bad = original.encode('\U0001f600')[0], original.encode('\xff')[1]
  valid = original.encode('\U0001f600')
  assert converted.decode(valid) == original.decode(valid) == '\U0001f600'
  assert converted.decode([a]) == original.decode([a]) == '\ufffd'
  assert original.decode([*valid, bad]) == '\U0001f600\ufffd'
  assert converted.decode([*valid, bad]) == '\ufffd' * 5


@pytest.mark.parametrize(
  'changes',
  [
    pytest.param({'add_dummy_prefix': True}, id='dummy_prefix'),
    pytest.param({'remove_extra_whitespaces': True}, id='fewer_spaces'),
    pytest.param({'normalization_rule_name': 'nmt_nfkc'}, id='normalised'),
    pytest.param({'model_type': 'unigram'}, id='unigram'),
    pytest.param({'byte_fallback': False}, id='no_bytes'),
    pytest.param({'user_defined_symbols': ['<tag>']}, id='long_symbol'),
  ],
)
def test_a_model_whose_ids_would_differ_is_saved_as_it_is(tmp_path, changes):
  settings = {
    'model_type': 'bpe',
    'byte_fallback': True,
    'normalization_rule_name': 'identity',
    'remove_extra_whitespaces': False,
    'add_dummy_prefix': False,
  }
  for name, changed in (('plain', {}), ('changed', changes)):
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(TEXTS),
      model_prefix=str(tmp_path / name),
      vocab_size=310,
      hard_vocab_limit=False,
      minloglevel=2,
      **(settings | changed),
    )
  assert conversion.hugging_face_files((tmp_path / 'plain.model').read_bytes())
  tokenizer.load(tmp_path / 'changed.model').save(tmp_path / 'saved')
  assert [path.name for path in (tmp_path / 'saved').iterdir()] == ['tokenizer.model']


def test_what_was_converted_is_exported_again_with_all_its_files(folder, converted, tmp_path):
  converted.save(tmp_path)
  written = {path.name: path.read_bytes() for path in folder.iterdir()}
  del written['tokenizer.model']  # the tokenizer.json is what was read
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_special_tokens_in_a_text_are_text(folder, converted):
  """Unless tokenizer_config.json lets them be read, as most checkpoints do."""
  assert len(converted.encode('</s>')) > 1
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  assert config.pop('split_special_tokens')
  files = converted.files | {'tokenizer_config.json': json.dumps(config).encode()}
  assert tokenizer.JsonTokenizer(files, str(folder)).encode('</s>') == [1]
