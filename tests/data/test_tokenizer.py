"""Tests of tokenizers: lossless round trips, training, end tokens, token texts, observations."""

import json
import random
import re
import shutil

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from tests.data import sentencepiece_models
from tests.helpers.paths import CHECKPOINTS

TEXTS = ['12+7+31\n', r'7+31=38 38+12=50 \boxed{50}', '3+4\n', r'3+4=7 \boxed{7}'] * 20


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  path = tmp_path_factory.mktemp('trained') / 'tokenizer.model'
  tokenizer.train(TEXTS, 300, path)
  return tokenizer.load(path)


def byte_level_model(texts, **options):
  """Train a byte-level BPE tokenizer, as in Qwen and Llama 3."""
  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **options)
  model.train_from_iterator(texts, trainer)
  return model


@pytest.fixture
def checkpoint(tmp_path):
  """A function that writes a small tokenizer.json and `companions` to a folder."""

  def write(special_tokens, **companions):
    model = byte_level_model(TEXTS, vocab_size=300, special_tokens=special_tokens)
    model.save(str(tmp_path / 'tokenizer.json'))
    for name, content in companions.items():
      (tmp_path / f'{name}.json').write_text(json.dumps(content))
    return tmp_path

  return write


ANY_TEXTS = (
  '12+7+31\n',
  r'7+31=38 38+12=50 \boxed{50}',
  '',
  '\n\nfirst\n \nsecond\n',
  '  two  spaces  ',
  r'$\frac{1}{2} \leq x^{10}$',
  'Zürich, 日本, e\u0301, \U0001f600',  # not normalized
  'tab\tand\r\nreturn\xa0\u3000',
  'a\u2581b',  # SentencePiece's symbol for a space
  ' \u2581',
  '</s><pad><unk><0x0A>',
  'x' * 999,
)


@pytest.mark.parametrize('kind', ['trained', 'byte_level'])
def test_encoding_is_lossless_for_single_texts_and_batches(trained, checkpoint, kind):
  loaded = trained if kind == 'trained' else tokenizer.load(checkpoint(['<|endoftext|>']))
  for text in ANY_TEXTS:
    assert loaded.decode(loaded.encode(text)) == text
  assert loaded.encode_all(ANY_TEXTS) == [loaded.encode(text) for text in ANY_TEXTS]


def test_training_is_deterministic(tmp_path):
  tokenizer.train(TEXTS, 300, tmp_path / 'first.model')
  tokenizer.train(iter(TEXTS), 300, tmp_path / 'another' / 'second.model')
  first, second = tmp_path / 'first.model', tmp_path / 'another' / 'second.model'
  assert first.read_bytes() == second.read_bytes()
  assert sorted(path.name for path in tmp_path.iterdir()) == ['another', 'first.model']


def test_digits_stay_separate_and_frequent_text_of_any_length_is_merged(trained, tmp_path):
  assert len(trained.encode('1234')) == 4
  assert len(trained.encode(r'\boxed{')) < len(r'\boxed{')
  tokenizer.train(['qz' * 5000], 50_000, tmp_path / 'long.model')  # SentencePiece would skip it
  long = tokenizer.load(tmp_path / 'long.model')
  assert len(long.encode('qz')) == 1 and long.vocab_size < 400  # 50,000 is only a maximum


def test_a_newline_is_never_merged_with_its_neighbors(tmp_path):
  tokenizer.train(['}.\n\n(\n'] * 20, 300, tmp_path / 'lines.model')
  trained = tokenizer.load(tmp_path / 'lines.model')
  (newline,) = trained.encode('\n')
  expected = [*trained.encode('}.'), newline, newline, *trained.encode('(')]
  assert trained.encode('}.\n\n(') == expected


def test_the_smallest_possible_vocabulary_works_and_a_smaller_one_is_refused(tmp_path):
  least = 4 + 256 + len('ab+')  # reserved, bytes, characters
  tokenizer.train(['ab+', 'ba\n'], least, tmp_path / 'least.model')
  assert tokenizer.load(tmp_path / 'least.model').vocab_size == least
  with pytest.raises(InputError, match=r'config\.tokenizer\.vocab_size=262 must be at least 263'):
    tokenizer.train(['ab+', 'ba\n'], least - 1, tmp_path / 'less.model')
  assert not (tmp_path / 'less.model').exists()


def test_training_without_text_is_refused(tmp_path):
  with pytest.raises(InputError, match='has no text'):
    tokenizer.train(['', '\n'], 300, tmp_path / 'none.model')


@pytest.mark.parametrize(
  ('companions', 'eos_ids'),
  [
    (dict(), (1, 0)),
    (dict(tokenizer_config={'eos_token': '<|endoftext|>'}), (1,)),
    (dict(tokenizer_config={'eos_token': {'content': '<end>'}}), (2,)),
    (dict(generation_config={'eos_token_id': 2}), (2,)),
    (dict(tokenizer_config={'added_tokens_decoder': None}), (1, 0)),
    (
      dict(
        tokenizer_config={'eos_token': '<|im_end|>'}, generation_config={'eos_token_id': [1, 0]}
      ),
      (0, 1),
    ),
    (
      dict(tokenizer_config={'eos_token': '<|im_end|>'}, special_tokens_map={'eos_token': '<end>'}),
      (2,),
    ),
    (
      dict(
        tokenizer_config={'eos_token': '<|im_end|>', 'added_tokens_decoder': {}},
        special_tokens_map={'eos_token': '<end>'},
      ),
      (0,),
    ),
  ],
  ids=[
    *('known_names', 'eos_token', 'an_object', 'generation_config', 'no_added_tokens'),
    *('eos_token_comes_first', 'special_tokens_map', 'special_tokens_map_is_older'),
  ],
)
def test_eos_ids_of_a_tokenizer_json(checkpoint, companions, eos_ids):
  loaded = tokenizer.load(checkpoint(['<|im_end|>', '<|endoftext|>', '<end>'], **companions))
  assert loaded.eos_ids == eos_ids and loaded.pad_id == eos_ids[0]  # no padding token


def test_tokens_that_only_the_config_lists_are_added(checkpoint):
  def write(id_):
    listed = {id_: {'content': '<late>', 'special': True, 'normalized': False, '__type': 'x'}}
    listed |= {'0': {'content': '<end>', 'special': True}}
    return checkpoint(
      ['<end>'], tokenizer_config={'eos_token': '<late>'} | {'added_tokens_decoder': listed}
    )

  end = {'eos_token': '<end>'}
  size = tokenizer.load(checkpoint(['<end>'], tokenizer_config=end)).vocab_size
  loaded = tokenizer.load(write(str(size)))
  assert loaded.vocab_size == size + 1 and loaded.eos_ids == (size,)
  assert loaded.encode('<late><end>') == [size, 0] and loaded.decode([size]) == ''
  with pytest.raises(
    InputError, match=rf"lists '<late>' as token {size + 1}, but .* as token {size}"
  ):
    tokenizer.load(write(str(size + 1)))


def test_a_padding_token_may_be_in_the_older_file(checkpoint):
  older = {'pad_token': {'content': '<pad>'}, 'eos_token': '<end>'}
  assert tokenizer.load(checkpoint(['<end>', '<pad>'], special_tokens_map=older)).pad_id == 1


@pytest.mark.parametrize('name', ['tokenizer_config.json', 'added_tokens.json'])
def test_a_folder_with_settings_that_a_sentencepiece_model_lacks_is_refused(tmp_path, name):
  tokenizer.train(TEXTS, 300, tmp_path / 'tokenizer.model')
  (tmp_path / 'generation_config.json').write_text('{}')  # exports contain this file
  assert tokenizer.load(tmp_path).eos_ids == (1,)
  (tmp_path / name).write_text('{}')
  with pytest.raises(
    InputError, match=rf'{name} is only used with a tokenizer\.json, .*Create one'
  ):
    tokenizer.load(tmp_path)
  assert tokenizer.load(tmp_path / 'tokenizer.model').eos_ids == (1,)


@pytest.mark.parametrize(
  ('companions', 'message'),
  [
    (dict(generation_config=[1]), r'generation_config\.json is not a JSON object \('),
    (dict(tokenizer_config='x'), r'tokenizer_config\.json is not a JSON object \('),
    *(
      (dict(generation_config={'eos_token_id': bad}), 'eos_token_id=') for bad in ('1', -1, [True])
    ),
    *(
      (dict(tokenizer_config={'added_tokens_decoder': bad}), 'added_tokens_decoder=.* must map tok')
      for bad in (
        *([], {'9': '<late>'}, {'9': {'special': True}}, {'x': {'content': '<late>'}}),
        *({'9': {'content': 9}}, {'9': {'content': '<late>', 'special': 'yes'}}),
      )
    ),
  ],
)
def test_settings_that_cannot_be_read_are_refused(checkpoint, companions, message):
  with pytest.raises(InputError, match=message):
    tokenizer.load(checkpoint(['<|im_end|>'], **companions))


def test_a_tokenizer_json_without_an_eos_token_is_refused(checkpoint):
  with pytest.raises(InputError, match=r'no end-of-sequence token\. Set eos_token'):
    tokenizer.load(checkpoint(['<other>']))


TAGGED = '<think>12</think><tool_call>+</tool_call>\n<answer>7</answer>'


@pytest.mark.parametrize('are_special', [False, True])
def test_tags_stay_in_the_text_even_if_they_are_special_tokens(checkpoint, are_special):
  tags = re.findall('<.*?>', TAGGED)
  folder = checkpoint(['<|endoftext|>'])
  model = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  (model.add_special_tokens if are_special else model.add_tokens)(tags)
  model.save(str(folder / 'tokenizer.json'))
  loaded = tokenizer.load(folder)
  ids = loaded.encode(f'{TAGGED}<|endoftext|>')
  assert {model.token_to_id(tag) for tag in tags} < set(ids)
  assert loaded.decode(ids) == TAGGED


def test_tags_that_are_control_pieces_stay_in_the_text(tmp_path):
  symbols = ['<other>', *re.findall('<.*?>', TAGGED)]
  path = sentencepiece_models.train(
    TEXTS, tmp_path / 'tags', add_dummy_prefix=False, control_symbols=symbols
  )
  loaded, model = tokenizer.load(path), sentencepiece.SentencePieceProcessor(model_file=path)
  ids = [model.piece_to_id(piece) for piece in ('<other>', '<think>', '</think>', '</s>')]
  assert loaded.decode([*loaded.encode('7+'), *ids, *loaded.encode('1')]) == '7+<think></think>1'


def test_begin_tokens_padding_and_truncation_in_the_file_are_disabled(checkpoint):
  folder = checkpoint(['<|endoftext|>', '<pad>'], tokenizer_config={'pad_token': '<pad>'})
  model = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  model.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
  )
  model.enable_padding(length=9)
  model.enable_truncation(2)
  model.save(str(folder / 'tokenizer.json'))
  loaded = tokenizer.load(folder)
  assert loaded.encode('12+7') and 0 not in loaded.encode('12+7') and loaded.pad_id == 1
  assert loaded.decode(loaded.encode('12+7')) == '12+7'


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('absent', None, r'no tokenizer found\. This must be a tokenizer\.json, '),
    ('.', None, 'no tokenizer found'),
    ('x.txt', b'text', r'must be a tokenizer\.json'),
    ('x.model', b'junk', 'not a SentencePiece model'),
    ('x.model', b'', 'not a SentencePiece model'),
    ('tokenizer.json', b'{}', r'not a valid tokenizer\.json'),
  ],
  ids=['absent', 'empty_folder', 'unknown_suffix', 'junk_model', 'empty_model', 'other_json'],
)
def test_a_file_that_cannot_be_loaded_is_refused(tmp_path, name, content, message):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=message):
    tokenizer.load(tmp_path / name)


def test_a_sentencepiece_model_without_an_eos_piece_is_refused(tmp_path):
  path = sentencepiece_models.train(TEXTS, tmp_path / 'endless', eos_id=-1)
  with pytest.raises(InputError, match='no end-of-sequence piece'):
    tokenizer.load(path)


# ---- Token texts: each character belongs to the token that completes it ----

PIECE_TEXTS = [
  '12+7+31\n',
  r'7+31=38 38+12=50 \boxed{50}',
  '  Zürich  hat   Züge\n\nund 日本語',
  'so 😀 it is, 日本',
] * 20
SPECIAL = ['<|endoftext|>', '<|im_start|>']
PARTS = ['  ', ' ', 'a', ' the', '\n', '日本', '😀', 'ü', '12', *SPECIAL, '\u2581', '\ufffd']


def as_trained(folder):
  """A tokenizer trained as in a run. It neither adds nor removes spaces."""
  tokenizer.train(PIECE_TEXTS, 330, folder / 'tokenizer.model')
  return tokenizer.load(folder / 'tokenizer.model')


def converted(folder):
  """A tokenizer trained as in a run, converted to tokenizer.json."""
  as_trained(folder).save(folder / 'saved')
  return tokenizer.load(folder / 'saved')


def with_dummy_prefix(folder, **options):
  """SentencePiece as in Llama 2: encoding adds a space before each text; decoding removes it."""
  return tokenizer.load(sentencepiece_models.train(PIECE_TEXTS, folder / 'tokenizer', **options))


def keeping_spaces(folder):
  return with_dummy_prefix(folder, remove_extra_whitespaces=False)


def of_json(folder, model):
  model.add_special_tokens(SPECIAL)
  model.save(str(folder / 'tokenizer.json'))
  return tokenizer.load(folder)


def byte_level(folder):
  model = byte_level_model(PIECE_TEXTS, vocab_size=310)
  # Not in the byte alphabet, like DeepSeek's special tokens.
  model.add_special_tokens(['<｜end▁of▁sentence｜>'])
  return of_json(folder, model)


def byte_fallback(folder):
  """A tokenizer.json as in Llama 2, whose decoder removes one space from the start of a text."""
  words = ['▁', '▁a', '▁the', 'a', 'the', '▁▁', '\n', '日']
  names = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256)), *words]
  vocabulary = {name: index for index, name in enumerate(names)}
  model = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token='<unk>', byte_fallback=True))
  joined = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  model.decoder = decoders.Sequence([*joined, decoders.Strip(' ', 1, 0)])
  return of_json(folder, model)


def metaspace(folder):
  model = tokenizers.Tokenizer(models.BPE(unk_token='<unk>'))
  model.pre_tokenizer = pre_tokenizers.Metaspace()
  model.decoder = decoders.Metaspace()
  model.train_from_iterator(
    PIECE_TEXTS, trainers.BpeTrainer(vocab_size=90, show_progress=False, special_tokens=['<unk>'])
  )
  return of_json(folder, model)


PLAIN = (
  as_trained,
  converted,
  byte_level,
  byte_fallback,
)  # these encode rare characters byte by byte


@pytest.fixture(
  scope='module',
  params=[*PLAIN, with_dummy_prefix, keeping_spaces, metaspace],
  ids=lambda make: make.__name__,
)
def opened(request, tmp_path_factory):
  return request.param(tmp_path_factory.mktemp('tokenizer'))


def random_ids(opened, rng):
  """Return random ids, a text's ids, and ids of multi-byte characters mixed with random ids."""
  anything = [rng.randrange(-1, opened.vocab_size + 2) for _ in range(rng.randint(0, 9))]
  text = ''.join(rng.choices(PARTS, k=rng.randint(0, 12)))
  characters = []
  for character in rng.choices(['é', 'ж', '€', '𝄞', '語', 'Z'], k=rng.randint(1, 4)):
    characters += opened.encode(character)
    characters += [rng.randrange(opened.vocab_size)] * rng.randint(0, 1)
  return anything, opened.encode(text), characters


def test_joined_pieces_equal_the_decoded_text(opened):
  rng, checked = random.Random(0), 0
  for _ in range(500):
    for ids in random_ids(opened, rng):
      text, found = opened.decode(ids, special=True), opened.pieces(ids)
      assert len(found) == len(ids)
      if '\ufffd' not in text:  # valid UTF-8
        checked += 1
        assert ''.join(found) == text, ids
  assert checked > 500


@pytest.mark.parametrize('make', PLAIN)
def test_a_character_belongs_to_its_last_token(make, tmp_path):
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


def test_special_tokens_show_their_names_and_unknown_ids_are_empty(tmp_path):
  opened = as_trained(tmp_path)
  one, end = opened.encode('1')[0], opened.eos_ids[0]
  ids = [one, end, -1, one, opened.vocab_size, 2, 2**40]
  assert opened.pieces(ids) == ['1', '</s>', '', '1', '', '<unk>', '']
  opened = byte_level(tmp_path)
  (one,), (start,) = opened.encode('1'), opened.encode('<|im_start|>')
  ids = [start, one, -1, opened.vocab_size, start, 2**40]
  assert opened.pieces(ids) == ['<|im_start|>', '1', '', '', '<|im_start|>', '']
  assert opened.pieces([]) == []


@pytest.mark.parametrize('make', PLAIN)
def test_invalid_bytes_do_not_affect_later_characters(make, tmp_path):
  opened = make(tmp_path)
  (one,), note = opened.encode('1'), opened.encode('𝄞')
  assert ''.join(opened.pieces([one, note[-1], one])) == '1\ufffd1'
  assert opened.pieces([one, note[0], one, *note])[3:] == ['', '', '', '𝄞']
  together = ''.join(opened.pieces([one, *note[:2], *note, one]))
  assert re.sub('\ufffd+', '?', together) == '1?𝄞1'
  found = opened.pieces([one, *note, *note[:3]])  # truncated at the response limit
  assert found[:5] == ['1', '', '', '', '𝄞'] and set(''.join(found[5:])) == {'\ufffd'}


@pytest.mark.parametrize('text', ['', ' ', 'a', '\ufffd'])
def test_token_texts_take_linear_time(text):
  """All calls together decode only a few ids per token."""
  decoded = []

  def decode(ids):
    decoded.append(len(ids))
    return text * len(ids)

  assert len(tokenizer.token_texts([1] * 1000, decode)) == 1000
  assert sum(decoded) < 20_000


# ---- Observations ----

SAID, MORE = 'Two.', Message('user', 'Zürich, \U0001f600?')


@pytest.mark.parametrize('is_cut', [False, True])
@pytest.mark.parametrize('template', ['plain', 'chat'])
@pytest.mark.parametrize('eos', ['<|im_end|>', '<|endoftext|>'])
def test_an_observation_is_appended_as_tokens(eos, template, is_cut, tmp_path):
  """The turn does not change. If it was truncated, exactly one end token comes first.

  The template ends a turn with another end token than the tokenizer's, as in Gemma.
  """
  shutil.copytree(CHECKPOINTS / 'qwen2_tied', folder := tmp_path / 'checkpoint')
  stored = json.loads((folder / 'tokenizer_config.json').read_text())
  (folder / 'tokenizer_config.json').write_text(json.dumps(stored | {'eos_token': eos}))
  loaded, config = tokenizer.load(folder), prompt.PromptConfig(template)
  (end,) = loaded.encode('<|im_end|>')
  assert end in loaded.eos_ids and loaded.encode(eos) == [loaded.eos_ids[0]]
  turn = np.array(loaded.encode(SAID) + [end] * (not is_cut), np.int32)
  for content in (MORE.content, '<|im_end|>'):  # an observation may look like an end token
    said = [MORE._replace(content=content)._asdict()]
    text = loaded.decode(tokenizer.observed_tokens(loaded, config, turn, said), special=True)
    after = {
      'plain': eos * is_cut + f'{content}\n',
      'chat': '<|im_end|>' * is_cut
      + f'\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n',
    }[template]
    assert text == after
