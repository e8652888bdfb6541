"""Tests that a tokenizer.json gives the same ids as its SentencePiece model or GGUF."""

import json
import pathlib
import random

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

from exgrpo_jax.data import prompt, tokenizer, tokenizer_json
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from tests.data import sentencepiece_models

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
  """The folder of a saved tokenizer."""
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
  """Return random texts made of pieces, unusual texts and arbitrary characters."""
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
  assert (original.eos_ids, original.pad_id) == ((1,), 0)
  assert converted.chat.template is None and converted.chat.begin == ''
  every = [*range(-2, original.vocab_size + 2), 2**40]
  special = [i for i in every if not original.decode([i])]
  assert [i for i in every if not converted.decode([i])] == special


def test_invalid_utf8_makes_valid_neighbors_undecodable(original, converted):
  """The only difference: a tokenizer.json decodes adjacent bytes all together or not at all."""
  a, bad = original.encode('\U0001f600')[0], original.encode('\xff')[1]
  valid = original.encode('\U0001f600')
  assert converted.decode(valid) == original.decode(valid) == '\U0001f600'
  assert converted.decode([a]) == original.decode([a]) == '\ufffd'
  assert original.decode([*valid, bad]) == '\U0001f600\ufffd'
  assert converted.decode([*valid, bad]) == '\ufffd' * 5


@pytest.mark.parametrize(
  'changes',
  [
    {'add_dummy_prefix': True},
    {'remove_extra_whitespaces': True},
    {'normalization_rule_name': 'nmt_nfkc'},
    {'model_type': 'unigram'},
    {'byte_fallback': False},
    {'user_defined_symbols': ['<tag>']},
  ],
  ids=str,
)
def test_a_model_whose_ids_would_differ_is_not_converted(tmp_path, changes):
  settings = dict(
    normalization_rule_name='identity', remove_extra_whitespaces=False, add_dummy_prefix=False
  )
  plain, changed = (
    sentencepiece_models.train(TEXTS, tmp_path / name, **settings | options)
    for name, options in (('plain', {}), ('changed', changes))
  )
  assert tokenizer_json.of_sentencepiece(pathlib.Path(plain).read_bytes())
  tokenizer.load(changed).save(tmp_path / 'saved')
  assert [path.name for path in (tmp_path / 'saved').iterdir()] == ['tokenizer.model']


def test_a_converted_tokenizer_is_exported_with_all_its_files(folder, converted, tmp_path):
  converted.save(tmp_path)
  written = {path.name: path.read_bytes() for path in folder.iterdir()}
  del written['tokenizer.model']  # only the tokenizer.json was read
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_special_tokens_in_a_text_are_text(folder, converted):
  """Without split_special_tokens, as in most checkpoints, they are parsed."""
  assert len(converted.encode('</s>')) > 1
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  assert config.pop('split_special_tokens')
  files = converted.files | {'tokenizer_config.json': json.dumps(config).encode()}
  assert tokenizer.JsonTokenizer(files, str(folder)).encode('</s>') == [1]


# ---- GGUF ----

SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']


def byte_level(pre='smollm', merges=('a b',), words=(), **changes):
  """Return metadata of a byte-level BPE: special tokens, <think>, bytes, merged tokens, [PAD]."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = [*SPECIAL, '<think>', *alphabet, *(m.replace(' ', '') for m in merges), *words, '[PAD9]']
  types = [3, 3, 3, 4, *[1] * (len(tokens) - 5), 5]
  own = dict(
    model='gpt2', pre=pre, tokens=tokens, token_type=types, merges=list(merges),
    bos_token_id=1, eos_token_id=2, padding_token_id=0,
  )  # fmt: skip
  return as_metadata(own | changes)


def as_metadata(own):
  return {f'tokenizer.ggml.{key}': value for key, value in own.items() if value is not None}


def loaded(folder, metadata):
  """Write the tokenizer's files and load them."""
  for name, content in tokenizer_json.of_gguf(metadata, 'model.gguf').items():
    (folder / name).write_bytes(content)
  return tokenizer.load(folder)


NUMBER = ['1 2', '12 3', '123 4', 'Ġ 1']
SPACES = ['Ġ Ġ', 'ĠĠ ĠĠ', 'Ċ Ċ', '! Ċ']


@pytest.mark.parametrize(
  ('pre', 'merges', 'text', 'pieces'),
  [
    ('smollm', NUMBER, 'a 1234', ['a', ' ', '1', '2', '3', '4']),
    ('gpt-2', NUMBER, 'a 1234', ['a', ' ', '1234']),
    ('llama-bpe', NUMBER, 'a 1234', ['a', ' ', '123', '4']),
    ('qwen2', NUMBER, 'a 1234', ['a', ' ', '1', '2', '3', '4']),
    # The digit is split off first, so the spaces before it end a text and stay together.
    ('smollm', SPACES, 'a  3', ['a', '  ', '3']),
    ('gpt-2', SPACES, 'a  3', ['a', ' ', ' ', '3']),
    ('smollm', SPACES, 'a!\n\nb', ['a', '!', '\n', '\n', 'b']),
    ('llama-bpe', SPACES, 'a!\n\nb', ['a', '!', '\n\n', 'b']),
    ('qwen2', SPACES, 'a!\n\nb', ['a', '!', '\n\n', 'b']),
  ],
)
def test_text_is_split_as_by_the_models_own_tokenizer(tmp_path, pre, merges, text, pieces):
  found = loaded(tmp_path, byte_level(pre, merges))
  assert found.pieces(found.encode(text)) == pieces


def test_only_qwen_tokenizers_normalize_to_nfc(tmp_path):
  decomposed, composed = 'e\u0301', '\u00e9'
  qwen2 = loaded(tmp_path, byte_level('qwen2'))
  assert qwen2.encode(decomposed) == qwen2.encode(composed)
  smollm = loaded(tmp_path, byte_level('smollm'))
  assert smollm.decode(smollm.encode(decomposed)) == decomposed


@pytest.mark.parametrize(('pre', 'count'), [('llama-bpe', 1), ('gpt-2', 3)])
def test_llama_3_does_not_split_words_in_its_vocabulary(tmp_path, pre, count):
  found = loaded(tmp_path, byte_level(pre, words=['xyz']))
  assert len(found.encode('xyz')) == count


def test_special_tokens_are_parsed_and_hidden_from_graders(tmp_path):
  found = loaded(tmp_path, byte_level('smollm'))
  ids = found.encode('<|im_start|>a<think><|im_end|>')
  assert (ids[0], ids[2:], len(ids)) == (1, [3, 2], 4)
  assert found.decode(ids) == 'a<think>'
  assert found.vocab_size == 4 + 256 + 1  # with 'ab', without the embedding's padding


@pytest.mark.parametrize(
  ('changes', 'ends'),
  [
    ({}, (2, 0)),
    ({'eos_token_id': 0}, (0, 2)),
    ({'eot_token_id': 3}, (2, 3, 0)),
    ({'eos_token_id': None}, (0, 2)),
    # A name alone does not make an end token; it must be a control token.
    ({'token_type': [1] * 3 + [4] + [1] * 257 + [5]}, (2,)),
  ],
)
def test_end_of_turn_tokens_end_a_response(tmp_path, changes, ends):
  assert loaded(tmp_path, byte_level(**changes)).eos_ids == ends


@pytest.mark.parametrize(
  ('pre', 'changes', 'begin'),
  [
    ('llama-bpe', {}, '<|im_start|>'),
    ('llama-bpe', {'add_bos_token': False}, ''),
    ('smollm', {}, ''),
    ('smollm', {'add_bos_token': True}, '<|im_start|>'),
  ],
)
def test_the_file_or_its_pre_tokenizer_decides_about_the_begin_token(tmp_path, pre, changes, begin):
  found = loaded(tmp_path, byte_level(pre, **changes))
  assert found.chat.begin == begin and found.encode('') == []


def test_the_chat_template_comes_from_the_file(tmp_path):
  metadata = byte_level('smollm')
  metadata['tokenizer.chat_template'] = '{{ bos_token }}{{ messages[0].content }}{{ eos_token }}'
  found = loaded(tmp_path, metadata)
  asked = found.render([Message('user', 'Hi')], prompt.PromptConfig(template='chat'))
  assert asked == '<|im_start|>Hi<|im_end|>'


# ---- GGUF of SentencePiece ----


@pytest.fixture(scope='module', params=[True, False], ids=['prefix', 'plain'])
def trained(request, tmp_path_factory):
  """(a SentencePiece model like Llama 2's, its metadata as written by convert_hf_to_gguf.py)."""
  path = sentencepiece_models.train(
    TEXTS,
    tmp_path_factory.mktemp('sentencepiece') / 'trained',
    vocab_size=330, character_coverage=1.0, split_digits=True, allow_whitespace_only_pieces=True,
    normalization_rule_name='identity', remove_extra_whitespaces=False,
    add_dummy_prefix=request.param, user_defined_symbols=['<tool>'],
  )  # fmt: skip
  pieces = sentencepiece_model_pb2.ModelProto.FromString(pathlib.Path(path).read_bytes()).pieces
  own = dict(
    model='llama', pre='default', tokens=[piece.piece for piece in pieces],
    scores=[piece.score for piece in pieces], token_type=[piece.type for piece in pieces],
    bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_space_prefix=request.param,
  )  # fmt: skip
  return sentencepiece.SentencePieceProcessor(model_file=path), as_metadata(own)


def test_ids_and_text_are_the_same_as_sentencepieces(tmp_path, trained):
  original, metadata = trained
  found = loaded(tmp_path, metadata)
  assert found.eos_ids == (2,) and found.chat.begin == '<s>'
  rng = random.Random(0)
  parts = [original.id_to_piece(i).replace('\u2581', ' ') for i in range(260, 330)] + [
    part for part in ODD if '\u2581' not in part and '<' not in part
  ]
  for _ in range(500):
    text = ''.join(rng.choice(parts) for _ in range(rng.randint(1, 20)))
    assert found.encode(text) == original.encode(text), text
    assert found.decode(found.encode(text)) == text


def test_control_and_user_defined_tokens_are_parsed(tmp_path, trained):
  found = loaded(tmp_path, trained[1])
  ids = found.encode('a<tool></s>')
  assert ids[-1] == 2 and trained[1]['tokenizer.ggml.tokens'].index('<tool>') == ids[-2]


# ---- Unsupported GGUF tokenizers ----


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model': None}, r'no tokenizer\. .* whose tokenizer\.ggml\.model is one of gpt2, llama\.'),
    ({'model': 'bert'}, r"tokenizer\.ggml\.model='bert'\. .*model is one of gpt2, llama\."),
    ({'tokens': None}, r'no tokenizer\.ggml\.tokens\. Without it, text would be tok'),
    ({'pre': None}, r'no tokenizer\.ggml\.pre\. Without it, text would be tok'),
    (
      {'pre': 'tekken'},
      r"tokenizer\.ggml\.pre='tekken' is not supported. Use a model with one of these .*: gpt-2, ",
    ),
    ({'merges': ['qq']}, r'the tokenizer is inconsistent \(.*\)\. Convert the model again'),
    ({'token_type': [1]}, r'the tokenizer is inconsistent \(ValueError: zip'),
    ({'eos_token_id': 10**6}, r'the tokenizer is inconsistent \(IndexError'),
    (
      {'eos_token_id': None, 'token_type': [1] * 262},
      r'no tokenizer\.ggml\.eos_token_id, so responses would never end\.',
    ),
  ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused(changes, message):
  metadata = byte_level(**changes)
  with pytest.raises(InputError, match=f'^model.gguf: {message}') as caught:
    tokenizer_json.of_gguf(metadata, 'model.gguf')
  assert '\n' not in str(caught.value)


def test_files_are_json():
  files = tokenizer_json.of_gguf(byte_level('smollm'), 'model.gguf')
  assert json.loads(files['generation_config.json']) == {
    'bos_token_id': 1,
    'eos_token_id': [2, 0],
    'pad_token_id': 0,
  }
