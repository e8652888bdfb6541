"""The token ids of a data set's prompts, in one file beside the prepared data, mapped into memory.

The file holds little-endian int32: the tokens of all prompts, the length of each, the number of
prompts, a SHA-256 of the questions and one of all before it. Its name is a hash of
whatever shapes a prompt, so a file that is there under its name is the right one, and one that a
changed template or tokenizer no longer finds does no harm.
"""

import functools
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import overload

import numpy as np

from exgrpo_jax.data import prompt
from exgrpo_jax.data.questions import Dataset
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.errors import counted
from exgrpo_jax.runtime import activity, hosts
from exgrpo_jax.runtime.replacement import replacing

_INT = np.dtype('<i4')
_DIGEST = 32 // _INT.itemsize  # integers of a SHA-256
_CHUNK = 1 << 20  # bytes
_BATCH = 1000  # prompts that are tokenised together
_LIBRARIES = ('jinja2', 'sentencepiece', 'tokenizers')


class Prompts(Sequence[np.ndarray]):
  """The prompts of a data set: int32 [T] each, views of one array; a slice is a list of them."""

  def __init__(
    self, tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray, checksum: bytes
  ) -> None:
    self._tokens, self._begins = tokens, begins
    self.lengths = lengths  # int [prompts], in tokens
    self.checksum = checksum  # of the questions and prompts of the whole data set

  def __len__(self) -> int:
    return len(self.lengths)

  @overload
  def __getitem__(self, row: int) -> np.ndarray: ...
  @overload
  def __getitem__(self, row: slice) -> list[np.ndarray]: ...
  def __getitem__(self, row: int | slice) -> np.ndarray | list[np.ndarray]:
    if isinstance(row, slice):
      return [self[index] for index in range(len(self))[row]]
    begin = self._begins[row]
    return self._tokens[begin : begin + self.lengths[row]]

  def select(self, rows: np.ndarray) -> 'Prompts':
    """Some of the prompts, numbered anew."""
    return Prompts(self._tokens, self._begins[rows], self.lengths[rows], self.checksum)


def tokenized(data: Dataset, tokenizer: Tokenizer, prompts: prompt.Config) -> Prompts:
  """The prompts of `data`: read from the file of an earlier start, else made and kept.

  Safe to call from several processes at once, and to kill: each writes a file of its own, which
  it renames when it is complete.

  Raises:
    InputError: a question cannot be rendered.
  """
  path = pathlib.Path(data.source.folder, 'prompts', _name(data, tokenizer, prompts))
  if path.exists():
    try:
      return _read(path)
    except (OSError, ValueError) as error:
      hosts.warn(f'{path}: {error}; the prompts of {data.spec} are tokenised again.')
  content = _make(data, tokenizer, prompts)
  try:
    _write(path, content)
    return _read(path)
  except OSError as error:
    hosts.warn(
      f'the tokenised prompts of {data.spec} cannot be kept in {path.parent} '
      f'({error.strerror or error}), so every start tokenises them again; make that folder '
      'writable, with space for them, or set config.data.cache_dir to another.'
    )
    return _parse(np.frombuffer(memoryview(content).toreadonly(), _INT))


def _name(data: Dataset, tokenizer: Tokenizer, prompts: prompt.Config) -> str:
  shaping = (
    data.source.identity,
    hashlib.sha256(data.rows.tobytes()).hexdigest(),
    prompts,
    sorted((name, hashlib.sha256(file).hexdigest()) for name, file in tokenizer.files.items()),
    _code(),
  )
  return hashlib.sha256(repr(shaping).encode()).hexdigest()[:32]


@functools.cache
def _code() -> tuple[str, ...]:
  """A digest of the code of this room, and the versions of libraries that it relies on."""
  hashed = hashlib.sha256()
  for file in sorted(pathlib.Path(__file__).parent.glob('*.py')):
    hashed.update(file.read_bytes())
  return hashed.hexdigest(), *(importlib.metadata.version(name) for name in _LIBRARIES)


def _make(data: Dataset, tokenizer: Tokenizer, prompts: prompt.Config) -> bytearray:
  """The content of the file of these prompts."""
  content, lengths, questions = bytearray(), [], hashlib.sha256()
  report = activity.reporter(
    lambda done: f'{data.spec}: {done:,} of {counted(len(data), "prompt")} tokenised'
  )
  for start in range(0, len(data), _BATCH):
    batch = data[start : start + _BATCH]
    ids = tokenizer.encode_all([tokenizer.render(q.messages, prompts) for q in batch])
    content += np.fromiter(itertools.chain.from_iterable(ids), _INT).tobytes()
    lengths += map(len, ids)
    questions.update(repr(batch).encode())
    report(len(lengths))
  content += np.array([*lengths, len(lengths)], _INT).tobytes() + questions.digest()
  return content + hashlib.sha256(content).digest()


def _write(path: pathlib.Path, content: bytearray) -> None:
  """Writes the file at once or not at all."""
  with replacing(path, shared=True) as unfinished:
    unfinished.write_bytes(content)


def _read(path: pathlib.Path) -> Prompts:
  """The prompts in a file; ValueError where it is damaged."""
  with path.open('rb') as file:
    hashed, left = hashlib.sha256(), os.fstat(file.fileno()).st_size - _DIGEST * _INT.itemsize
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
      hashed.update(chunk)
      left -= len(chunk)
    if left or file.read() != hashed.digest():
      raise ValueError('the file is damaged')
    return _parse(np.asarray(np.memmap(file, _INT, 'r')))


def _parse(content: np.ndarray) -> Prompts:
  """The prompts in a file's content, int32; views of it."""
  rest, checksum = content[: -2 * _DIGEST], content[-_DIGEST:].tobytes()
  count = int(rest[-1])
  lengths = rest[-1 - count : -1].astype(np.int64)
  begins = np.cumsum(lengths) - lengths
  return Prompts(rest[: -1 - count], begins, lengths, checksum)
