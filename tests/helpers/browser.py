"""A Chromium that this machine may have, driven by playwright, which the package does not need."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from playwright.sync_api import Browser

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')
_ARGUMENTS = (
  '--headless',
  '--no-sandbox',  # it would need rights that containers lack; only pages of ours are opened
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
)


def missing() -> str:
  """What is not installed, in words; '' where a browser can be opened."""
  if importlib.util.find_spec('playwright') is None:
    return 'the package playwright is not installed'
  if _executable() is None:
    return f'no Chromium is installed ({", ".join(_NAMES)})'
  return ''


@contextlib.contextmanager
def opened() -> 'Iterator[Browser]':
  """A headless browser, closed at the end of the block; only where nothing is `missing`."""
  from playwright.sync_api import sync_playwright

  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=_executable(), args=list(_ARGUMENTS))
    try:
      yield browser
    finally:
      browser.close()


def _executable() -> str | None:
  return next(filter(None, map(shutil.which, _NAMES)), None)
