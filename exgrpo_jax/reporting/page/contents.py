"""What the page holds: one part that it opens with, and parts of each run that it reads on demand.

A part is a value that JSON can hold. The page is small enough for mail: what grows with a run is
sampled, within the limits below.
"""

import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting.figures.runs import Group, Recorded
from exgrpo_jax.reporting.page import (
  comparison,
  evaluations,
  experience,
  names,
  overview,
  stored,
  texts,
  visits,
)
from exgrpo_jax.reporting.page.overview import Difference
from exgrpo_jax.reporting.page.texts import Pieces

# What all runs of a page share, so that it stays below 15 MB: `benchmark report` measures it.
_RESPONSES = 400_000  # rows of the table of responses
_TOKENS = 500_000  # of responses token by token
_STORED_TOKENS = 150_000  # of stored successes
_CHARACTERS = 5_000_000  # of evaluations' files, of which texts are kept

Parts = dict[str, Any]  # by name


def describe(
  groups: Sequence[Group],
  differences: Callable[[Recorded], Sequence[Difference]],
  all_responses: bool = False,
) -> Parts:
  """The parts of a page on these runs; what a run lacks is told in its 'missing'.

  Args:
    groups: the runs by setting.
    differences: what a run's config has otherwise than the base config.
    all_responses: the table of responses has all of them, however many, as a page that is no file
      may.
  """
  recorded = [run for group in groups for run in group.runs]
  called = names.of_runs([run.workdir for run in recorded])
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
        'overview': overview.describe(run, differences(run)),
        'buffer': buffer,
        'evaluation': evaluations.describe_scores(run),
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
  """What is read on demand of one of so many runs; None where there is none of it.

  `replayed` are the questions whose stored successes are wanted most.
  """
  workdir = pathlib.Path(run.workdir)
  pieces = open_pieces(run)
  sizes = texts.sizes(workdir) if pieces else {}
  chosen = texts.choose(sizes, _TOKENS // runs)
  own: Parts = {
    'visits': visits.describe(run, max_responses, chosen) or None,
    'evaluations': evaluations.describe(workdir, _CHARACTERS // runs) or None,
    'texts': None,
    'stored': None,
  }
  if own['visits']:  # where it is worth while to ask for texts
    own['visits']['recorded'] = sorted({key.step for key in sizes})
  if pieces and chosen:
    own['texts'] = texts.describe(texts.read(workdir, chosen.__contains__), pieces)
  others = [sizes[key].question for key in chosen] + run.questions['question'].to_pylist()
  rows = list(dict.fromkeys([*replayed, *others]))
  if pieces and rows:
    found = stored.read(run.workdir, rows, _STORED_TOKENS // runs)
    own['stored'] = None if found is None else texts.describe_stored(found, pieces)
  return own


def describe_step(run: Recorded, pieces: Pieces, step: int) -> Any:
  """All that is recorded token by token of one step, as a part; None where nothing is."""
  found = texts.read_step(pathlib.Path(run.workdir), step)
  return texts.describe(found, pieces) if found else None


def describe_steps(run: Recorded) -> Iterator[tuple[int, Any]]:
  """The same of each step of which anything is."""
  if pieces := open_pieces(run):
    for step, found in texts.read_by_step(pathlib.Path(run.workdir)):
      yield step, texts.describe(found, pieces)


def open_pieces(run: Recorded) -> Pieces | None:
  """How token ids become text: by the run's tokenizer; None where there is none any more.

  A run keeps its tokenizer in its workdir; those of earlier versions kept only one of their own.
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
