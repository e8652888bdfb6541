"""What the page holds: one part that it opens with, and parts of each run that it reads on demand.

A part is a value that JSON can hold. The page is small enough for mail: what grows with a run is
sampled, within the limits below.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting.page import charts, comparison, evaluations, experience, overview
from exgrpo_jax.reporting.page.experience import Pieces
from exgrpo_jax.reporting.runs import Group, Recorded
from exgrpo_jax.runtime.replacement import replacing

# Shared by all runs of a page, so that it stays below 15 MB.
_RESPONSES = 400_000  # rows of the table of responses
_TOKENS = 500_000  # of responses token by token
_STORED_TOKENS = 150_000  # of stored successes
_CHARACTERS = 5_000_000  # of evaluations' files whose texts are kept

Parts = dict[str, Any]  # by name


def describe(groups: Sequence[Group], all_responses: bool = False) -> Parts:
  """The parts of a page on these runs; a run's 'missing' says what it lacks.

  With `all_responses` the table has all of them, however many, as a served page may.
  """
  recorded = [run for group in groups for run in group.runs]
  called = comparison.run_names([run.workdir for run in recorded])
  parts: Parts = {'page': {'runs': [], 'compare': None}}
  for index, run in enumerate(recorded):
    buffer = experience.describe(run)
    replayed = [question['question'] for question in buffer['replayed']]
    limit = math.inf if all_responses else _RESPONSES // len(recorded)
    own = _parts_of(run, len(recorded), limit, replayed)
    parts['page']['runs'].append(
      {
        'name': called[index],
        'progress': f'step {run.metrics[-1]["step"]:.0f} of {run.config["num_steps"]}',
        'missing': _missing(run, own),
        'overview': overview.describe(run, own['evaluations'] or []),
        'buffer': buffer,
        'evaluation': {'panels': charts.evaluations(run.metrics)},
      }
    )
    parts |= {f'{name}-{index}': value for name, value in own.items()}
  parts['page']['title'] = ', '.join(called)
  if len(recorded) > 1:
    benchmarks = {
      run.workdir: parts[f'evaluations-{index}'] or [] for index, run in enumerate(recorded)
    }
    parts['page']['compare'] = comparison.describe(groups, benchmarks)
  return parts


def _parts_of(run: Recorded, runs: int, max_responses: float, replayed: Sequence[int]) -> Parts:
  """What the page reads on demand of one of `runs` runs; None for what there is none of.

  `replayed` are the questions whose stored successes are wanted most.
  """
  workdir = pathlib.Path(run.workdir)
  pieces = open_pieces(run)
  sizes = experience.sizes(workdir) if pieces else {}
  chosen = experience.choose(sizes, _TOKENS // runs)
  own: Parts = {
    'visits': experience.describe_visits(run, max_responses, chosen) or None,
    'evaluations': evaluations.describe(workdir, _CHARACTERS // runs) or None,
    'texts': None,
    'stored': None,
  }
  if own['visits']:  # the steps for which it is worth while to ask for texts
    own['visits']['recorded'] = sorted({key.step for key in sizes})
  if pieces and chosen:
    own['texts'] = experience.describe_texts(
      experience.read_texts(workdir, chosen.__contains__), pieces
    )
  others = [sizes[key].question for key in chosen] + run.questions['question'].to_pylist()
  rows = list(dict.fromkeys([*replayed, *others]))
  if pieces and rows:
    found = experience.read_stored(run.workdir, rows, _STORED_TOKENS // runs)
    own['stored'] = None if found is None else experience.describe_stored(found, pieces)
  return own


def describe_step(run: Recorded, pieces: Pieces, step: int) -> Any:
  """All that one step has recorded token by token, as a part; None where it has nothing."""
  found = experience.read_step(pathlib.Path(run.workdir), step)
  return experience.describe_texts(found, pieces) if found else None


def describe_steps(run: Recorded) -> Iterator[tuple[int, Any]]:
  """`describe_step` for each step that has recorded anything."""
  if pieces := open_pieces(run):
    for step, found in experience.read_by_step(pathlib.Path(run.workdir)):
      yield step, experience.describe_texts(found, pieces)


def open_pieces(run: Recorded) -> Pieces | None:
  """The run's tokenizer, as a function; None where there is none any more.

  A run keeps its tokenizer in its workdir; earlier versions kept only one they had made.
  """
  places = (
    os.path.join(run.workdir, 'tokenizer'),
    os.path.join(run.workdir, 'tokenizer.model'),
    run.config['tokenizer.path'] or run.config['model.path'],
  )
  for place in filter(os.path.exists, places):
    try:
      return tokenizer.load(place).pieces
    except InputError:
      continue
  return None


def _missing(run: Recorded, own: Parts) -> list[str]:
  """What the page cannot show of a run, and why."""
  if not run.metrics[-1]['step']:
    return ['No step is finished yet: there is nothing but the evaluation before the first one.']
  notes = []
  if not run.questions.num_rows:
    notes.append(
      'There are no step records (the folder records/): Question and Responses are empty, and '
      'Buffer shows the metrics alone. Earlier versions wrote none; a run writes its first after '
      f'{run.config.get("metrics.records_every", 10)} steps (config.metrics.records_every).'
    )
  elif all(text is None for text in own['visits']['questions']['text']):
    notes.append('The texts of questions and answers are not in the step records of this version.')
  if run.questions.num_rows and own['texts'] is None:
    notes.append(
      'No response is recorded token by token: config.metrics.recorded_groups was 0, the run is of '
      'an earlier version, or its tokenizer cannot be found.'
    )
  if run.questions.num_rows and own['stored'] is None:
    notes.append(
      'There are no stored successes: no checkpoint has a buffer that can be read, or there is no '
      'tokenizer to read it with.'
    )
  if own['evaluations'] is None:
    notes.append('No evaluation is recorded (the folder evaluation/).')
  return notes


# ---- The document ----

# The data is JSON, compressed, in base64, an alphabet in which no markup can be written. The
# document's policy allows its own scripts and styles, by their hashes, and files beside it; nothing
# else is loaded or run, whatever a model has written.


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
