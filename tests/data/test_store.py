"""Prepared data is whole or not there, whatever happens while it is written."""

import pathlib
import resource
import shutil
import subprocess
import sys
import threading

import pytest

from exgrpo_jax.data import store
from exgrpo_jax.errors import InputError

RECORDS = [
  {
    'messages': [{'role': 'user', 'content': f'{n}+0'}],
    'answer': f'{n}',
    'kind': 'math',
    'solution': '',
    'source': 'sums',
    'columns': '{}',
  }
  for n in range(20)
]


def prepared(folder, make=lambda _: {'train': RECORDS}):
  return store.prepared(str(folder), 'sums', 'key', make)


def left(folder):
  return list(pathlib.Path(folder, 'questions').glob('*'))


def test_rows_are_read_in_any_order_from_several_batches(tmp_path, monkeypatch):
  monkeypatch.setattr(store, '_BATCH', 8)
  found = prepared(tmp_path, lambda facts: facts.update(a=1) or {'x': RECORDS, 'y': iter([])})
  assert (found.sizes, found.facts) == ({'x': 20, 'y': 0}, {'a': 1})
  read = found.reader('x')
  for rows in (range(20), [19, 0, 7, 8, 7], []):
    assert read(list(rows)) == [RECORDS[row] for row in rows]
  shutil.rmtree(tmp_path)  # a run goes on when the cache is cleared
  assert read([3]) == [RECORDS[3]]


def test_it_is_made_once_for_a_key(tmp_path):
  prepared(tmp_path)
  assert prepared(tmp_path, None).sizes == {'train': 20}
  store.prepared(str(tmp_path), 'sums', 'other', lambda _: {'train': RECORDS[:1]})
  assert len(left(tmp_path)) == 2


def test_neither_an_error_nor_a_kill_leaves_data_that_looks_prepared(tmp_path):
  script = f"""
import os
from tests.data import test_store
def killed(facts):
  def rows():
    yield from test_store.RECORDS
    os._exit(9)
  return {{'train': rows()}}
test_store.prepared({str(tmp_path)!r}, killed)
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 9
  assert len(left(tmp_path)) == 1  # under another name

  def failing(facts):
    del facts
    raise InputError('a bad row')

  with pytest.raises(InputError, match='a bad row'):
    prepared(tmp_path, failing)
  assert prepared(tmp_path).sizes == {'train': 20}


def test_two_threads_can_prepare_the_same_data_at_once(tmp_path):
  sizes, barrier = [], threading.Barrier(2, timeout=30)

  def rows():
    yield from RECORDS
    barrier.wait()  # neither renames its folder before the other has begun to write

  threads = [
    threading.Thread(
      target=lambda: sizes.append(prepared(tmp_path, lambda _: {'train': rows()}).sizes)
    )
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sizes == [{'train': 20}] * 2 and len(left(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_to_is_refused(tmp_path):
  (tmp_path / 'taken').touch()  # in place of a folder, for root may write anywhere
  with pytest.raises(
    InputError, match=r'sums: .* stored in .*/taken/.*NotADirectoryError.*config\.data\.cache_dir'
  ):
    prepared(tmp_path / 'taken')


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path):
  long = RECORDS[0] | {'solution': '1+' * 100_000}
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    with pytest.raises(InputError, match=r'its questions cannot be stored in .*File too large'):
      prepared(tmp_path, lambda _: {'train': [long]})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert not left(tmp_path)
