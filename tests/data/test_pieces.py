"""The text of each token: each character with the token that ends it, all of the text together."""

import json
import random
import re

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from exgrpo_jax.data import tokenizer

TEXTS = [
  '12+7+31\n',
  r'7+31=38 38+12=50 \boxed{50}',
  '  Zürich  hat   Züge\n\nund 日本語',
  'so 😀 it is, 日本',
] * 20
SPECIAL = ['<|endoftext|>', '<|im_start|>']
PARTS = ['  ', ' ', 'a', ' the', '\n', '日本', '😀', 'ü', '12', *SPECIAL, '\u2581', '\ufffd']


def trained(folder):
  """As a run trains one; neither adds nor removes spaces."""
  tokenizer.train(TEXTS, 330, folder / 'tokenizer.model')
  return tokenizer.load(folder / 'tokenizer.model')


def converted(folder):
  """The tokenizer.json of one that a run trained."""
  trained(folder).save(folder / 'saved')
  return tokenizer.load(folder / 'saved')


def with_dummy_prefix(folder, **options):
  """SentencePiece as Llama 2 has it: a space before each text, which decoding takes away."""
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS),
    model_prefix=str(folder / 'tokenizer'),
    model_type='bpe',
    vocab_size=320,
    hard_vocab_limit=False,
    byte_fallback=True,
    minloglevel=2,
    **options,
  )
  return tokenizer.load(folder / 'tokenizer.model')


def keeping_spaces(folder):
  return with_dummy_prefix(folder, remove_extra_whitespaces=False)


def of_json(folder, model):
  model.add_special_tokens(SPECIAL)
  model.save(str(folder / 'tokenizer.json'))
  return tokenizer.load(folder)


def byte_level(folder):
  """As Qwen and Llama 3 have it."""
  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  model.train_from_iterator(
    TEXTS,
    trainers.BpeTrainer(vocab_size=310, show_progress=False, initial_alphabet=alphabet),
  )
  # Not of the alphabet: DeepSeek has such ones.
  model.add_special_tokens(['<｜end▁of▁sentence｜>'])
  return of_json(folder, model)


def byte_fallback(folder):
  """The tokenizer.json of Llama 2, which takes one space from the start of a text."""
  words = ['▁', '▁a', '▁the', 'a', 'the', '▁▁', '\n', '日']
  names = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256)), *words]
  vocabulary = {name: index for index, name in enumerate(names)}
  model = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token='<unk>', byte_fallback=True))
  model.decoder = decoders.Sequence(
    [
      decoders.Replace('▁', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  return of_json(folder, model)


def metaspace(folder):
  model = tokenizers.Tokenizer(models.BPE(unk_token='<unk>'))
  model.pre_tokenizer = pre_tokenizers.Metaspace()
  model.decoder = decoders.Metaspace()
  model.train_from_iterator(
    TEXTS, trainers.BpeTrainer(vocab_size=90, show_progress=False, special_tokens=['<unk>'])
  )
  return of_json(folder, model)


@pytest.fixture(
  scope='module',
  params=[
    trained,
    converted,
    with_dummy_prefix,
    keeping_spaces,
    byte_level,
    byte_fallback,
    metaspace,
  ],
  ids=lambda make: make.__name__,
)
def opened(request, tmp_path_factory):
  return request.param(tmp_path_factory.mktemp('tokenizer'))


def random_ids(opened, rng):
  """Any ids; those of texts; and those of characters of two to four bytes, with others between."""
  anything = [rng.randrange(-1, opened.vocab_size + 2) for _ in range(rng.randint(0, 9))]
  text = ''.join(rng.choices(PARTS, k=rng.randint(0, 12)))
  characters = []
  for character in rng.choices(['é', 'ж', '€', '𝄞', '語', 'Z'], k=rng.randint(1, 4)):
    characters += opened.encode(character)
    characters += [rng.randrange(opened.vocab_size)] * rng.randint(0, 1)
  return anything, opened.encode(text), characters


def test_the_pieces_make_what_the_ids_decode_to(opened):
  rng, checked = random.Random(0), 0
  for _ in range(500):
    for ids in random_ids(opened, rng):
      text, found = opened.decode(ids, special=True), opened.pieces(ids)
      assert len(found) == len(ids)
      if '\ufffd' not in text:  # valid UTF-8
        checked += 1
        assert ''.join(found) == text, ids
  assert checked > 500


@pytest.mark.parametrize('make', [trained, converted, byte_level, byte_fallback])
def test_a_character_of_several_tokens_is_the_last_ones(make, tmp_path):
  opened = make(tmp_path)
  for character in 'ж€𝄞':
    ids = opened.encode(character)
    assert len(ids) == len(character.encode())
    assert opened.pieces(ids * 2) == ([''] * (len(ids) - 1) + [character]) * 2


def test_spaces_stay_with_their_tokens(tmp_path):
  opened = byte_fallback(tmp_path)
  vocabulary = json.loads((tmp_path / 'tokenizer.json').read_text())['model']['vocab']
  ids = [vocabulary[token] for token in ('▁a', '▁the', '▁', 'a', '▁▁', '▁the', '<0x20>', 'a')]
  assert opened.pieces(ids) == ['a', ' the', ' ', 'a', '  ', ' the', ' ', 'a']
  ids = [vocabulary[token] for token in ('▁', '▁the', '<0x20>', '▁a')]
  assert opened.pieces(ids) == ['', ' the', ' ', ' a']


def test_special_tokens_have_their_names_and_unknown_ids_nothing(tmp_path):
  opened = trained(tmp_path)
  one, end = opened.encode('1')[0], opened.eos_ids[0]
  ids = [one, end, -1, one, opened.vocab_size, 2, 2**40]
  assert opened.pieces(ids) == ['1', '</s>', '', '1', '', '<unk>', '']
  opened = byte_level(tmp_path)
  (one,), (start,) = opened.encode('1'), opened.encode('<|im_start|>')
  ids = [start, one, -1, opened.vocab_size, start, 2**40]
  assert opened.pieces(ids) == ['<|im_start|>', '1', '', '', '<|im_start|>', '']
  assert opened.pieces([]) == []


@pytest.mark.parametrize('make', [trained, converted, byte_level, byte_fallback])
def test_bytes_that_are_no_character_spoil_none_after_them(make, tmp_path):
  opened = make(tmp_path)
  (one,), note = opened.encode('1'), opened.encode('𝄞')
  assert ''.join(opened.pieces([one, note[-1], one])) == '1\ufffd1'
  assert opened.pieces([one, note[0], one, *note])[3:] == ['', '', '', '𝄞']
  together = ''.join(opened.pieces([one, *note[:2], *note, one]))
  assert re.sub('\ufffd+', '?', together) == '1?𝄞1'
  found = opened.pieces([one, *note, *note[:3]])  # cut at the limit of a response
  assert found[:5] == ['1', '', '', '', '𝄞'] and set(''.join(found[5:])) == {'\ufffd'}


@pytest.mark.parametrize('text', ['', ' ', 'a', '\ufffd'])
def test_the_time_is_linear_whatever_the_tokens(text):
  """No more than a few ids are decoded for each one, in all calls together."""
  decoded = []

  def decode(ids):
    decoded.append(len(ids))
    return text * len(ids)

  assert len(tokenizer.token_texts([1] * 1000, decode)) == 1000
  assert sum(decoded) < 20_000
