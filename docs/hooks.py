"""A mkdocs hook that turns links to files outside docs/ into links to the repository's host.

The pages use relative paths for links to code (../exgrpo_jax/train.py), so these links also work on
the repository's host. A link to a file that does not exist causes a warning, which --strict turns
into a failure.
"""

import logging
import os
import pathlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from mkdocs.config.defaults import MkDocsConfig
  from mkdocs.structure.files import Files
  from mkdocs.structure.pages import Page

BRANCH = 'main'

_LOG = logging.getLogger('mkdocs.hooks.repository_links')  # below 'mkdocs': --strict counts them
_LINK = re.compile(r'(?<=\]\()(?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?(?=\))')


def on_page_markdown(markdown: str, page: 'Page', config: 'MkDocsConfig', files: 'Files') -> str:
  """Rewrite the links of a page. mkdocs calls this function with each page's source."""
  del files
  docs = pathlib.Path(config.docs_dir)
  folder = (docs / page.file.src_uri).parent
  text, missing = link_to_repository(markdown, folder, docs, config.repo_url or '')
  for path in missing:
    _LOG.warning(f"{page.file.src_uri}: '{path}' does not exist in the repository.")
  return text


def link_to_repository(
  markdown: str, folder: pathlib.Path, docs: pathlib.Path, repo_url: str
) -> tuple[str, list[str]]:
  """Rewrite a page's links to files outside `docs`. Also return the links without a target.

  Args:
    markdown: the page.
    folder: the page's folder, to which its links are relative.
    docs: the folder of all pages, at the top of the repository.
    repo_url: the repository on its host.
  """
  missing = []

  def rewrite(match: re.Match[str]) -> str:
    target = pathlib.Path(os.path.normpath(folder / match['path']))
    if target.is_relative_to(docs):
      return match[0]
    if not target.is_relative_to(docs.parent) or not target.exists():
      missing.append(match['path'])
      return match[0]
    kind = 'tree' if target.is_dir() else 'blob'
    inside = target.relative_to(docs.parent).as_posix()
    return f'{repo_url.rstrip("/")}/{kind}/{BRANCH}/{inside}{match["anchor"] or ""}'

  return _LINK.sub(rewrite, markdown), missing
