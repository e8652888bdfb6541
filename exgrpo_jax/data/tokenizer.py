"""Text to token ids and back: SentencePiece models and tokenizer.json behind one interface.

Ids never say where a response ends or what is padding; lengths do. So a vocabulary
without a padding token needs none: its pad_id is an id used only under a mask.
"""

import abc
import dataclasses
import io
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sentencepiece
import tokenizers
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import prompt
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

_SPACE = '\u2581'  # SentencePiece writes a space so, and reads this character as a space
_BYTES = 256  # pieces of a trained model for what its text lacks
_RESERVED = 4  # pieces of a trained model: padding, end, unknown, newline
# The end-of-sequence tokens of the families we know, for a tokenizer.json on its own.
_KNOWN_ENDS = ('<|endoftext|>', '<|im_end|>', '</s>', '<|eot_id|>', '<|end_of_text|>')
# Of the files beside tokenizer.json, those that are read; the others are kept for an export.
_SETTINGS = ('tokenizer_config.json', 'generation_config.json', 'special_tokens_map.json')
# Files beside tokenizer.json: how it ends, pads and chats, and what older readers want of it.
_COMPANIONS = (
  'tokenizer_config.json',
  'generation_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
)


@dataclasses.dataclass(frozen=True)
class Config:
  path: str = setting(
    None,
    "a tokenizer.json, a SentencePiece *.model or the folder of one; '' is the one of "
    "config.model.path, else a SentencePiece model trained on the task's text",
  )
  vocab_size: int = setting(
    '[1, inf)', 'pieces of a tokenizer that is trained, at most; one that is read has its own'
  )


class Tokenizer(abc.ABC):
  """What the other files know of a tokenizer."""

  eos_ids: tuple[int, ...]  # a response ends at any of them; the first is the one to write
  pad_id: int  # for places under a mask
  vocab_size: int  # every id is below it
  files: Mapping[str, bytes]  # name -> content of what it was read from
  chat: prompt.Chat = prompt.NO_CHAT  # what its prompts look like

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Ids of `text` alone: no begin or end token is added."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids` without end, padding and other special tokens.

    Ids outside the vocabulary are left out, for a model's embedding may be padded
    beyond it. Bytes that are not UTF-8 become U+FFFD.
    """

  def render(self, messages: Sequence[Message], template: str) -> str:
    """The prompt of `messages`; see prompt.render."""
    return prompt.render(messages, template, self.chat)

  def save(self, directory: epath.PathLike) -> None:
    """Writes the files it was read from, so that `load` gives the same tokenizer."""
    folder = epath.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in self.files.items():
      (folder / name).write_bytes(content)


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model: one of ours, or one that came with a checkpoint."""

  def __init__(self, content: bytes, place: str):
    self.files = {'tokenizer.model': content}
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(content)
    except RuntimeError as error:
      raise InputError(
        f'{place}: not a SentencePiece model; it must be a file that SentencePiece wrote.'
      ) from error
    if self._model.eos_id() < 0:
      raise InputError(
        f'{place}: the SentencePiece model has no end-of-sequence piece; one is '
        'needed for responses to end.'
      )
    self.eos_ids = (self._model.eos_id(),)
    self.pad_id = max(self._model.pad_id(), 0)
    self.vocab_size = self._model.vocab_size()
    self._space_ids = [self._model.piece_to_id(f'<0x{byte:02X}>') for byte in _SPACE.encode()]
    self._has_bytes = self._model.unk_id() not in self._space_ids

  def encode(self, text: str) -> list[int]:
    if not self._has_bytes:
      return self._model.encode(text)
    # As bytes, the character that stands for a space comes back as itself.
    parts = [self._model.encode(part) for part in text.split(_SPACE)]
    return parts[0] + [i for part in parts[1:] for i in (*self._space_ids, *part)]

  def decode(self, ids: Sequence[int]) -> str:
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    return self._model.decode(
      [i for i in known if not self._model.is_control(i) and not self._model.is_unknown(i)]
    )


class JsonTokenizer(Tokenizer):
  """A tokenizer.json of the `tokenizers` library, as Hugging Face checkpoints have it."""

  def __init__(self, files: Mapping[str, bytes], place: str):
    self.files = files
    try:
      self._model = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
    except Exception as error:  # the library raises bare Exceptions
      raise InputError(
        f'{place}: not a tokenizer.json ({error}); it must be one that the '
        "'tokenizers' library wrote."
      ) from error
    self._model.no_padding()  # the file may say otherwise, of another use
    self._model.no_truncation()
    vocabulary = self._model.get_vocab()
    self.vocab_size = max(vocabulary.values()) + 1  # not a count: ids may have gaps
    settings = {name: _json(files[name], f'{place}: {name}') for name in _SETTINGS if name in files}
    self.eos_ids = _ends(settings, vocabulary, place)
    pad = _token(settings.get('tokenizer_config.json', {}).get('pad_token'))
    self.pad_id = vocabulary.get(pad, 0)
    self.chat = self._chat(settings, place)

  def encode(self, text: str) -> list[int]:
    return self._model.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    known = [int(i) for i in ids if 0 <= i < self.vocab_size and i not in self.eos_ids]
    return self._model.decode(known, skip_special_tokens=True)

  def _chat(self, settings, place):
    own = settings.get('tokenizer_config.json', {})
    special = {
      name: _token(value)
      for name, value in (settings.get('special_tokens_map.json', {}) | own).items()
      if name.endswith('_token') and isinstance(_token(value), str)
    }
    template = own.get('chat_template')
    if isinstance(template, list):  # several, by name
      template = {entry['name']: entry['template'] for entry in template}.get('default')
    if 'chat_template.jinja' in self.files:
      template = self.files['chat_template.jinja'].decode()
    added = self._model.encode('').tokens  # around any text; before it Llama 3 has one
    begin = added[0] if added and added[0] == special.get('bos_token') else ''
    return prompt.Chat(place, template, special, begin)


def load(path: epath.PathLike) -> Tokenizer:
  """Reads tokenizer.json, a SentencePiece *.model, or the one that a folder holds.

  A folder with both gives tokenizer.json, as Hugging Face does.

  Raises:
    InputError: there is none, it cannot be read, or it has no end-of-sequence token.
  """
  found = epath.Path(path).expanduser()
  if found.is_dir():
    choices = [found / 'tokenizer.json', *sorted(found.glob('*.model'))]
    found = next((choice for choice in choices if choice.is_file()), found)
  if not found.is_file() or found.suffix not in ('.json', '.model'):
    raise InputError(
      f'{path} must be a tokenizer.json, a SentencePiece *.model or a folder that '
      'holds one, and there is none: config.tokenizer.path, or config.model.path '
      'where that is empty, names it.'
    )
  if found.suffix == '.model':
    return SentencePieceTokenizer(found.read_bytes(), str(found))
  beside = {name: found.parent / name for name in _COMPANIONS}
  files = {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
  return JsonTokenizer({'tokenizer.json': found.read_bytes(), **files}, str(found))


def train(texts: Iterable[str], vocab_size: int, path: epath.PathLike) -> None:
  """Writes a SentencePiece model of `texts` to `path`: the same bytes for the same texts.

  Byte pairs over unchanged text, single digits, and bytes for what the texts lack, so
  that any text at all comes back as it was.

  Args:
    texts: what to learn from; repetitions count.
    vocab_size: pieces, at most; a small text may have no more to merge before.
    path: the file to write, ending in '.model'.

  Raises:
    InputError: there is no text, or `vocab_size` is below what its characters take.
  """
  texts = [text for text in texts if text]
  characters = {_SPACE if c == ' ' else c for c in itertools.chain.from_iterable(texts)} - {'\n'}
  least = _RESERVED + _BYTES + len(characters)
  if not characters:
    raise InputError('the task has no text to train a tokenizer on; set config.tokenizer.path.')
  if vocab_size < least:
    raise InputError(
      f'config.tokenizer.vocab_size={vocab_size} must be at least {least}: {_RESERVED} reserved '
      f'pieces, {_BYTES} bytes and the {len(characters)} different characters of the text.'
    )
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts),
    model_writer=model,
    model_type='bpe',
    vocab_size=vocab_size,
    hard_vocab_limit=False,
    character_coverage=1.0,
    byte_fallback=True,
    split_digits=True,
    normalization_rule_name='identity',
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    # Never merged with what stands beside it: every prompt ends with a newline, and the
    # response behind it is encoded apart.
    user_defined_symbols=['\n'],
    max_sentence_length=2**30,  # bytes; longer texts would be left out without a word
    num_threads=1,
    shuffle_input_sentence=False,
    minloglevel=2,
  )
  target = epath.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  unfinished = target.parent / f'{target.name}.new'
  unfinished.write_bytes(model.getvalue())
  unfinished.replace(target)  # a kill leaves no half of a model under its name


def _ends(
  settings: Mapping[str, Mapping[str, Any]], vocabulary: Mapping[str, int], place: str
) -> tuple[int, ...]:
  """End-of-sequence ids: the one the tokenizer writes first, then what generation stops at."""
  written = _token(settings.get('tokenizer_config.json', {}).get('eos_token'))
  stops = settings.get('generation_config.json', {}).get('eos_token_id')
  ids = [vocabulary[written]] if written in vocabulary else []
  ids += stops if isinstance(stops, list) else [] if stops is None else [stops]
  ids = ids or [vocabulary[name] for name in _KNOWN_ENDS if name in vocabulary]
  if not ids:
    raise InputError(
      f'{place}: no end-of-sequence token; name one as eos_token in a '
      f'tokenizer_config.json beside it (known by themselves: '
      f'{", ".join(_KNOWN_ENDS)}).'
    )
  return tuple(dict.fromkeys(ids))


def _token(entry) -> str | None:
  """A special token as tokenizer_config.json writes it: text, or an object around it."""
  return entry.get('content') if isinstance(entry, dict) else entry


def _json(content: bytes, place: str) -> Mapping[str, Any]:
  try:
    return json.loads(content)
  except ValueError as error:
    raise InputError(f'{place}: not valid JSON ({error}); mend it, or take it away.') from error
