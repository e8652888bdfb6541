"""A SentencePiece model as a tokenizer.json, which transformers and vLLM read.

Both merge pairs of pieces, best first. SentencePiece gives every piece a score and merges whichever
neighbours make the best one; a tokenizer.json lists the pairs by rank. So each piece becomes all
pairs of pieces that make it, in the order of the scores. Digits, spaces and newlines need no
splitting beforehand: no piece spans them, for the trainer made none.
"""

import json
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2

SPACE = '\u2581'  # SentencePiece's symbol for a space
# AutoTokenizer of transformers 5 takes Qwen2's own tokenizer for every Qwen2 model, whatever the
# folder says, and so other ids, unless `auto_map` names a class. This one is only imported where
# the user trusts code of the folder; elsewhere `tokenizer_class` then counts, which is the same.
CODE = """from transformers import PreTrainedTokenizerFast


class FromTokenizerJson(PreTrainedTokenizerFast):
  pass
"""
# Of tokenizer_config.json: read tokenizer.json as it is, and give no token_type_ids.
AUTO_TOKENIZER = {
  'tokenizer_class': 'PreTrainedTokenizerFast',
  'auto_map': {'AutoTokenizer': [None, 'tokenization.FromTokenizerJson']},
  'model_input_names': ['input_ids', 'attention_mask'],
  'clean_up_tokenization_spaces': False,
}


def hugging_face_files(content: bytes) -> dict[str, bytes]:
  """tokenizer.json, tokenizer_config.json and tokenization.py of a SentencePiece model, by name.

  Empty where a tokenizer.json could not have the same ids for every text: the model is not a BPE
  with byte fallback, or it changes the text before it encodes it, as with a dummy prefix.

  Args:
    content: of the model's file.
  """
  proto: Any = sentencepiece_model_pb2.ModelProto.FromString(content)  # pyright: ignore[reportAttributeAccessIssue]  # generated code without types
  if not _is_convertible(proto):
    return {}
  names = {kind: _names(proto, kind) for kind in ('NORMAL', 'UNKNOWN', 'CONTROL')}
  # Named with plain spaces, so that text needs no replacement and U+2581 in it falls back to bytes.
  vocabulary = {piece.piece.replace(SPACE, ' '): i for i, piece in enumerate(proto.pieces)}
  model = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocabulary, merges(names['NORMAL']), unk_token=names['UNKNOWN'][0], byte_fallback=True
    )
  )
  model.decoder = tokenizers.decoders.Sequence(
    [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
  )
  model.add_special_tokens(
    [
      tokenizers.AddedToken(name, special=True, normalized=False)
      for name in names['UNKNOWN'] + names['CONTROL']
    ]
  )
  return {
    'tokenizer.json': model.to_str(pretty=True).encode(),
    'tokenizer_config.json': json.dumps(_settings(proto), indent=2).encode(),
    'tokenization.py': CODE.encode(),
  }


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
    # A longer one is matched before anything is merged; a single character is in no other piece.
    and all(len(name) == 1 for name in _names(proto, 'USER_DEFINED'))
  )


def _names(proto: Any, kind: str) -> list[str]:
  """The pieces of one kind, as they stand in the vocabulary; the best first."""
  pieces = [piece for piece in proto.pieces if piece.type == getattr(piece, kind)]
  return [
    piece.piece.replace(SPACE, ' ') for piece in sorted(pieces, key=lambda piece: -piece.score)
  ]


def merges(pieces: list[str]) -> list[tuple[str, str]]:
  """BPE's merges: the pairs of pieces that make another, those of the best one first."""
  known = set(pieces)
  return [
    (piece[:cut], piece[cut:])
    for piece in pieces
    for cut in range(1, len(piece))
    if piece[:cut] in known and piece[cut:] in known
  ]


def _settings(proto: Any) -> dict[str, Any]:
  """The content of tokenizer_config.json."""
  trainer = proto.trainer_spec
  tokens = {
    f'{name}_token': proto.pieces[token_id].piece
    for name, token_id in (
      ('bos', trainer.bos_id),
      ('eos', trainer.eos_id),
      ('unk', trainer.unk_id),
      ('pad', trainer.pad_id),
    )
    if token_id >= 0
  }
  return tokens | AUTO_TOKENIZER | {'split_special_tokens': True}  # '</s>' in a text is text
