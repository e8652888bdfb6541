"""Prepared questions on disk: records in an Arrow file for each split, mapped into memory.

The files of a data set lie together in a folder, whose name is a hash of all that shapes them. So a
folder that is there is the right one.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.replacement import replacing

Record = dict[str, Any]  # a row of SCHEMA

# The fields of datatypes.Question but `row`; `columns` is JSON.
SCHEMA = pa.schema(
  [
    ('messages', pa.list_(pa.struct([('role', pa.string()), ('content', pa.string())]))),
    *((name, pa.string()) for name in ('answer', 'kind', 'solution', 'source', 'columns')),
  ]
)
_VERSION = '3'  # increase it when rows become other records
_BATCH = 1000  # rows that are written together; a row's place in its batch follows from it
_FACTS = 'facts.json'


class Store:
  """The prepared splits of a data set; rows are read when they are asked for."""

  def __init__(self, folder: pathlib.Path) -> None:
    self.folder = folder
    self.facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
    self.sizes: dict[str, int] = self.facts.pop('sizes')  # split -> rows

  def reader(self, split: str) -> Callable[[Sequence[int]], list[Record]]:
    """A function from rows of a split to its records, which works on when the cache is cleared."""
    with pa.ipc.open_file(pa.memory_map(os.fspath(_file(self.folder, split)))) as file:
      batches = [file.get_batch(number) for number in range(file.num_record_batches)]

    def read(rows: Sequence[int]) -> list[Record]:
      found = {}
      for number, group in itertools.groupby(sorted(set(rows)), lambda row: row // _BATCH):
        wanted = list(group)
        taken = batches[number].take(pa.array([row % _BATCH for row in wanted]))
        found |= zip(wanted, taken.to_pylist())
      return [found[row] for row in rows]

    return read


def prepared(
  cache_dir: str,
  name: str,
  key: str,
  make: Callable[[dict[str, Any]], Mapping[str, Iterable[Record]]],
) -> Store:
  """The data set of this key, made if it is not there.

  Safe to call from several processes at once, and to kill: each makes a folder of its own, and the
  first to finish renames it.

  Args:
    cache_dir: where data is kept; '' is TFDS's folder.
    name: of the data set, which begins the folder's name.
    key: all that shapes the records.
    make: the records of each split. It is given a dict for the `facts` of the store, which is
      written when all records are.

  Raises:
    InputError: it cannot be stored; and what `make` raises.
  """
  digest = hashlib.sha256(repr((_VERSION, name, key)).encode()).hexdigest()[:24]
  readable = re.sub(r'[^\w.-]+', '_', name)
  folder = cache_folder(cache_dir) / 'questions' / f'{readable}-{digest}'
  if not (folder / _FACTS).exists():
    try:
      with replacing(folder, shared=True) as unfinished:
        unfinished.mkdir()
        _write(unfinished, make)
    except (OSError, pa.ArrowInvalid) as error:
      raise InputError(
        f'{name}: its questions cannot be stored in {folder} ({type(error).__name__}: {error}); '
        'config.data.cache_dir must name a folder that can be written to, with space for them.'
      ) from error
  return Store(folder)


def cache_folder(cache_dir: str) -> pathlib.Path:
  """The folder that config.data.cache_dir names; by default it is TFDS's."""
  named = cache_dir or os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
  return pathlib.Path(named).expanduser()


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f'{split}.arrow'


def _write(
  folder: pathlib.Path, make: Callable[[dict[str, Any]], Mapping[str, Iterable[Record]]]
) -> None:
  facts: dict[str, Any] = {}
  sizes = {}
  for split, records in make(facts).items():
    sizes[split] = 0
    with pa.ipc.new_file(os.fspath(_file(folder, split)), SCHEMA) as file:
      rows = iter(records)
      while batch := list(itertools.islice(rows, _BATCH)):
        file.write_batch(pa.RecordBatch.from_pylist(batch, SCHEMA))
        sizes[split] += len(batch)
  (folder / _FACTS).write_text(json.dumps(facts | {'sizes': sizes}))
