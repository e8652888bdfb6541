"""A file or a folder is written completely or not at all."""

import pytest

from exgrpo_jax.runtime.replacement import replacing


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_place_at_the_end(tmp_path):
  path = tmp_path / 'made' / 'file.txt'
  for text in ('old', 'new'):
    with replacing(path) as unfinished:
      unfinished.write_text(text)
      assert not path.exists() or path.read_text() == 'old'
  assert path.read_text() == 'new' and names(path.parent) == ['file.txt']


def test_what_fails_or_writes_nothing_leaves_what_was_there(tmp_path):
  path = tmp_path / 'file.txt'
  path.write_text('old')

  def interrupted():
    with replacing(path) as unfinished:
      unfinished.write_text('half')
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  with replacing(path):
    pass
  assert path.read_text() == 'old' and names(tmp_path) == ['file.txt']


def test_what_a_kill_left_is_not_in_a_new_folder(tmp_path):
  path = tmp_path / 'folder'
  with replacing(path) as unfinished:
    left = unfinished
    unfinished.mkdir()
  left.mkdir()
  (left / 'half').touch()
  with replacing(path) as unfinished:
    unfinished.mkdir()
    (unfinished / 'whole').touch()
  assert names(path) == ['whole'] and names(tmp_path) == ['folder']


def test_of_several_that_write_a_folder_the_first_wins(tmp_path):
  path = tmp_path / 'folder'
  with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
    assert first != second
    for unfinished in (first, second):
      unfinished.mkdir()
      (unfinished / 'of').write_text(unfinished.name)
  assert (path / 'of').read_text() == second.name and names(tmp_path) == ['folder']


def test_where_a_folder_cannot_be_put_it_is_an_error(tmp_path):
  (tmp_path / 'folder').write_text('a file')
  with pytest.raises(NotADirectoryError), replacing(tmp_path / 'folder', shared=True) as unfinished:
    unfinished.mkdir()
  assert names(tmp_path) == ['folder']
