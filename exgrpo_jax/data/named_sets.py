"""Load datasets by name, from the Hugging Face Hub or TFDS.

A Hub split is written `owner/name:config:split`, or `owner/name:split` if the dataset has only
one config. Either form may include a revision: `owner/name@revision:…`. Only parquet files are
read: the repository's own if they have standard paths (config/split-00000-of-00001.parquet,
data/split-….parquet, config/split/….parquet), otherwise those on the branch refs/convert/parquet,
where the Hub stores the files it has converted. With a revision, only that revision's files are
used. A TFDS name can have the same form. If TFDS knows the name, its dataset is used.
"""

import contextlib
import functools
import io
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from exgrpo_jax.data import row_files, store
from exgrpo_jax.data.row_files import RowFile, Table
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hub

_CONVERTED = 'refs/convert/parquet'
_ONLY_CONFIG = 'default'  # the Hub's name for the config of a dataset without named configs
_SPLIT = re.compile(r'(?P<name>[^:]+/[^:]+):((?P<config>[^:]+):)?(?P<split>[^:/]+)')
_SHARD = re.compile(r'(?P<split>\w[\w.]*?)([-_.]\d+-of-\d+(-\w+)?)?')
_BATCH = 1000  # TFDS rows per read

Layout = Mapping[str, Mapping[str, Sequence[str]]]  # config -> split -> paths of its files


class HubSplit(NamedTuple):
  """A split of a dataset on the Hub."""

  repository: hub.Repository
  config: str  # '' means the only config
  split: str


def parse(base: str) -> HubSplit | None:
  """Parse a data spec (without its slice) as a Hub split; return None if it isn't one."""
  match = _SPLIT.fullmatch(base)
  if match and (repository := hub.parse('dataset', match['name'])):
    return HubSplit(repository, match['config'] or '', match['split'])
  return None


def on_hub(cache_dir: str, base: str) -> HubSplit | None:
  """Return the Hub split named by a data spec (without its slice), or None for other specs.

  Raises InputError if the spec names a Hub dataset without a split.
  """
  if base.endswith(row_files.ENDINGS) or row_files.task_file(base):
    return None
  split = parse(base)
  repository = split.repository if split else hub.parse('dataset', base)
  if not repository or _tfds_knows(cache_dir, repository.name):
    return None
  is_file = os.path.splitext(base)[1][1:].isalpha()  # a file in an unsupported format
  if not split and not is_file and not os.path.exists(base):
    _refuse_unsplit(repository)
  return split


# ---- The Hub ----


def files(split: HubSplit) -> list[str]:
  """Return the local paths of a split's files, in order; fetch any that aren't cached."""
  repository, paths = locate(split)
  literal = [re.sub(r'([*?[])', r'[\1]', path) for path in paths]
  folder = hub.fetch(repository, literal)
  return [os.path.join(folder, path) for path in paths]


def locate(split: HubSplit) -> tuple[hub.Repository, Sequence[str]]:
  """Return the repository, pinned to a commit, and the paths of the split's files in it.

  All hosts must call this before `files`, to agree on the commit. Raises InputError if the split
  cannot be fetched or does not exist. If it does not exist, the message lists the splits that do.
  """
  layout: Layout = {}
  for repository, layout in _layouts(split.repository):
    configs = [split.config] if split.config else list(layout)
    if len(configs) == 1 and (paths := layout.get(configs[0], {}).get(split.split)):
      return repository, paths
  raise InputError(_no_split(split, layout))


def _layouts(repository: hub.Repository) -> Iterator[tuple[hub.Repository, Layout]]:
  """Yield the pinned repository and its layout, then the same for the Hub's parquet branch.

  The branch is skipped if the repository has no such branch, or if a revision is set.
  """
  default_branch = hub.pinned(repository)
  yield default_branch, _layout(default_branch)
  if not repository.revision:
    try:
      converted_branch = hub.pinned(repository._replace(revision=_CONVERTED))
    except hub.NoRevisionError:
      return
    yield converted_branch, _layout(converted_branch)


def _layout(repository: hub.Repository) -> Layout:
  """Infer a pinned repository's splits from the paths of its parquet files."""
  hub.fetch(repository, hub.DESCRIPTION)  # this also fetches the listing
  layout: dict[str, dict[str, list[str]]] = {}
  for path in hub.listing(repository):
    *folders, name = path.split('/')
    stem, ending = os.path.splitext(name)
    if stem.isdecimal() and folders:  # config/split/0000.parquet
      split = folders.pop()
    else:
      match = _SHARD.fullmatch(stem)
      split = match['split'] if match else ''
    config = folders[0] if folders and folders[0] != 'data' else _ONLY_CONFIG
    if ending == '.parquet' and split and len(folders) <= 1:
      layout.setdefault(config, {}).setdefault(split, []).append(path)
  return layout


def _refuse_unsplit(repository: hub.Repository) -> NoReturn:
  """Raise InputError because a spec has no split; list the dataset's splits if possible."""
  form = (
    f"'{repository}': there is no such file, and a Hub dataset needs a split. Write "
    f'{repository}:CONFIG:SPLIT, as in openai/gsm8k:main:train, or {repository}:SPLIT if the '
    'dataset has only one config'
  )
  try:
    splits = next((_list_splits(layout) for _, layout in _layouts(repository) if layout), '')
  except InputError as error:
    message = f'{form}. The splits of this dataset could not be listed: {error}'
    raise InputError(message, status=2) from error
  raise InputError(f'{form} ({splits or "the dataset has no parquet splits"}).')


def _list_splits(layout: Layout) -> str:
  """List each config's splits for an error message."""
  return '; '.join(f'{config}: {", ".join(layout[config])}' for config in layout)


def _no_split(split: HubSplit, layout: Layout) -> str:
  repository, splits = split.repository, _list_splits(layout)
  if not splits:
    why = (
      'the Hub converts only the default branch. Remove the revision, or'
      if repository.revision
      else f'the Hub has not converted it to parquet ({_CONVERTED}). Only parquet is read from the '
      'Hub, so'
    )
    return (
      f'the dataset {repository} has no parquet files at the usual paths for splits, and {why} '
      f'download its files from {repository.page}, convert them if necessary, and use the local '
      'files.'
    )
  if not split.config and len(layout) > 1:
    return (
      f'the dataset {repository} has several configs. Name one, as in {repository}:CONFIG:SPLIT '
      f'({splits}).'
    )
  name = f'{split.config}:{split.split}' if split.config else split.split
  return f"the dataset {repository} has no '{name}' (has: {splits})."


# ---- TFDS, imported only when needed ----


def of_tfds(cache_dir: str, spec: str, name: str, split: str) -> RowFile:
  """Return a TFDS split, prepared as array_record. Raises InputError if it does not exist."""
  builder = _prepare_tfds(cache_dir, spec, name)
  splits = builder.info.splits
  if split not in splits:
    raise InputError(f"{spec}: {name} has no split '{split}' (has: {', '.join(splits)}).")
  path, features = f'{name}:{split}', builder.info.features
  columns = list(features) if isinstance(features, _tfds().features.FeaturesDict) else []

  def rows(without: Collection[str]) -> row_files.Rows:
    source = builder.as_data_source(split)
    for start in range(0, len(source), _BATCH):
      numbers = range(start, min(start + _BATCH, len(source)))
      for number, values in zip(numbers, source.__getitems__(list(numbers))):
        row = {column: value for column, value in values.items() if column not in without}
        yield f'{path}: row {number}', row

  def digest() -> str:
    return ' '.join(row_files.digest(os.fspath(file)) for file in splits[split].filepaths)

  return RowFile(path, digest, lambda: Table(lambda: columns, rows))


@functools.cache
def _tfds() -> Any:
  """Import TFDS, and disable its bucket requests because they leave empty folders in /tmp."""
  import tensorflow_datasets as tfds

  tfds.core.DatasetInfo.initialize_from_bucket = lambda self: None  # noqa: ARG005, the type's name
  tfds.disable_progress_bar()  # it prints pages of output for a few seconds of work
  return tfds


def _builder(cache_dir: str, name: str) -> Any:
  folder = os.fspath(store.cache_folder(cache_dir))
  return _tfds().builder(name, data_dir=folder, file_format='array_record')


def _tfds_knows(cache_dir: str, name: str) -> bool:
  """Return True if TFDS provides a dataset with this name, or if one has been prepared here."""
  try:
    _builder(cache_dir, name)
  except _tfds().core.DatasetNotFoundError:
    return False
  except Exception:  # the dataset exists, but TFDS rejects the rest of the name
    return True
  return True


def _prepare_tfds(cache_dir: str, spec: str, name: str) -> Any:
  """Prepare a dataset and return its builder; raise InputError if that fails."""
  try:
    builder = _builder(cache_dir, name)
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare(
          download_config=_tfds().download.DownloadConfig(try_download_gcs=False)
        )
    except OSError:
      builder = _builder(cache_dir, name)
      if not builder.is_prepared():  # otherwise, another process has prepared it first
        raise
  except _tfds().core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither a built-in task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'can find on this machine. If its builder needs TensorFlow, prepare it as array_record on '
      'another machine and set config.data.cache_dir to the folder that contains the result.'
    ) from error
  except Exception as error:  # builders are third-party code and may download files
    reason = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise InputError(
      f"{spec}: TFDS could not prepare '{name}' as array_record ({reason}). Its builder must work "
      'without TensorFlow. config.data.cache_dir must be writable, have enough free space and not '
      'already contain the dataset in a different format.'
    ) from error
  return builder
