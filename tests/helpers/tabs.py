"""Tabs of a browser, for tests of the page: opened, and read."""

import contextlib


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
