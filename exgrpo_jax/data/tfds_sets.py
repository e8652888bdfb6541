"""Data sets of TFDS by name, prepared as array_record. TFDS is imported when one is asked for."""

import contextlib
import functools
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from exgrpo_jax.data import store
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.errors import InputError


@functools.cache
def _tfds() -> Any:
  """The library, without its requests to a bucket of its own, which leave empty folders in /tmp."""
  import tensorflow_datasets as tfds

  tfds.core.DatasetInfo.initialize_from_bucket = lambda self: None  # noqa: ARG005, the type's name
  tfds.disable_progress_bar()  # it prints pages for seconds of work
  return tfds


def _builder(cache_dir: str, name: str) -> Any:
  folder = os.fspath(store.cache_folder(cache_dir))
  return _tfds().builder(name, data_dir=folder, file_format='array_record')


def knows(cache_dir: str, name: str) -> bool:
  """Whether TFDS has a data set called so, or one is prepared."""
  try:
    _builder(cache_dir, name)
  except _tfds().core.DatasetNotFoundError:
    return False
  except Exception:  # it has one, and refuses the rest of the name
    return True
  return True


def prepared(cache_dir: str, spec: str, name: str) -> Any:
  """The builder of a data set that TFDS knows; InputError where it cannot be prepared."""
  try:
    return _prepare(functools.partial(_builder, cache_dir, name))
  except _tfds().core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither an embedded task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'finds here. If its builder needs TensorFlow, prepare it on another machine as '
      'array_record, and set config.data.cache_dir to that folder.'
    ) from error
  except Exception as error:  # builders are third-party code and may download files
    reason = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise InputError(
      f"{spec}: TFDS could not prepare '{name}' as array_record ({reason}). Its builder must not "
      'need TensorFlow, and config.data.cache_dir must be writable, with space for it, and hold it '
      'in no other format.'
    ) from error


def _prepare(make: Callable[[], Any]) -> Any:
  builder = make()
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare(
        download_config=_tfds().download.DownloadConfig(try_download_gcs=False)
      )
  except OSError:
    builder = make()
    if not builder.is_prepared():  # otherwise another process renamed its folder first
      raise
  return builder


def columns(builder: Any) -> list[str]:
  """The names of its columns."""
  features = builder.info.features
  return list(features) if isinstance(features, _tfds().features.FeaturesDict) else []


def reader(builder: Any, split: str) -> Callable[[list[int]], list[Any]]:
  """A function from rows of a split to what they hold, by column."""
  read = builder.as_data_source(split).__getitems__
  # A row of each file, which stays open: the run can read on when the cache is cleared.
  read(np.cumsum([0, *builder.info.splits[split].shard_lengths])[:-1].tolist())
  return read
