"""Tokenizers: a common interface to SentencePiece and tokenizer.json.

The end of a response is tracked by its length, never by token ids, so a vocabulary needs no padding
token. Without one, the end token is used for padding, as usual.
"""

import abc
import dataclasses
import io
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import prompt, tokenizer_json
from exgrpo_jax.data.tokenizer_json import KNOWN_EOS, SPACE
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.replacement import replacing

_BYTES = 256  # byte-fallback pieces of a trained model, for characters not in its training text
_RESERVED = 4  # reserved pieces of a trained model: padding, end, unknown, newline
# Tags that mark the parts of a response. They are kept as text, even if they are special tokens.
_TAGS = frozenset(f'<{end}{tag}>' for end in ('', '/') for tag in ('think', 'tool_call', 'answer'))
# JSON files next to tokenizer.json that are parsed. Of the rest, only the chat template is used.
_SETTINGS = ('tokenizer_config.json', 'generation_config.json', 'special_tokens_map.json')
# Files next to tokenizer.json that exports keep: end and padding tokens, the chat template, files
# that transformers needs to load it, and formats for older readers.
COMPANIONS = (
  *_SETTINGS,
  *('tokenization.py', 'chat_template.jinja', 'added_tokens.json', 'vocab.json', 'merges.txt'),
)
# Files that change prompts and end tokens, but are not read next to a *.model.
_OF_JSON = ('tokenizer_config.json', 'added_tokens.json', 'chat_template.jinja')


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """The tokenizer to load or to train."""

  path: str = setting(
    '',
    None,
    'a tokenizer.json, a SentencePiece *.model, a folder that contains either, or a Hub model '
    "name; '' uses the tokenizer in config.model.path. Without a model, '' trains a SentencePiece "
    "model on the warm start's data or, without a warm start, on config.data.train",
  )
  vocab_size: int = setting(
    512,
    '[1, inf)',
    'the maximum number of pieces when training a tokenizer; ignored if one is loaded',
  )


class Tokenizer(abc.ABC):
  """Interface to a tokenizer in either format."""

  eos_ids: tuple[int, ...]  # any of these ends a response; use the first to end one yourself
  pad_id: int  # masked everywhere, except that `trajectory_selection=released` counts it
  vocab_size: int  # every id is below this
  files: Mapping[str, bytes]  # name -> content of the files the tokenizer was read from
  chat: prompt.Chat = prompt.NO_CHAT

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, without a BOS or EOS token."""

  @abc.abstractmethod
  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """Encode all texts, in parallel if possible. This is faster than separate calls."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
    """Return the text of `ids`, including end, padding and other special tokens if `special`.

    Graders see the text without special tokens; people see it with them. Tags such as </think>
    always appear, even if the vocabulary marks them as special. Ids outside the vocabulary are
    skipped because a model's embedding may be padded beyond it. Invalid UTF-8 becomes U+FFFD.
    """

  def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Return each token's text (see `token_texts`). Joined, the texts equal `decode(ids, True)`."""
    places = [place for place, id_ in enumerate(ids) if 0 <= id_ < self.vocab_size]
    texts = token_texts(
      [int(ids[place]) for place in places], lambda token_ids: self.decode(token_ids, True)
    )
    text_of_place = dict(zip(places, texts))
    return [text_of_place.get(place, '') for place in range(len(ids))]

  def render(
    self,
    messages: Sequence[Message],
    prompts: prompt.PromptConfig,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """Render `messages` as the prompt; see prompt.render."""
    return prompt.render(messages, prompts, self.chat, tools)

  def save(self, directory: epath.PathLike) -> None:
    """Write files from which `load` and transformers can restore the same tokenizer."""
    folder = epath.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in self.files.items():
      (folder / name).write_bytes(content)


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model, from `train` or from a checkpoint.

  `save` also writes a tokenizer.json if the model can be converted (see `tokenizer_json`).
  `content` is the model file's content; `path` is for error messages.
  """

  def __init__(self, content: bytes, path: str) -> None:
    self.files = {'tokenizer.model': content}
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(content)
    except RuntimeError as error:
      raise InputError(
        f'{path}: not a SentencePiece model. Use a model file produced by SentencePiece.'
      ) from error
    if self._model.eos_id() < 0:
      raise InputError(
        f'{path}: the SentencePiece model has no end-of-sequence piece, so responses could not '
        'end. Use a model that has one.'
      )
    self.eos_ids = (self._model.eos_id(),)
    self.pad_id = pad if (pad := self._model.pad_id()) >= 0 else self.eos_ids[0]
    self.vocab_size = self._model.vocab_size()
    self._space_ids = [self._model.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]
    self._has_bytes = self._model.unk_id() not in self._space_ids

  def encode(self, text: str) -> list[int]:
    """See Tokenizer.encode."""
    if not self._has_bytes:
      return self._model.encode(text)
    # SentencePiece would treat U+2581 in a text as a space, so encode it as its three UTF-8 bytes.
    first, *rest = [self._model.encode(piece) for piece in text.split(SPACE)]
    return first + [i for ids in rest for i in (*self._space_ids, *ids)]

  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """See Tokenizer.encode_all."""
    ids = self._model.encode(list(texts))
    return [self.encode(text) if SPACE in text else row for text, row in zip(texts, ids)]

  def decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
    """See Tokenizer.decode."""
    valid_ids = [int(i) for i in ids if 0 <= i < self.vocab_size]
    if not special:
      valid_ids = [
        i for i in valid_ids if not self._is_special(i) or self._model.id_to_piece(i) in _TAGS
      ]
    return ''.join(  # SentencePiece drops special pieces when decoding
      ''.join(map(self._model.id_to_piece, run)) if is_special else self._model.decode(list(run))
      for is_special, run in itertools.groupby(valid_ids, self._is_special)
    )

  def _is_special(self, id_: int) -> bool:
    return self._model.is_control(id_) or self._model.is_unknown(id_)

  def save(self, directory: epath.PathLike) -> None:
    """See Tokenizer.save. Also writes a tokenizer.json if the model can be converted."""
    super().save(directory)
    for name, content in tokenizer_json.of_sentencepiece(self.files['tokenizer.model']).items():
      (epath.Path(directory) / name).write_bytes(content)


class JsonTokenizer(Tokenizer):
  """A `tokenizers` tokenizer.json, as in Hugging Face checkpoints.

  `files` contains tokenizer.json and any files next to it. `path` is the path of
  tokenizer.json, for error messages.
  """

  def __init__(self, files: Mapping[str, bytes], path: str) -> None:
    self.files = files
    try:
      self._model = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
    except Exception as error:  # the library raises plain Exceptions
      raise InputError(
        f"{path}: not a valid tokenizer.json ({error}). Use one saved by the 'tokenizers' library."
      ) from error
    self._model.no_padding()  # the file may enable padding and truncation for other purposes
    self._model.no_truncation()
    settings = {}
    for name in sorted(files.keys() & _SETTINGS):
      try:
        settings[name] = {**json.loads(files[name])}
      except (ValueError, TypeError) as error:
        raise InputError(
          f'{path}: {name} is not a JSON object ({error}). Fix or remove the file.'
        ) from error
    config = settings.get('tokenizer_config.json', {})
    if 'added_tokens_decoder' not in config:  # transformers then lets the older file override it
      config = {**config, **settings.get('special_tokens_map.json', {})}
    _add_listed_tokens(self._model, config.get('added_tokens_decoder'), path)
    vocabulary = self._model.get_vocab()
    self.vocab_size = max(vocabulary.values()) + 1  # not the length, because ids may have gaps
    # if True, '</s>' in a text is not the end token
    self._model.encode_special_tokens = bool(config.get('split_special_tokens', False))
    self.eos_ids = _eos_ids(config, settings.get('generation_config.json', {}), vocabulary, path)
    tokens = self._model.get_added_tokens_decoder().items()
    special_ids = {id_ for id_, token in tokens if token.special and token.content not in _TAGS}
    self._hidden = special_ids.union(self.eos_ids)  # the file may not mark an end token as special
    pad = _token_text(config.get('pad_token'))
    self.pad_id = self.eos_ids[0] if pad is None else vocabulary.get(pad, self.eos_ids[0])
    self.chat = self._read_chat(config, path)

  def encode(self, text: str) -> list[int]:
    """See Tokenizer.encode."""
    return self._model.encode(text, add_special_tokens=False).ids

  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """See Tokenizer.encode_all."""
    return [row.ids for row in self._model.encode_batch(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
    """See Tokenizer.decode."""
    hidden_ids = () if special else self._hidden
    valid_ids = [int(i) for i in ids if 0 <= i < self.vocab_size and i not in hidden_ids]
    return self._model.decode(valid_ids, skip_special_tokens=False)

  def _read_chat(self, config: Mapping[str, Any], path: str) -> prompt.Chat:
    special_tokens = {
      name: text
      for name, entry in config.items()
      if name.endswith('_token') and (text := _token_text(entry)) is not None
    }
    templates = config.get('chat_template')
    if isinstance(templates, list):  # several named templates
      templates = {entry['name']: entry['template'] for entry in templates}
    if 'chat_template.jinja' in self.files:
      templates = self.files['chat_template.jinja'].decode()
    if not isinstance(templates, dict):
      templates = {'default': templates}
    # Tokens added to every text. Llama 3, for example, prepends its begin token.
    tokens = self._model.encode('').tokens
    begin = tokens[0] if tokens and tokens[0] == special_tokens.get('bos_token') else ''
    return prompt.Chat(
      path, templates.get('default'), special_tokens, begin, templates.get('tool_use')
    )


def load(path: epath.PathLike) -> Tokenizer:
  """Load a tokenizer.json, a SentencePiece *.model, or a folder that contains either.

  If a folder contains both, tokenizer.json is used, as in transformers. Raises InputError if the
  file is missing, cannot be read, or has no end-of-sequence token, or if a folder contains files
  that are only used with a tokenizer.json, but has no tokenizer.json.
  """
  file = epath.Path(path).expanduser()
  if file.is_dir():
    candidates = [file / 'tokenizer.json', *sorted(file.glob('*.model'))]
    file = next((candidate for candidate in candidates if candidate.is_file()), file)
    name = next((name for name in _OF_JSON if (file.parent / name).is_file()), None)
    if name and file.suffix == '.model':
      raise InputError(
        f'{path}: {name} is only used with a tokenizer.json, but the folder has none. Create one '
        f"with transformers (AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')), "
        f'or set config.tokenizer.path to {file} to use it without a BOS token and a chat template.'
      )
  if not file.is_file() or file.suffix not in ('.json', '.model'):
    raise InputError(
      f'{path}: no tokenizer found. This must be a tokenizer.json, a SentencePiece *.model or a '
      'folder that contains one. Check config.tokenizer.path or, if it is empty, config.model.path.'
    )
  if file.suffix == '.model':
    return SentencePieceTokenizer(file.read_bytes(), str(file))
  companions = {name: file.parent / name for name in COMPANIONS}
  files = {
    name: companion.read_bytes() for name, companion in companions.items() if companion.is_file()
  }
  return JsonTokenizer({'tokenizer.json': file.read_bytes(), **files}, str(file))


def train(texts: Iterable[str], vocab_size: int, path: epath.PathLike) -> None:
  """Train a SentencePiece model on `texts` deterministically and write it to `path`.

  The model uses byte-pair encoding without normalization, splits numbers into digits, and falls
  back to bytes for characters not in the texts, so that decoding restores any text exactly.
  A repeated text counts every time it appears. `vocab_size` is the maximum number of pieces; with
  few texts, merges may run out earlier. `path` ends in '.model'.

  Raises InputError if there is no text, or `vocab_size` is too small for the text's characters.
  """
  texts = [text for text in texts if text]
  characters = {SPACE if c == ' ' else c for c in itertools.chain.from_iterable(texts)} - {'\n'}
  minimum = _RESERVED + _BYTES + len(characters)
  if not characters:
    raise InputError(
      "config.tokenizer.path='': the data has no text to train a tokenizer on. Set a path."
    )
  if vocab_size < minimum:
    raise InputError(
      f'config.tokenizer.vocab_size={vocab_size} must be at least {minimum} to hold {_RESERVED} '
      f'reserved pieces, {_BYTES} bytes and the {len(characters)} distinct characters in the text.'
    )
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts), model_writer=model, minloglevel=2,
    model_type='bpe', vocab_size=vocab_size, hard_vocab_limit=False, character_coverage=1.0,
    byte_fallback=True, split_digits=True, normalization_rule_name='identity',
    remove_extra_whitespaces=False, add_dummy_prefix=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    # Never merge a newline with its neighbors: every prompt ends with a newline, and the response
    # is tokenized separately.
    user_defined_symbols=['\n'],
    max_sentence_length=2**30,  # bytes; longer texts would be skipped silently
    num_threads=1, shuffle_input_sentence=False,
  )  # fmt: skip
  with replacing(path) as unfinished:
    unfinished.write_bytes(model.getvalue())


def _add_listed_tokens(model: tokenizers.Tokenizer, value: Any, path: str) -> None:
  """Add the tokens listed only in tokenizer_config.json, in id order, as transformers does."""
  known_texts = {token.content for token in model.get_added_tokens_decoder().values()}
  try:
    tokens = {
      int(id_): tokenizers.AddedToken(**token)
      for id_, token in ({} if value is None else value).items()
      if token['content'] not in known_texts
    }
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise InputError(
      f'{path}: tokenizer_config.json contains added_tokens_decoder={reprlib.repr(value)}, but it '
      f"must map token ids to objects with a 'content' field ({error!r}). Save the tokenizer again "
      'with transformers.'
    ) from error
  for id_, token in sorted(tokens.items()):
    model.add_tokens([token])
    if (added_id := model.token_to_id(token.content)) != id_:
      raise InputError(
        f'{path}: tokenizer_config.json lists {token.content!r} as token {id_}, but it would be '
        f'loaded as token {added_id}. Save the tokenizer again with transformers.'
      )


def _eos_ids(
  config: Mapping[str, Any], generation: Mapping[str, Any], vocabulary: Mapping[str, int], path: str
) -> tuple[int, ...]:
  """Return the end-of-sequence ids: first the tokenizer's own, then those in `generation`."""
  eos, stops = _token_text(config.get('eos_token')), generation.get('eos_token_id')
  ids = [] if eos is None or eos not in vocabulary else [vocabulary[eos]]
  stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
  if not all(type(id_) is int and id_ >= 0 for id_ in stops):
    raise InputError(
      f'{path}: generation_config.json contains eos_token_id={stops}, but token ids are '
      'non-negative integers. Correct it, or remove it to use the eos_token in '
      'tokenizer_config.json.'
    )
  ids += stops
  ids = ids or [vocabulary[name] for name in KNOWN_EOS if name in vocabulary]
  if not ids:
    raise InputError(
      f'{path}: no end-of-sequence token. Set eos_token in a tokenizer_config.json in the same '
      f'folder. Without this setting, only {", ".join(KNOWN_EOS)} are recognized.'
    )
  return tuple(dict.fromkeys(ids))


def _token_text(entry: Any) -> str | None:
  """Return a special token's text. tokenizer_config.json stores it as a string or in an object."""
  text = entry.get('content') if isinstance(entry, dict) else entry
  return text if isinstance(text, str) else None


# ---- Text of individual tokens ----

# A token decoded by itself may differ from its text in context: a character may span several
# tokens, and decoders drop a leading space. So each token is decoded together with a preceding
# token, and a character belongs to the token that completes it.


_UNFINISHED = '\ufffd'  # decoders return this for invalid bytes and incomplete characters
_LONGEST = 4  # maximum bytes, and therefore tokens, per character


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
  """Return each token's text in linear time; joined, the texts equal the decoded sequence.

  If a character spans several tokens, all but the last get ''. With invalid UTF-8, the texts may
  contain more or fewer U+FFFD than the decoded sequence, or attach U+FFFD to the next character.
  """
  texts = [''] * len(ids)
  context: list[int] = []
  group: list[int] = []  # tokens of a character that may still be completed
  for place, id_ in enumerate(ids):
    group.append(id_)
    while group:
      prefix, text = decode(context), decode(context + group)
      # `text` may begin differently because invalid UTF-8 can change how earlier bytes decode.
      group_text = text.removeprefix(prefix) if text.startswith(prefix) else decode(group)
      if not group_text.endswith(_UNFINISHED):
        texts[place] = group_text
        # Some decoders treat a token preceded only by whitespace as the start of the text.
        if group_text.replace(_UNFINISHED, '').strip() or not context:
          context = group
        group = []
      elif len(group) < _LONGEST and place + 1 < len(ids):
        break
      else:  # the group's first token isn't part of a character
        texts[place + 1 - len(group)] = decode(group[:1])
        group = group[1:]
  return texts


# ---- External responses ----


def response_tokens(
  tokenizer: Tokenizer, prompts: Sequence[np.ndarray], texts: Sequence[str]
) -> list[np.ndarray]:
  """Tokenize response texts as if a policy had generated them after the tokens of `prompts`.

  A response ends with its first end token, which is appended if missing. If a prompt ends
  with '<think>', the response does not begin with it again. Returns int32 [T] per text.
  """
  think, end = prompt.THINK, tokenizer.eos_ids[0]
  responses = [
    text.removeprefix(think if tokenizer.decode(prompt_T, special=True).endswith(think) else '')
    for prompt_T, text in zip(prompts, texts, strict=True)
  ]
  rows = tokenizer.encode_all(responses)
  return [up_to_end(np.array([*ids, end], np.int32), tokenizer) for ids in rows]


def up_to_end(tokens_T: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Return the tokens up to and including the first end token, or all of them if there is none."""
  (ends,) = np.nonzero(np.isin(tokens_T, tokenizer.eos_ids))
  return tokens_T[: ends[0] + 1] if ends.size else tokens_T


# ---- Multi-turn conversations ----


def observed_tokens(
  tokenizer: Tokenizer,
  prompts: prompt.PromptConfig,
  turn: np.ndarray,
  messages: Sequence[Mapping[str, str]],
) -> np.ndarray:
  """Tokenize the `messages` that follow a policy turn, up to the start of its next turn.

  `turn` contains the turn's tokens. If it was truncated, the result begins with an end token. Each
  message has a role and a content; `prompt.following` renders them. Returns int32 [T].
  """
  chat_messages = [Message(**message) for message in messages]
  text, last_id = prompt.following(chat_messages, prompts, tokenizer.chat), int(turn[-1])
  is_ended = last_id in tokenizer.eos_ids
  # A chat template ends the turn with one of the end tokens. Plain text has only the messages.
  ids = () if prompts.template == 'plain' else (last_id,) if is_ended else tokenizer.eos_ids
  ends = [tokenizer.decode([id_], special=True) for id_ in ids]
  end = next(filter(text.startswith, ends), '')
  if is_ended:
    return np.array(tokenizer.encode(text.removeprefix(end)), np.int32)
  missing_end = () if end else tokenizer.eos_ids[:1]
  return np.array([*missing_end, *tokenizer.encode(text)], np.int32)
