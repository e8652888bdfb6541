"""Invented text: pieces are cut where they should be, and it is as compressible as real text."""

import zlib

import numpy as np

from exgrpo_jax.data import tokenizer
from exgrpo_jax.performance.synthetic import prose
from exgrpo_jax.performance.synthetic.prose import Text


def test_pieces_are_cut_one_after_the_other():
  """Of 10 characters 8 may precede a piece of 2, and 6 one of 4."""
  text = Text('abcdefghij', np.arange(10, dtype=np.int32), 1)
  start, length = np.array([0.0, 0.5]), np.array([2, 4])
  assert text.cut(start, length) == ['ab', 'defg']
  assert text.cut_tokens(start, length).tolist() == [0, 1, 3, 4, 5, 6]


def test_text_is_as_dense_as_reasoning(tmp_path):
  text = prose.make(tmp_path, np.random.default_rng(0))
  opened = tokenizer.load(tmp_path)
  assert text.characters.startswith(opened.decode(text.tokens[:1000]))
  content = text.characters.encode()
  assert 2.5 < len(content) / len(zlib.compress(content)) < 3.5
  assert 2.5 < len(content) / len(text.tokens) < 4
  assert text.eos in opened.eos_ids
