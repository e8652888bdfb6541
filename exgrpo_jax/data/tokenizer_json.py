"""Convert a SentencePiece model or a GGUF tokenizer to tokenizer.json, for transformers and vLLM.

SentencePiece scores every piece and merges the neighbors that form the best piece. A tokenizer.json
lists pairs of pieces by rank, so each piece is converted to all pairs that form it, in order of
score.

A GGUF file contains a vocabulary, merges or scores, and the name of a pre-tokenization rule
(tokenizer.ggml.pre). The rules here and in llama.cpp's src/llama-vocab.cpp are copied from the
models' own tokenizer.json files.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from exgrpo_jax.errors import InputError

# End-of-sequence tokens of common model families, for a tokenizer.json without other files.
KNOWN_EOS = ('<|endoftext|>', '<|im_end|>', '</s>', '<|eot_id|>', '<|end_of_text|>')
SPACE = '\u2581'  # SentencePiece's symbol for a space
# For every Qwen2 model, AutoTokenizer in transformers 5 ignores the folder and uses Qwen2's own
# tokenizer, with other ids, unless `auto_map` names a class. This class is imported only if the
# user trusts the folder's code; otherwise `tokenizer_class` is used, which is equivalent.
_CODE = """from transformers import PreTrainedTokenizerFast


class FromTokenizerJson(PreTrainedTokenizerFast):
  pass
"""
# For tokenizer_config.json: use tokenizer.json unchanged, and return no token_type_ids.
_AUTO_TOKENIZER = {
  'tokenizer_class': 'PreTrainedTokenizerFast',
  'auto_map': {'AutoTokenizer': [None, 'tokenization.FromTokenizerJson']},
  'model_input_names': ['input_ids', 'attention_mask'],
  'clean_up_tokenization_spaces': False,
}


# ---- SentencePiece ----


def of_sentencepiece(content: bytes) -> dict[str, bytes]:
  """Convert a SentencePiece model to tokenizer.json, tokenizer_config.json and tokenization.py.

  Returns file contents by name, or {} if a tokenizer.json would encode some texts differently, for
  example because the model isn't BPE with byte fallback or adds a dummy prefix.
  """
  # Digits, spaces and newlines don't need pre-splitting because no piece spans them.
  proto: Any = sentencepiece_model_pb2.ModelProto.FromString(content)  # pyright: ignore[reportAttributeAccessIssue]  # generated code without types
  if not _is_convertible(proto):
    return {}
  names = {kind: _names(proto, kind) for kind in ('NORMAL', 'UNKNOWN', 'CONTROL')}
  # Pieces use plain spaces, so text needs no conversion and U+2581 in it falls back to bytes.
  vocabulary = {piece.piece.replace(SPACE, ' '): i for i, piece in enumerate(proto.pieces)}
  model = tokenizers.Tokenizer(
    models.BPE(
      vocabulary, _merges(names['NORMAL']), unk_token=names['UNKNOWN'][0], byte_fallback=True
    )
  )
  model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
  model.add_special_tokens(names['UNKNOWN'] + names['CONTROL'])
  ids = {name: getattr(proto.trainer_spec, f'{name}_id') for name in ('bos', 'eos', 'unk', 'pad')}
  tokens = {f'{name}_token': proto.pieces[id_].piece for name, id_ in ids.items() if id_ >= 0}
  return _files(model, tokens | {'split_special_tokens': True})  # '</s>' in a text is text


def _is_convertible(proto: Any) -> bool:
  trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
  changes_text = (
    normalizer.add_dummy_prefix
    or normalizer.remove_extra_whitespaces
    or not normalizer.escape_whitespaces
    or normalizer.precompiled_charsmap
    or proto.denormalizer_spec.precompiled_charsmap
  )
  return (
    trainer.model_type == trainer.BPE
    and trainer.byte_fallback
    and not changes_text
    and not _names(proto, 'UNUSED')
    # Longer pieces are matched before any merge. A single character never takes part in a merge.
    and all(len(name) == 1 for name in _names(proto, 'USER_DEFINED'))
  )


def _names(proto: Any, kind: str) -> list[str]:
  """Return the pieces of one kind, spelled as in the vocabulary, best first."""
  pieces = [piece for piece in proto.pieces if piece.type == getattr(piece, kind)]
  return [
    piece.piece.replace(SPACE, ' ') for piece in sorted(pieces, key=lambda piece: -piece.score)
  ]


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
  """Return the BPE merges: all pairs of pieces that form a piece, in the order of `pieces`."""
  vocabulary = set(pieces)
  return [
    (piece[:cut], piece[cut:])
    for piece in pieces
    for cut in range(1, len(piece))
    if piece[:cut] in vocabulary and piece[cut:] in vocabulary
  ]


def _files(model: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> dict[str, bytes]:
  """Return a tokenizer's files by name; `settings` are added to tokenizer_config.json."""
  return {
    'tokenizer.json': model.to_str(pretty=True).encode(),
    'tokenizer_config.json': json.dumps({**settings, **_AUTO_TOKENIZER}, indent=2).encode(),
    'tokenization.py': _CODE.encode(),
  }


# ---- GGUF ----

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_QWEN2 = _LLAMA3.replace('{1,3}', '')


class _Split(NamedTuple):
  """Settings for splitting a text before merging."""

  pattern: str = ''  # matches the parts; '' means GPT-2's pattern, built into `tokenizers`
  digits: bool = False  # split off each digit first
  composes: bool = False  # normalize to Unicode NFC
  whole_words: bool = False  # use words in the vocabulary without merging
  begins: bool = False  # prepend the begin token unless the metadata says otherwise


_BY_NAME = {
  'gpt-2': _Split(),
  **dict.fromkeys(('smollm', 'starcoder'), _Split(digits=True)),
  # llama.cpp skips NFC, but the models were trained with it.
  **dict.fromkeys(('qwen2', 'deepseek-r1-qwen'), _Split(_QWEN2, composes=True)),
  **dict.fromkeys(
    ('llama-bpe', 'llama3', 'llama-v3'), _Split(_LLAMA3, whole_words=True, begins=True)
  ),
}


def of_gguf(metadata: Mapping[str, Any], path: str) -> dict[str, bytes]:
  """Convert a GGUF's `metadata` to a tokenizer's files, and return their contents by name.

  The files are tokenizer.json, tokenizer_config.json, tokenization.py and generation_config.json.
  Raises InputError naming `path` if the tokenizer is missing, unsupported, or has no end token.
  """
  fields = {
    key.removeprefix('tokenizer.ggml.'): value
    for key, value in metadata.items()
    if key.startswith('tokenizer.ggml.')
  }
  _check(fields, path)
  types = fields.get('token_type', [_NORMAL] * len(fields['tokens']))
  try:
    # Unused tokens only pad the embedding.
    vocabulary = {
      token: id_
      for id_, (token, kind) in enumerate(zip(fields['tokens'], types, strict=True))
      if kind != _UNUSED
    }
    make = _byte_level if fields['model'] == 'gpt2' else _sentencepiece
    model = make(fields, vocabulary, types)
    _add_tokens(model, vocabulary, types)
    special_tokens = {
      name: fields['tokens'][fields[f'{key}_token_id']]
      for name, key in (('bos', 'bos'), ('eos', 'eos'), ('unk', 'unknown'), ('pad', 'padding'))
      if f'{key}_token_id' in fields
    }
    if fields.get('add_bos_token', fields['model'] == 'llama' or _BY_NAME[fields['pre']].begins):
      begin = special_tokens['bos']
      model.post_processor = processors.TemplateProcessing(
        single=[begin, '$A'], special_tokens=[(begin, vocabulary[begin])]
      )
  except Exception as error:  # `tokenizers` raises plain Exceptions
    raise InputError(
      f'{path}: the tokenizer is inconsistent ({type(error).__name__}: {error}). Convert the '
      'model again.'
    ) from error
  settings = {f'{name}_token': token for name, token in special_tokens.items()}
  if template := metadata.get('tokenizer.chat_template'):
    settings['chat_template'] = template
  generation: dict[str, Any] = {
    f'{name}_token_id': vocabulary[token] for name, token in special_tokens.items() if name != 'unk'
  }
  generation['eos_token_id'] = _ends(fields, vocabulary, types, path)
  return _files(model, settings) | {
    'generation_config.json': json.dumps(generation, indent=2).encode()
  }


def _check(fields: Mapping[str, Any], path: str) -> None:
  """Raise InputError if the tokenizer is missing or unsupported."""
  kind, pre = fields.get('model'), fields.get('pre')
  required_keys = {'gpt2': ('tokens', 'merges', 'pre'), 'llama': ('tokens', 'scores')}
  if kind not in required_keys:
    problem = 'no tokenizer' if kind is None else f"tokenizer.ggml.model='{kind}'"
    raise InputError(
      f'{path}: {problem}. The file must contain a tokenizer whose tokenizer.ggml.model is one of '
      f'{", ".join(required_keys)}.'
    )
  for key in required_keys[kind]:
    if not fields.get(key):
      raise InputError(
        f'{path}: no tokenizer.ggml.{key}. Without it, text would be tokenized differently than '
        'in training. Convert the model again.'
      )
  if kind == 'gpt2' and pre not in _BY_NAME:
    raise InputError(
      f"{path}: tokenizer.ggml.pre='{pre}' is not supported. Use a model with one of "
      f'these values: {", ".join(_BY_NAME)}. Other values split text differently.'
    )


def _byte_level(
  fields: Mapping[str, Any], vocabulary: dict[str, int], _: Sequence[int]
) -> tokenizers.Tokenizer:
  """Build a byte-level BPE tokenizer, as in GPT-2."""
  split = _BY_NAME[fields['pre']]
  merges = [tuple(merge.split(' ', 1)) for merge in fields['merges']]
  model = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
  if split.composes:
    model.normalizer = normalizers.NFC()
  splitters = []
  if split.digits:
    splitters = [pre_tokenizers.Digits(individual_digits=True)]
  elif split.pattern:
    splitters = [pre_tokenizers.Split(tokenizers.Regex(split.pattern), 'isolated')]
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)
  model.pre_tokenizer = pre_tokenizers.Sequence([*splitters, to_bytes])
  model.decoder = decoders.ByteLevel()
  return model


def _sentencepiece(
  fields: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int]
) -> tokenizers.Tokenizer:
  """Build a SentencePiece-style BPE tokenizer: characters with byte fallback, merged by score."""
  ids = [id_ for id_ in vocabulary.values() if types[id_] == _NORMAL]
  best_first = sorted(ids, key=lambda id_: -fields['scores'][id_])
  merges = _merges([fields['tokens'][id_] for id_ in best_first])
  unknown = next((token for token, id_ in vocabulary.items() if types[id_] == _UNKNOWN), None)
  model = tokenizers.Tokenizer(
    models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
  )
  has_prefix = fields.get('add_space_prefix', True)
  spaces = normalizers.Replace(' ', SPACE)
  model.normalizer = (
    normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
  )
  steps = [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
  model.decoder = decoders.Sequence([*steps, *([decoders.Strip(' ', 1, 0)] * has_prefix)])
  return model


def _add_tokens(
  model: tokenizers.Tokenizer, vocabulary: dict[str, int], types: Sequence[int]
) -> None:
  """Add the tokens that are matched before a text is split."""
  model.add_tokens(
    [
      tokenizers.AddedToken(token, special=types[id_] != _USER_DEFINED, normalized=False)
      for token, id_ in vocabulary.items()
      if types[id_] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
  )


def _ends(
  fields: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int], path: str
) -> list[int]:
  """Return the ids that stop generation, as in llama.cpp.

  These are the end tokens named in the metadata (end of sequence, turn and message), and tokens of
  the vocabulary that are known to be end tokens. Hugging Face's generation_config.json lists all of
  them, but a GGUF may name only one.
  """
  ids = [
    fields[f'{name}_token_id'] for name in ('eos', 'eot', 'eom') if f'{name}_token_id' in fields
  ]
  known_ids = [vocabulary[token] for token in (*KNOWN_EOS, '<|eom_id|>') if token in vocabulary]
  ids += [id_ for id_ in known_ids if types[id_] == _CONTROL]
  if not ids:
    raise InputError(
      f'{path}: no tokenizer.ggml.eos_token_id, so responses would never end. Convert the model '
      'again and include its end token.'
    )
  return list(dict.fromkeys(ids))
