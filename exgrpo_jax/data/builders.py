"""Prepares what a data spec names as array_record, once: TFDS builders, found or prepared.

What is prepared lies in a folder of its own under the cache folder, <name>/<config>/<version>.
"""

import contextlib
import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from exgrpo_jax.data import progress, records
from exgrpo_jax.data.records import Fields
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.data.tasks.embedded import Record, RecordBuilder
from exgrpo_jax.errors import InputError

FILE_SPLIT = 'rows'  # the only split of a file
_CHUNK = 1 << 20  # bytes


def of_task(cache_dir: str, name: str) -> tfds.core.DatasetBuilder:
  """The embedded task called `name`; InputError where it cannot be stored."""
  return _prepare_own(functools.partial(TASKS[name], **_storage(cache_dir)), name)


def of_file(cache_dir: str, fields: Fields, path: str) -> tfds.core.DatasetBuilder:
  """A jsonl or parquet file, under a name that hashes its content and all that shapes its records.

  Raises:
    InputError: it is not there, cannot be read or stored, or one of its rows cannot be used.
  """
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'{path}: there is no such file; a data spec that ends in {file.suffix} must be the '
      'path of a file, absolute or relative to the current folder.'
    )
  key = _key(file, fields, _chunks(file, path))
  report = progress.reporter(lambda done: f'{path}: {done:,} questions prepared')
  make = functools.partial(
    _FileBuilder,
    read=functools.partial(_records, file, fields, path, key, report),
    config=tfds.core.BuilderConfig(name=key),
    **_storage(cache_dir),
  )
  return _prepare_own(make, path)


def of_tfds(cache_dir: str, fields: Fields, spec: str, name: str) -> tfds.core.DatasetBuilder:
  """A dataset that TFDS knows; InputError where it cannot be prepared, or lacks a field."""
  try:
    builder = _prepare(functools.partial(tfds.builder, name, **_storage(cache_dir)))
  except tfds.core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither an embedded task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'finds here. If its builder needs TensorFlow, prepare it on another machine as '
      'array_record, and set config.data.cache_dir to that folder.'
    ) from error
  except Exception as error:  # builders are third-party code and may download files
    raise InputError(
      f"{spec}: TFDS could not prepare '{name}' as array_record ({_reason(error)}). Its builder "
      'must not need TensorFlow, and config.data.cache_dir must be writable, with space for it, '
      'and must not hold it in another format.'
    ) from error
  features = builder.info.features
  present = list(features) if isinstance(features, tfds.features.FeaturesDict) else []
  for key, field in [('question', fields.question), ('answer', fields.answer)]:
    if field not in present:
      raise InputError(records.no_field(spec, field, present, key))
  return builder


def _storage(cache_dir: str) -> dict[str, Any]:
  """The arguments that tell a TFDS builder where and how to store the data."""
  folder = epath.Path(cache_dir).expanduser() if cache_dir else None
  return {'data_dir': folder, 'file_format': 'array_record'}


def _prepare_own(
  make: Callable[[], tfds.core.DatasetBuilder], place: str
) -> tfds.core.DatasetBuilder:
  """`_prepare` for builders of ours: what goes wrong, but for bad rows, is the storage."""
  try:
    return _prepare(make)
  except (OSError, RuntimeError) as error:  # the latter from array_record, for a full disk
    raise InputError(
      f'{place}: its questions cannot be stored in {make().data_path} ({_reason(error)}); '
      'config.data.cache_dir must name a folder that can be written to, with space for them.'
    ) from error


def _prepare(make: Callable[[], tfds.core.DatasetBuilder]) -> tfds.core.DatasetBuilder:
  builder = make()
  tfds.disable_progress_bar()  # it prints pages for seconds of work
  try:
    # TFDS writes to incomplete.* and renames at the end, so a killed process leaves no
    # partial data under the final name.
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
      )
  except OSError:
    builder = make()
    if not builder.is_prepared():  # otherwise another process renamed its folder first
      raise
  return builder


def _reason(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]


# ---- Files ----


class _FileBuilder(RecordBuilder, skip_registration=True):
  """The records of one jsonl or parquet file, in its order."""

  name = 'question_file'
  VERSION = tfds.core.Version('1.1.0')  # increase it when records.py reads files differently

  def __init__(self, *, read: Callable[[], Iterator[Record]], **kwargs: Any) -> None:
    self._read = read
    super().__init__(**kwargs)

  def rows(self) -> dict[str, Iterator[Record]]:
    """See RecordBuilder.rows."""
    return {FILE_SPLIT: self._read()}


def _key(file: epath.Path, fields: Fields, chunks: Iterable[bytes]) -> str:
  """A hash of a file's content, in `chunks`, and of all else that shapes its records."""
  hashed = hashlib.sha256(repr((file.suffix, file.stem, *fields)).encode())
  for chunk in chunks:
    hashed.update(chunk)
  return hashed.hexdigest()[:32]


def _chunks(file: epath.Path, path: str) -> Iterator[bytes]:
  """The file's content, without holding all of it: a prepared file is only hashed."""
  try:
    with file.open('rb') as opened:
      while chunk := opened.read(_CHUNK):
        yield chunk
  except OSError as error:
    raise InputError(
      f'{path}: the file cannot be read ({error.strerror or error}); check its permissions.'
    ) from error


def _records(
  file: epath.Path, fields: Fields, path: str, key: str, report: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
  """The records of the file whose key is `key`."""
  content = b''.join(_chunks(file, path))
  if _key(file, fields, [content]) != key:
    raise InputError(f'{path}: the file changed while it was read; start again when it is whole.')
  reader = records.jsonl_rows if file.suffix == '.jsonl' else records.parquet_rows
  for row, record in enumerate(records.non_empty(reader(fields, path, content), path)):
    report(row)
    yield record
