"""Prepares what a data spec names as array_record, once: TFDS builders, found or prepared.

What is prepared lies in a folder of its own under the cache folder, <name>/<config>/<version>.
"""

import contextlib
import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from etils import epath

from exgrpo_jax.data import conflicts, progress, records
from exgrpo_jax.data.columns import Fields, Layout
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.data.tasks.embedded import Record, RecordBuilder, record_features
from exgrpo_jax.errors import InputError

FILE_SPLIT = 'rows'  # the only split of files
_CHUNK = 1 << 20  # bytes
# A new builder asks TFDS's bucket about its data, which TFDS itself keeps switched off: all it does
# is leave an empty folder in the machine's temporary one, each time.
tfds.core.DatasetInfo.initialize_from_bucket = lambda self: None  # noqa: ARG005, the type's name


class LeftOut(NamedTuple):
  """Rows that were left out for one reason."""

  rows: int
  first: str  # where the first of them is, and for conflicting answers the second


class Preparation(NamedTuple):
  """How files were read; kept beside what was prepared of them."""

  layouts: list[str]  # how their columns were read, mostly one line for all files
  left_out: dict[str, LeftOut]  # by reason: rows whose answer cannot be checked


NOTHING = Preparation([], {})


def of_task(cache_dir: str, name: str) -> tfds.core.DatasetBuilder:
  """The embedded task called `name`; InputError where it cannot be stored."""
  return _prepare_own(functools.partial(TASKS[name], **_storage(cache_dir)), name)


def of_files(
  cache_dir: str, fields: Fields, paths: Sequence[str], source: str = ''
) -> tfds.core.DatasetBuilder:
  """The rows of some files in turn, under a name that hashes all that shapes their records.

  `preparation` says how they were read, and which have no answer to check and are left out.

  Args:
    cache_dir: where prepared data is kept.
    fields: what the user says of their columns.
    paths: of spec_names.FILE_ENDINGS; at least one.
    source: of the questions where no column says it; '' is the first file's name.

  Raises:
    InputError: one is not there, cannot be read or stored, or one of its rows cannot be used.
  """
  source = source or epath.Path(paths[0]).stem
  digests = {path: _digest(_chunks(path)) for path in paths}
  named = [(epath.Path(path).name, digest) for path, digest in digests.items()]
  key = _digest([repr((source, *fields, named)).encode()])[:32]
  place = paths[0] if len(paths) == 1 else f'{paths[0]} and {len(paths) - 1} more'
  report = progress.reporter(lambda done: f'{place}: {done:,} questions prepared')
  make = functools.partial(
    _FileBuilder,
    read=functools.partial(_records, digests, fields, source, report),
    config=tfds.core.BuilderConfig(name=key),
    **_storage(cache_dir),
  )
  return _prepare_own(make, place)


def _existing(path: str) -> epath.Path:
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'{path}: there is no such file; a data spec that ends in {file.suffix} must be the '
      'path of a file, absolute or relative to the current folder.'
    )
  return file


def knows(cache_dir: str, name: str) -> bool:
  """Whether TFDS has a dataset called so, or one is prepared."""
  try:
    tfds.builder(name, **_storage(cache_dir))
  except tfds.core.DatasetNotFoundError:
    return False
  except Exception:  # it has one, and refuses the rest of the name
    return True
  return True


def preparation(builder: tfds.core.DatasetBuilder) -> Preparation:
  """Of what `of_files` gave."""
  kept: Any = builder.info.metadata
  left_out = {reason: LeftOut(*values) for reason, values in kept['left_out'].items()}
  return Preparation(kept['layouts'], left_out)


def of_tfds(cache_dir: str, spec: str, name: str) -> tfds.core.DatasetBuilder:
  """A dataset that TFDS knows; InputError where it cannot be prepared."""
  try:
    return _prepare(functools.partial(tfds.builder, name, **_storage(cache_dir)))
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
  """The records of some files, in their order."""

  name = 'question_file'
  VERSION = tfds.core.Version('1.3.0')  # increase it when files are read differently

  def __init__(self, *, read: Callable[[dict[str, Any]], Iterator[Record]], **kwargs: Any) -> None:
    self._read = read
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict({**record_features(), 'columns': tfds.features.Text()}),
      metadata=tfds.core.MetadataDict(),
      disable_shuffling=True,
    )

  def rows(self) -> dict[str, Iterator[Record]]:
    """See RecordBuilder.rows."""
    metadata: Any = self.info.metadata
    return {FILE_SPLIT: self._read(metadata)}


def _chunks(path: str) -> Iterator[bytes]:
  """A file's content, without holding all of it: a prepared file is only hashed."""
  try:
    with _existing(path).open('rb') as opened:
      while chunk := opened.read(_CHUNK):
        yield chunk
  except OSError as error:
    raise InputError(
      f'{path}: the file cannot be read ({error.strerror or error}); check its permissions.'
    ) from error


def _digest(chunks: Iterable[bytes]) -> str:
  hashed = hashlib.sha256()
  for chunk in chunks:
    hashed.update(chunk)
  return hashed.hexdigest()


def _records(
  digests: Mapping[str, str],
  fields: Fields,
  source: str,
  report: Callable[[int], None],
  metadata: dict[str, Any],
) -> Iterator[Record]:
  """The records of files, by path with their digests; `metadata` becomes a `Preparation`."""
  layouts: dict[str, None] = {}
  left_out: dict[str, LeftOut] = {}
  count = 0
  # Read once more, rather than holding all records: what conflicts is known only at the end.
  conflicting = conflicts.find(row for _, rows in _read(digests, fields, source) for row in rows)
  for layout, rows in _read(digests, fields, source):
    layouts |= {layout.describe(): None} if layout else {}
    for place, record in rows:
      if isinstance(record, records.Uncheckable):
        reason = record.reason
      elif (asked := conflicts.key(record['messages'])) in conflicting:
        reason, place = conflicts.REASON, conflicting[asked]
      else:
        report(count)
        count += 1
        yield record
        continue
      so_far = left_out.get(reason, LeftOut(0, place))
      left_out[reason] = so_far._replace(rows=so_far.rows + 1)
  if not count:
    raise InputError(_nothing(next(iter(digests)), left_out))
  metadata.update(Preparation(list(layouts), left_out)._asdict())


def _read(
  digests: Mapping[str, str], fields: Fields, source: str
) -> Iterator[tuple[Layout | None, Iterator[tuple[str, Record | records.Uncheckable]]]]:
  """How each file is read, and of each row the place and the record."""
  for path, digest in digests.items():
    content = b''.join(_chunks(path))
    if _digest([content]) != digest:
      raise InputError(f'{path}: the file changed while it was read; start again when it is whole.')
    layout, rows = records.of_file(fields, path, content, source)
    # Kept without the folder, for the file may be moved.
    folder = path.removesuffix(epath.Path(path).name)
    yield layout, ((place.removeprefix(folder), record) for place, record in rows)


def _nothing(path: str, left_out: Mapping[str, LeftOut]) -> str:
  """The error message where no record is left."""
  for reason, (rows, first) in left_out.items():
    return (
      f'{path}: no row has an answer that can be checked: {reason} ({rows} rows, as at {first}).'
    )
  return f'{path}: the file holds no question; at least one is needed.'
