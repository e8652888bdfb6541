"""Tabs of a browser, for tests of the page: opened, and read."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING


@contextlib.contextmanager
def open_tab(chromium, width=1280, scheme='light'):
  context = chromium.new_context(
    viewport={'width': width, 'height': 900}, color_scheme=scheme, reduced_motion='reduce'
  )
  opened, complaints = context.new_page(), []
  opened.on('console', lambda message: complaints.append(message.text))
  opened.on('pageerror', lambda error: complaints.append(str(error)))
  opened.on('dialog', lambda dialog: complaints.append(f'dialog {dialog.message}'))
  yield opened
  context.close()
  assert not complaints, complaints


def go(tab, report, address):
  tab.goto('about:blank')  # so that a change after # alone loads the file again
  tab.goto(f'{report.as_uri()}#{address}')
  await_page(tab)


def await_page(tab):
  tab.wait_for_selector('main[data-ready]')
  # Charts are drawn once they have a width.
  tab.locator('.plot:not(:has(.uplot))').first.wait_for(state='detached')


def rows_of(table):
  """The cells of a table's body, as texts."""
  return table.locator('tbody tr').evaluate_all(
    'rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))'
  )


def values_of(tab, title):
  """The table of a chart: {column: values}."""
  figure = tab.locator(f'figure[data-title="{title}"]')
  figure.locator('summary').click()
  figure.locator('table').wait_for()  # made once it is asked for
  head = figure.locator('thead th').all_inner_texts()
  return dict(zip(head, zip(*rows_of(figure.locator('table')))))


def shown(value, digits=3):
  """A number as the page writes it."""
  if value == int(value):
    return f'{int(value):,}'
  if abs(value) >= 1000:
    return f'{value:,.0f}'
  return f'{value:.{digits}f}' if abs(value) >= 0.001 else None  # as 1.23e-4


# ---- The browser ----


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
