"""Invented text whose statistics are those of worked solutions, and a tokenizer trained on it.

Words come as often as Zipf's law has it, with numbers and formulas between them. It compresses
about as well as a model's reasoning, to a third, and has about as many characters in a token.
"""

import dataclasses
import pathlib

import numpy as np

from exgrpo_jax.data import tokenizer
from exgrpo_jax.data.tokenizer import Tokenizer

_CHARACTERS = 1_000_000  # of the text from which all others are cut
_TRAINING = 300_000  # of these, which the tokenizer is trained on
_WORDS, _VOCABULARY = 3000, 4000
_ONSETS = np.array([*'bcdfglmnprstvw', 'st', 'tr', 'ch'])
_RHYMES = np.array([*'aeiou', 'en', 'al', 'or', 'in', 'as'])
_FORMULAS = (
  '{a}',
  '{a} + {b} = {c}',
  'x_{b} = {a}',
  '\\frac{{{a}}}{{{b}}}',
  '{a}x^{b}',
  '\\sqrt{{{a}}}',
  '\n\n{b}.',
  '$(x - {a})$',
)
_SHARE_OF_FORMULAS = 0.2


@dataclasses.dataclass(frozen=True)
class Text:
  """A long text, as characters and as tokens, from which pieces can be cut anywhere."""

  characters: str
  tokens: np.ndarray  # [T] int32
  eos: int

  def cut(self, start: np.ndarray, length: np.ndarray) -> list[str]:
    """Pieces of so many characters; `start` is in [0, 1), the share of the text before a piece."""
    begin = (start * (len(self.characters) - length)).astype(int)
    return [self.characters[a:b] for a, b in zip(begin.tolist(), (begin + length).tolist())]

  def cut_tokens(self, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The same in tokens, one piece after the other."""
    begin = (start * (len(self.tokens) - length)).astype(int)
    ends = np.cumsum(length)
    return self.tokens[np.repeat(begin - (ends - length), length) + np.arange(ends[-1])]


def make(folder: pathlib.Path, rng: np.random.Generator) -> Text:
  """A text; its tokenizer is written into `folder`, as a run keeps it."""
  characters = _invent(rng)
  lines = characters[:_TRAINING].split('\n\n')
  tokenizer.train(lines, _VOCABULARY, folder / 'tokenizer.model')
  opened: Tokenizer = tokenizer.load(folder / 'tokenizer.model')
  opened.save(folder)
  return Text(characters, np.array(opened.encode(characters), np.int32), opened.eos_ids[0])


def _invent(rng: np.random.Generator) -> str:
  syllables = np.char.add(rng.choice(_ONSETS, (_WORDS, 3)), rng.choice(_RHYMES, (_WORDS, 3)))
  lengths = rng.choice([1, 2, 3], _WORDS, p=[0.3, 0.5, 0.2])
  words = np.array([''.join(row[:length]) for row, length in zip(syllables, lengths)], object)
  frequency = 1 / np.arange(1, _WORDS + 1)
  count = _CHARACTERS // 5  # more than enough
  chosen = words[rng.choice(_WORDS, count, p=frequency / frequency.sum())]
  places = np.flatnonzero(rng.random(count) < _SHARE_OF_FORMULAS)
  numbers = rng.geometric(0.05, (len(places), 2)).tolist()
  kinds = rng.integers(len(_FORMULAS), size=len(places)).tolist()
  chosen[places] = [
    _FORMULAS[kind].format(a=a, b=b, c=a + b) for kind, (a, b) in zip(kinds, numbers)
  ]
  return ' '.join(chosen.tolist())[:_CHARACTERS]
