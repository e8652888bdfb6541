"""The page of a run of the paper's size: its size, and how long it takes to write and to load."""

import pathlib
import re
import sys
import tempfile

from exgrpo_jax.performance import browser, own_process
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.synthetic import run_folder
from exgrpo_jax.performance.synthetic.history import Size

# What a page is held to: small enough for mail, and open before one loses patience.
_MAX_PAGE, _MAX_MEMORY = 15, 1000  # MB
_MAX_LOADING = 2000  # ms
_PART = re.compile(r'<script type="application/gzip" id="part-([^"]+)">([^<]*)</script>')


def measure(size: Size) -> list[Measurement]:
  """Writes the page of an invented run in a process of its own, and opens it.

  Loading is left out where there is no browser, and a note says so.

  Raises:
    subprocess.CalledProcessError: the page could not be written; the output says why.
  """
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as folder:
    workdir, page = pathlib.Path(folder, 'run'), pathlib.Path(folder, 'report.html')
    workdir.mkdir()
    run_folder.write(workdir, size)
    command = [sys.executable, '-m', 'exgrpo_jax', 'report', str(workdir), f'--out={page}']
    usage = own_process.measure(command)
    why = browser.missing()
    note = f'; loading is not measured: {why}' if why else ''
    found = [
      Measurement('page', 1e-6 * page.stat().st_size, 'MB', _parts(page) + note, _MAX_PAGE),
      Measurement(
        'writing',
        usage.seconds,
        's',
        f'{size.steps} steps of {size.questions} x {size.samples} responses',
      ),
      Measurement('memory', usage.megabytes, 'MB', 'the most that the writer held', _MAX_MEMORY),
    ]
    if not why:
      meaning = 'until the first view is drawn, in Chromium'
      found.append(Measurement('loading', _load(page), 'ms', meaning, _MAX_LOADING))
  return found


def _parts(page: pathlib.Path) -> str:
  """How the page divides between its parts, in words."""
  sizes = {name: len(value) for name, value in _PART.findall(page.read_text(encoding='utf-8'))}
  return ', '.join(f'{name} {1e-6 * size:.2f}' for name, size in sizes.items())


def _load(page: pathlib.Path) -> float:
  """Milliseconds from the start of navigation until the page says that it is drawn."""
  with browser.opened() as opened:
    tab = opened.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector('main[data-ready]')
    return float(tab.evaluate('performance.now()'))
