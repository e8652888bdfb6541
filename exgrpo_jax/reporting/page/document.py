"""The page's file: its data, styles and scripts in one HTML document that loads nothing else.

The data is JSON, compressed, in base64, an alphabet in which no markup can be written. The
document's policy allows its own scripts and styles, by their hashes, and files beside it; nothing
else is loaded or run, whatever a model has written.
"""

import base64
import gzip
import hashlib
import html
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.reporting.page.contents import Parts
from exgrpo_jax.runtime.replacement import replacing

_HERE = pathlib.Path(__file__).parent
# uPlot 1.6.32 (MIT, its licence beside it) as published: 51 KB where Vega has 520 and plotly 1,190,
# and made for linked charts of many points.
_CHARTS = _HERE / 'vendor' / 'uPlot.iife.min.js'
_CHART_STYLES = _HERE / 'vendor' / 'uPlot.min.css'
_SCRIPTS = (  # one after the other they are one script
  'dom',
  'state',
  'charts',
  'panels',
  'tokens',
  'overview',
  'buffer',
  'question',
  'solutions',
  'filters',
  'responses',
  'evaluation',
  'compare',
  'start',
)


def render(parts: Parts) -> str:
  """The document with these parts."""
  style = _read(_CHART_STYLES) + _read(_HERE / 'browser' / 'page.css')
  own = '\n'.join(_read(_HERE / 'browser' / f'{name}.js') for name in _SCRIPTS)
  script = f'{_read(_CHARTS)}\n{own}'
  policy = (
    f"default-src 'none'; script-src '{_hash(script)}' 'self'; style-src '{_hash(style)}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
  )
  blocks = '\n'.join(
    f'<script type="application/gzip" id="part-{name}">{pack(value)}</script>'
    for name, value in parts.items()
    if value is not None
  )
  values = {
    'policy': html.escape(policy, quote=False),
    'title': html.escape(parts['page']['title']),
    'style': style,
    'script': script,
    'parts': blocks,
  }
  template = _read(_HERE / 'browser' / 'page.html')
  return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)


def write(path: pathlib.Path, text: str) -> None:
  """Write a file; a reader sees the old one or the new one, complete."""
  with replacing(path) as unfinished:
    unfinished.write_text(text, encoding='utf-8')


def pack(value: Any) -> str:
  """A value as the page unpacks it."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  packed = gzip.compress(text.encode(errors='backslashreplace'), 6, mtime=0)
  return base64.b64encode(packed).decode()


def texts_script(name: str, value: Mapping[str, Any]) -> str:
  """A file of texts, which the page runs when it needs them."""
  return f'exgrpoTexts({json.dumps(name)},"{pack(value)}")'


def _read(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8')


def _hash(text: str) -> str:
  return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'
