"""Links between the documents, and from them to files, lead somewhere."""

import os
import pathlib

import pytest

from tests.docs import documents
from tests.helpers.paths import REPOSITORY


def broken(path, target):
  """Why a link of the document at `path` leads nowhere; '' where it leads somewhere."""
  file, _, anchor = target.partition('#')
  found = pathlib.Path(os.path.normpath(path.parent / file)) if file else path
  if not found.is_relative_to(REPOSITORY) or not found.exists():
    return f'{target}: no such file'
  if anchor and anchor not in documents.anchors(found):
    return f'{target}: no such heading'
  return ''


@pytest.mark.parametrize('path', [*documents.DOCUMENTS, documents.CHANGELOG], ids=documents.place)
def test_relative_links_lead_to_files_and_headings(path):
  targets = [text for _, text in documents.links(path) if '://' not in text]
  assert list(filter(None, (broken(path, target) for target in targets))) == []


def test_a_link_that_leads_nowhere_is_found():
  page = documents.DOCS / 'index.md'
  assert broken(page, '../README.md') == ''
  assert broken(page, 'measuring.md#benchmarks') == ''
  assert broken(page, '../READMEE.md')
  assert broken(page, 'measuring.md#benchmark')
  assert broken(page, '../../elsewhere.md')


def test_every_page_is_in_the_navigation():
  text = (REPOSITORY / 'mkdocs.yml').read_text()
  assert [path.name for path in documents.DOCS.glob('*.md') if f': {path.name}\n' not in text] == []


# ---- The hook that makes them links to the repository's host ----


@pytest.fixture(scope='module')
def hook():
  return documents.load('hooks').link_to_repository


@pytest.mark.parametrize(
  ('markdown', 'expected'),
  [
    ('[a](../f.py)', '[a](https://host/r/blob/main/f.py)'),
    ('[a](../sub/f.md#b-c)', '[a](https://host/r/blob/main/sub/f.md#b-c)'),
    ('[a](../sub/)', '[a](https://host/r/tree/main/sub)'),
    ('[a](page.md#x) and [b](https://x.org)', '[a](page.md#x) and [b](https://x.org)'),
  ],
  ids=['file', 'anchor', 'folder', 'inside or elsewhere'],
)
def test_links_out_of_the_pages_go_to_the_host(hook, tmp_path, markdown, expected):
  for name in ('f.py', 'sub/f.md', 'docs/page.md'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  docs = tmp_path / 'docs'
  assert hook(markdown, docs, docs, 'https://host/r/') == (expected, [])


def test_the_hook_tells_of_files_that_do_not_exist(hook, tmp_path):
  docs = tmp_path / 'docs'
  docs.mkdir()
  text = '[a](../gone.py) [b](../../outside.py)'
  assert hook(text, docs, docs, 'https://host/r') == (text, ['../gone.py', '../../outside.py'])
