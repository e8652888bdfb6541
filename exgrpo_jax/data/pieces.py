"""The text of each token of a response, for whoever shows it token by token.

Decoded alone, a token is not what it is in its place: a character may be spread over several of
them, and decoders drop a space at the start. So the text goes to the token that completes it, and
what depends on the place is read off with a token before it, in time linear in the tokens.

All texts together are what `decode` gives with `special`. Tokens before the last of a character
have '', and so have ids outside the vocabulary. Where bytes are not UTF-8, U+FFFD may be more or
fewer than in the decoded whole.
"""

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
import tokenizers

_Placed = tuple[int, int]  # a token's place in the response, and its id
_BYTE = re.compile('<0x([0-9A-F]{2})>')  # a byte of a character that is no token


def of_sentencepiece(
  model: sentencepiece.SentencePieceProcessor, ids: Sequence[int] | np.ndarray
) -> list[str]:
  """See tokenizer.Tokenizer.pieces."""

  def byte_of(id_: int) -> bytes:
    return _byte(model.id_to_piece(id_)) if model.is_byte(id_) else b''

  def is_special(placed: _Placed) -> bool:
    return model.is_control(placed[1]) or model.is_unknown(placed[1])

  texts, size = [''] * len(ids), model.vocab_size()
  known = [(place, int(id_)) for place, id_ in enumerate(ids) if 0 <= id_ < size]
  for special, run in itertools.groupby(known, is_special):
    if special:
      texts_of_run = ((place, model.id_to_piece(id_)) for place, id_ in run)
    else:
      texts_of_run = _in_context(run, model.decode, byte_of)
    for place, text in texts_of_run:
      texts[place] = text
  return texts


def of_tokenizer_json(model: tokenizers.Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
  """See tokenizer.Tokenizer.pieces."""
  tokens = [model.id_to_token(int(id_)) if 0 <= id_ < 2**32 else None for id_ in ids]
  decoder = json.loads(model.decoder.__getstate__()) if model.decoder else {}
  kinds = [part['type'] for part in decoder.get('decoders', [decoder]) if part]
  if kinds == ['ByteLevel']:
    return _of_bytes([_byte_level(token or '') for token in tokens])

  def byte_of(id_: int) -> bytes:
    return _byte(model.id_to_token(id_) or '') if 'ByteFallback' in kinds else b''

  def decode(ids: list[int]) -> str:
    return model.decode(ids, skip_special_tokens=False)

  texts = [''] * len(ids)
  known = ((place, int(id_)) for place, id_ in enumerate(ids) if tokens[place] is not None)
  for place, text in _in_context(known, decode, byte_of):
    texts[place] = text
  return texts


# ---- Tokens that are bytes ----


def _byte_level_alphabet() -> dict[str, int]:
  """The byte of each character by which byte-level tokens are written, as GPT-2's encoder has it.

  https://github.com/openai/gpt-2/blob/master/src/encoder.py: printable ones stand for themselves,
  the others, in their order, for what follows U+00FF.
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {
    chr(256 + index): byte for index, byte in enumerate(others)
  }


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
  """The bytes of a token; one with other characters, as added tokens may have, is text."""
  if all(character in _ALPHABET for character in token):
    return bytes(_ALPHABET[character] for character in token)
  return token.encode()


def _of_bytes(tokens: Sequence[bytes]) -> list[str]:
  utf8 = codecs.getincrementaldecoder('utf-8')('replace')
  texts = [utf8.decode(token) for token in tokens]
  if texts:  # a response that is cut within a character
    texts[-1] += utf8.decode(b'', final=True)
  return texts


# ---- Tokens that are text, but for single bytes ----


def _byte(token: str) -> bytes:
  found = _BYTE.fullmatch(token)
  return bytes.fromhex(found[1]) if found else b''


def _in_context(
  tokens: Iterable[_Placed],
  decode: Callable[[list[int]], str],
  byte_of: Callable[[int], bytes],
) -> Iterator[tuple[int, str]]:
  """(place, text) of the tokens of a text in which a character begins with a token.

  Args:
    tokens: all of the text, in order.
    decode: from ids to text.
    byte_of: from an id to the byte for which the token stands; empty for all other tokens.
  """
  context: list[int] = []
  for group in _characters(tokens, byte_of):
    ids = [id_ for _, id_ in group]
    before, text = decode(context), decode(context + ids)
    # It does not where bytes are no UTF-8, which may change how those before them are read.
    own = text.removeprefix(before) if text.startswith(before) else decode(ids)
    yield group[-1][0], own
    # After white space alone some decoders would take what follows for the start of the text, and
    # after bytes that are not UTF-8 one of bytes for no UTF-8 either.
    if own.replace('\ufffd', '').strip() or not context:
      context = ids


def _characters(
  tokens: Iterable[_Placed], byte_of: Callable[[int], bytes]
) -> Iterator[list[_Placed]]:
  """The tokens in groups: each token by itself, but for bytes that make a character together."""
  utf8 = codecs.getincrementaldecoder('utf-8')('replace')
  unfinished: list[_Placed] = []
  for placed in tokens:
    byte = byte_of(placed[1])
    if not byte:
      if unfinished:
        yield unfinished
      yield [placed]
      unfinished = []
      utf8.reset()
      continue
    text = utf8.decode(byte)
    is_finished = not utf8.getstate()[0]
    if text and not is_finished:  # those before were no character, and the byte begins another
      yield unfinished
      unfinished = []
    unfinished.append(placed)
    if is_finished:
      yield unfinished
      unfinished = []
  if unfinished:
    yield unfinished
