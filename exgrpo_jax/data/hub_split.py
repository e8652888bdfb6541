"""Splits of data sets on the Hugging Face Hub: which of a repository's files hold them.

A split is `owner/name:config:split`, or `owner/name:split` where the data set has one config; both
may have a revision, `owner/name@revision:…`. Where its files are is said, in this order, by
  the `configs` in the head of its README.md
  where they lie: config/split-00000-of-00001.parquet, data/split-….parquet, config/split/….parquet
  the branch refs/convert/parquet, to which the Hub converts other formats; but not for a revision
"""

import fnmatch
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import huggingface_hub

from exgrpo_jax.data.spec_names import FILE_ENDINGS
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hub

_CONVERTED = 'refs/convert/parquet'
_ONLY = 'default'  # what the Hub calls the config of a data set that names none
_SPLIT = re.compile(r'(?P<name>[^:]+/[^:]+):((?P<config>[^:]+):)?(?P<split>[^:/]+)')
_ENDINGS = sorted(FILE_ENDINGS, key=lambda ending: ending != '.parquet')  # of several formats one
_SHARD = re.compile(r'(?P<split>\w[\w.]*?)([-_.]\d+-of-\d+(-\w+)?)?')

Layout = Mapping[str, Mapping[str, Sequence[str]]]  # config -> split -> paths of its files


class Split(NamedTuple):
  """A split of a data set on the Hub."""

  repository: hub.Repository
  config: str  # '' where it is the only one
  split: str


def parse(base: str) -> Split | None:
  """The split that a data spec without its slice names; None where it has another form."""
  match = _SPLIT.fullmatch(base)
  repository = hub.parse('dataset', match['name']) if match else None
  return Split(repository, match['config'] or '', match['split']) if match and repository else None


def settle(split: Split) -> None:
  """Has all hosts agree on the commit that holds a split; they call it before `files`.

  Raises InputError where it cannot be fetched, or no such split is there; that says what is.
  """
  _locate(split)


def files(split: Split) -> list[str]:
  """The local files of a split that is settled, in order, fetched where the cache lacks them."""
  repository, paths = _locate(split)
  literal = [re.sub(r'([*?[])', r'[\1]', path) for path in paths]
  folder = hub.fetch(repository, literal)
  return [os.path.join(folder, path) for path in paths]


def _locate(split: Split) -> tuple[hub.Repository, Sequence[str]]:
  """The repository at a commit, and the paths of the split's files there."""
  layout: Layout = {}
  for repository, layout in _layouts(split.repository):
    configs = [split.config] if split.config else list(layout)
    paths = layout.get(configs[0], {}).get(split.split, ()) if len(configs) == 1 else ()
    for ending in _ENDINGS:
      if found := [path for path in paths if path.endswith(ending)]:
        return repository, found
  raise InputError(_absent(split, layout))


def _layouts(named: hub.Repository) -> Iterator[tuple[hub.Repository, Layout]]:
  """The repository at its commit and what is there; then what the Hub has converted, if it has."""
  repository = hub.pinned(named)
  yield repository, _layout(repository)
  if not named.revision:
    try:
      converted = hub.pinned(named._replace(revision=_CONVERTED))
    except hub.NoRevisionError:
      return
    yield converted, _layout(converted)


def refuse_unsplit(repository: hub.Repository) -> NoReturn:
  """Raises InputError for a data set without a split; that says which there are, if it can."""
  form = (
    f"'{repository}' is neither a file nor a split of a data set: of one on the Hub write "
    f'{repository}:CONFIG:SPLIT, as in openai/gsm8k:main:train, or {repository}:SPLIT where it has '
    'one config'
  )
  try:
    found = next((_there(layout) for _, layout in _layouts(repository) if layout), '')
  except InputError as error:
    raise InputError(f'{form}. Which there are is not known: {error}') from error
  raise InputError(f'{form} ({found or "it has none that can be read"}).')


def _there(layout: Layout) -> str:
  """The splits of each config, in words."""
  return '; '.join(
    f'{config}: {", ".join(layout[config]) or "nothing that can be read"}' for config in layout
  )


def _absent(split: Split, layout: Layout) -> str:
  name, there = str(split.repository), _there(layout)
  if not there:
    return (
      f'the data set {name} has no files that can be read ({", ".join(FILE_ENDINGS)}), nor has the '
      f'Hub converted it to parquet; fetch it from {split.repository.page} and convert it.'
    )
  if not split.config and len(layout) > 1:
    return (
      f'the data set {name} has several configs; name one, as in {name}:CONFIG:SPLIT ({there}).'
    )
  wanted = f'{split.config}:{split.split}' if split.config else split.split
  return f"the data set {name} has no '{wanted}' (has: {there})."


# ---- Where the files of a repository lie ----


def _layout(repository: hub.Repository) -> Layout:
  """The splits of a repository at a commit, of files that can be read."""
  folder = hub.fetch(repository, hub.DESCRIPTION)
  paths = [path for path in hub.listing(repository) if path.endswith(FILE_ENDINGS)]
  try:
    head = huggingface_hub.metadata_load(os.path.join(folder, 'README.md')) or {}
    configs = head.get('configs') or []
  except Exception:  # no README.md, or no YAML in it
    configs = []
  return _declared([entry for entry in configs if isinstance(entry, Mapping)], paths) or _by_place(
    paths
  )


def _declared(configs: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> Layout:
  """The splits that the head of README.md declares; a config may have no file that can be read."""
  layout: dict[str, dict[str, list[str]]] = {}
  for entry in configs:
    splits = layout.setdefault(str(entry.get('config_name', _ONLY)), {})
    for split, patterns in _data_files(entry.get('data_files')):
      found = [path for path in paths if any(_matches(path, pattern) for pattern in patterns)]
      if found:
        splits[split] = found
  return layout


def _matches(path: str, pattern: str) -> bool:
  """Whether `*` of the pattern stands for part of one name, and `**` for any number of folders."""
  pattern = posixpath.normpath(pattern)
  is_level = '**' in pattern or path.count('/') == pattern.count('/')
  return is_level and fnmatch.fnmatchcase(path, pattern)


def _data_files(value: Any) -> Iterator[tuple[str, list[str]]]:
  """Splits and patterns of a `data_files`, which may be patterns alone, of the split 'train'."""
  entries = value if isinstance(value, list) else [value] if value else []
  if entries and all(isinstance(entry, str) for entry in entries):
    entries = [{'path': entries}]
  for entry in entries:
    if isinstance(entry, Mapping) and entry.get('path'):
      path = entry['path']
      yield str(entry.get('split', 'train')), path if isinstance(path, list) else [str(path)]


def _by_place(paths: Sequence[str]) -> Layout:
  """The splits of files that lie in one of the usual ways."""
  layout: dict[str, dict[str, list[str]]] = {}
  for path in paths:
    *folders, name = path.split('/')
    stem = name[: name.rindex('.')]
    if stem.isdecimal() and folders:  # config/split/0000.parquet
      split = folders.pop()
    elif match := _SHARD.fullmatch(stem):
      split = match['split']
    else:
      continue
    config = folders[0] if folders and folders[0] != 'data' else _ONLY
    if len(folders) <= 1:
      layout.setdefault(config, {}).setdefault(split, []).append(path)
  return layout
