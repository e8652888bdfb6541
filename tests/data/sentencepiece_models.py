"""SentencePiece models trained with options that `tokenizer.train` does not use."""

import sentencepiece


def train(texts, prefix, **options):
  """Train a BPE model with byte fallback, unless `options` differ, and return its path."""
  defaults = dict(model_type='bpe', vocab_size=320, hard_vocab_limit=False, byte_fallback=True)
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts), model_prefix=str(prefix), minloglevel=2, **defaults | options
  )
  return f'{prefix}.model'
