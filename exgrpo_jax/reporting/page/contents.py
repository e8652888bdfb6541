"""The page's contents: a part for the initial view, and parts for each run, loaded on demand.

A part is a JSON value. The page is small enough to email, because everything that grows with a run
is sampled to stay within the limits below.
"""

import base64
import gzip
import hashlib
import html
import itertools
import json
import math
import operator
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import charts, comparison, evaluations, experience, overview
from exgrpo_jax.reporting.page.experience import Pieces
from exgrpo_jax.reporting.runs import Group, Recorded
from exgrpo_jax.runtime.replacement import replacing

# Limits shared by all runs on a page, so that it stays below 15 MB.
_RESPONSES = 400_000  # rows in the table of responses
_TOKENS = 500_000  # tokens in responses shown token by token
_STORED_TOKENS = 150_000  # tokens in stored successes
_CHARACTERS = 5_000_000  # characters of evaluation files whose texts are kept

Parts = dict[str, Any]  # part name -> value


def describe(groups: Sequence[Group], all_responses: bool = False) -> Parts:
  """Return the parts of a page about these runs; each run's 'missing' explains missing data.

  With `all_responses`, the table contains all responses; only a served page may be that large.
  """
  all_runs = [run for group in groups for run in group.runs]
  names = comparison.run_names([run.workdir for run in all_runs])
  parts: Parts = {'page': {'runs': [], 'compare': None, 'title': ', '.join(names)}}
  for index, run in enumerate(all_runs):
    buffer = experience.describe(run)
    replayed_rows = [question['question'] for question in buffer['replayed']]
    limit = math.inf if all_responses else _RESPONSES // len(all_runs)
    run_parts = _parts_of(run, len(all_runs), limit, replayed_rows)
    parts['page']['runs'].append(
      {
        'name': names[index],
        'progress': f'step {run.metrics[-1]["step"]:.0f} of {run.config["num_steps"]}',
        'missing': _missing(run, run_parts),
        'overview': overview.describe(run, run_parts['evaluations'] or []),
        'buffer': buffer,
        'evaluation': {'panels': charts.evaluations(run.metrics)},
      }
    )
    parts |= {f'{name}-{index}': value for name, value in run_parts.items()}
  if len(all_runs) > 1:
    benchmarks = {
      run.workdir: parts[f'evaluations-{index}'] or [] for index, run in enumerate(all_runs)
    }
    parts['page']['compare'] = comparison.describe(groups, benchmarks)
  return parts


def _parts_of(
  run: Recorded, num_runs: int, max_responses: float, replayed_rows: Sequence[int]
) -> Parts:
  """Return a run's on-demand parts. A part without data is None.

  `num_runs` is the number of runs on the page. Stored successes for the questions in
  `replayed_rows` come first.
  """
  workdir = pathlib.Path(run.workdir)
  pieces = open_pieces(run)
  sizes = experience.sizes(workdir) if pieces else {}
  groups = experience.choose(sizes, _TOKENS // num_runs)
  visits = experience.describe_visits(run, max_responses, groups) or None
  texts = stored = None
  if visits:  # the steps whose texts can be requested
    visits['recorded'] = sorted({key.step for key in sizes})
  if pieces and groups:
    responses = experience.read_texts(workdir, groups.__contains__)
    texts = experience.describe_texts(responses, pieces)
  other_rows = [sizes[key].question for key in groups] + run.questions['question'].to_pylist()
  rows = list(dict.fromkeys([*replayed_rows, *other_rows]))
  if pieces and rows:
    trajectories = experience.read_stored(run.workdir, rows, _STORED_TOKENS // num_runs)
    stored = None if trajectories is None else experience.describe_stored(trajectories, pieces)
  benchmarks = evaluations.describe(workdir, _CHARACTERS // num_runs) or None
  return {'visits': visits, 'evaluations': benchmarks, 'texts': texts, 'stored': stored}


def describe_step(run: Recorded, pieces: Pieces, step: int) -> Any:
  """Return a part with all of a step's responses that were recorded token by token.

  Returns None if there are none.
  """
  responses = experience.read_step(pathlib.Path(run.workdir), step)
  return experience.describe_texts(responses, pieces) if responses else None


def describe_steps(run: Recorded) -> Iterator[tuple[int, Any]]:
  """Yield each step that has recorded responses, with the output of `describe_texts` for it."""
  if pieces := open_pieces(run):
    responses = experience.read_texts(pathlib.Path(run.workdir), lambda _: True)
    for step, members in itertools.groupby(responses, operator.itemgetter('step')):
      yield step, experience.describe_texts(members, pieces)


def open_pieces(run: Recorded) -> Pieces | None:
  """Load the run's tokenizer and return its `pieces`, or None if the tokenizer cannot be found.

  A run keeps its tokenizer in its workdir. Earlier versions kept only tokenizers that they had
  trained.
  """
  own_paths = [os.path.join(run.workdir, name) for name in ('tokenizer', 'tokenizer.model')]
  paths = [*own_paths, run.config['tokenizer.path'] or run.config['model.path']]
  for path in filter(os.path.exists, paths):
    try:
      return tokenizer.load(path).pieces
    except InputError:
      continue
  return None


def _missing(run: Recorded, run_parts: Parts) -> list[str]:
  """Explain what the page cannot show about a run, and why."""
  if not run.metrics[-1]['step']:
    return ['No step has finished yet, so only the evaluation before the first step is shown.']
  notes = []
  if not run.questions.num_rows:
    notes.append(
      'There are no step records (in the folder records/), so the Question and Responses pages '
      'are empty, and the Buffer page shows only metrics. Earlier versions wrote no records; a run '
      f'writes its first records after {step_records.STEPS_PER_FILE} steps.'
    )
  elif all(text is None for text in run_parts['visits']['questions']['text']):
    notes.append('This run used an earlier version, which did not record questions and answers.')
  if run.questions.num_rows and run_parts['texts'] is None:
    notes.append(
      'No response can be shown token by token: config.metrics.recorded_groups was 0, the run '
      "used an earlier version, or the run's tokenizer cannot be found."
    )
  if run.questions.num_rows and run_parts['stored'] is None:
    notes.append(
      'No stored successes can be shown: no checkpoint has a readable buffer, or the tokenizer is '
      'missing.'
    )
  if run_parts['evaluations'] is None:
    notes.append('There are no evaluation records (in the folder evaluation/).')
  return notes


# ---- The document ----

# The data is compressed JSON in base64, whose alphabet cannot express markup. The document's
# security policy allows only its own scripts and styles, by hash, and files next to it. So the
# browser loads and runs nothing else, whatever a model has written.

_HERE = pathlib.Path(__file__).parent
# uPlot 1.6.32 (MIT, license in the same folder) as published. It takes 51 KB (Vega 520, plotly
# 1,190) and is made for linked charts with many points.
_CHARTS = _HERE / 'vendor' / 'uPlot.iife.min.js'
_CHART_STYLES = _HERE / 'vendor' / 'uPlot.min.css'


def render(parts: Parts) -> str:
  """Render the HTML document from these parts."""
  style = _read(_CHART_STYLES) + _read(_HERE / 'browser' / 'page.css')
  # One script; start.js comes last, because it calls the functions of the others.
  paths = sorted((_HERE / 'browser').glob('*.js'), key=lambda path: (path.stem == 'start', path))
  page_script = '\n'.join(map(_read, paths))
  script = f'{_read(_CHARTS)}\n{page_script}'
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
  """Write a file atomically: a reader sees either the old file or the complete new one."""
  with replacing(path) as unfinished:
    unfinished.write_text(text, encoding='utf-8')


def pack(value: Any) -> str:
  """Encode a value for the page as compressed JSON in base64."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  data = gzip.compress(text.encode(errors='backslashreplace'), 6, mtime=0)
  return base64.b64encode(data).decode()


def texts_script(name: str, value: Mapping[str, Any]) -> str:
  """Return the script for a file of texts. The page runs the script when it needs the texts."""
  return f'exgrpoTexts({json.dumps(name)},"{pack(value)}")'


def _read(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8')


def _hash(text: str) -> str:
  return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'
