"""A run's experience: the replay buffer, visits to questions, responses token by token."""

import collections
import itertools
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from exgrpo_jax.datatypes import Trajectory
from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.page.charts import Line, Panel, flags, floats, rounded
from exgrpo_jax.reporting.runs import Recorded

Pieces = Callable[[Sequence[int]], list[str]]  # token ids -> the text of each


class Group(NamedTuple):
  """The key of a group. A group consists of the responses to one question in one step."""

  step: int
  group: int


# ---- The buffer ----

_MOST_REPLAYED = 50  # questions in the table
_AGE_BINS = 40  # maximum number of bins


def describe(run: Recorded) -> dict[str, Any]:
  """Describe the buffer with a heat map, curves and a table of the recorded data.

  Everything is empty for a run without replay, which never reads its buffer.
  """
  if not run.config['replay.ratio']:
    return {'is_used': False, 'panels': [], 'replayed': []}
  replays = run.responses.filter(run.responses['is_replay'])
  panels = charts.buckets(run.metrics)
  if run.questions.num_rows:
    panels.append(_flow(run.questions))
  if replays.num_rows:
    panels += [_ages(replays), _entropies(replays), *_by_age(replays)]
  return {'is_used': True, 'panels': panels, 'replayed': _most_replayed(run.questions, replays)}


def _flow(questions: pa.Table) -> Panel:
  """Plot how many questions entered the buffer, changed buckets, retired and were replayed."""
  step = questions['step'].to_numpy()
  before, after = (floats(questions[f'bucket_{when}']) for when in ('before', 'after'))
  was_in, is_in = ~np.isnan(before), ~np.isnan(after)
  steps = np.unique(step)
  flows = {
    'entered': is_in & ~was_in,
    'moved to another bucket': was_in & is_in & (before != after),
    'retired': ~np.isnan(floats(questions['retired_step'])),
    'replayed': flags(questions['is_replay']),
  }
  lines = [
    Line(label, steps, np.bincount(np.searchsorted(steps, step[mask]), minlength=len(steps)))
    for label, mask in flows.items()
  ]
  return charts.lines('Questions entering and leaving', 'questions', lines)


def _ages(replays: pa.Table) -> Panel:
  """Plot the median age of replayed trajectories, and a band for the 10th to 90th percentiles."""
  step = replays['step'].to_numpy()
  steps, starts = np.unique(step, return_index=True)  # the table is sorted by step
  by_step = np.split(step - replays['policy_step'].to_numpy(), starts[1:])
  low, median, high = np.array([np.quantile(ages, (0.1, 0.5, 0.9)) for ages in by_step]).T
  line = Line('median; band: 10% to 90%', steps, median, (steps, low, high))
  return charts.lines('Age of replayed trajectories', 'steps', [line])


def _entropies(replays: pa.Table) -> Panel:
  """Plot the mean token entropy of the chosen trajectories, and of all candidates."""
  step, entropies = replays['step'].to_numpy(), floats(replays['entropy'])
  steps = np.unique(step)
  lines = [Line('chosen', steps, _means(steps, step, entropies))]
  candidates = replays['candidate_entropies'].combine_chunks()
  counts = np.asarray(candidates.value_lengths().fill_null(0))
  has_several = counts > 1
  if has_several.any():
    candidate_steps = np.repeat(step, counts)[np.repeat(has_several, counts)]
    values = np.asarray(candidates.flatten(), np.float64)[np.repeat(has_several, counts)]
    several_steps = np.unique(candidate_steps)
    means = _means(several_steps, step[has_several], entropies[has_several])
    lines.append(Line('chosen from several', several_steps, means))
    lines.append(
      Line('all candidates', several_steps, _means(several_steps, candidate_steps, values))
    )
  return charts.lines('Entropy of replayed trajectories', 'nats per token', lines)


def _by_age(replays: pa.Table) -> list[Panel]:
  """Plot the importance ratio, effective sample size and number of replays by age.

  The effective sample size is (sum w)^2 / (n sum w^2) over all tokens of the same age, as in the
  metric of that name. It requires the variance of w, which earlier versions did not record.
  """
  age = replays['step'].to_numpy() - replays['policy_step'].to_numpy()
  width = max(1, -(-int(age.max() + 1) // _AGE_BINS))
  group = age // width
  bins = np.unique(group)
  place, middle = np.searchsorted(bins, group), bins * width + (width - 1) / 2
  tokens, ratio = floats(replays['length']), floats(replays['ratio_mean'])

  def total(values: np.ndarray) -> np.ndarray:
    return np.bincount(place, weights=values, minlength=len(bins))

  mean = total(tokens * ratio) / total(tokens)
  largest = np.full(len(bins), -np.inf)
  np.maximum.at(largest, place, floats(replays['ratio_max']))
  x = 'age' if width == 1 else f'age (groups of {width} steps)'
  ratios = [Line('mean over tokens', middle, mean), Line('largest', middle, largest)]
  panels = [
    charts.lines('Importance ratio by age', 'ratio, log scale', ratios, x=x, log=True, smooth=False)
  ]
  variance = floats(replays['ratio_variance'])
  if not np.isnan(variance).all():
    squares = total(tokens * (variance + ratio**2))
    size = total(tokens * ratio) ** 2 / (total(tokens) * squares)
    line, title = Line('effective sample size', middle, size), 'Effective sample size by age'
    panels.append(charts.lines(title, 'share of tokens', [line], x=x, share=True, smooth=False))
  counts = Line('replays', middle, np.bincount(place, minlength=len(bins)))
  return [*panels, charts.lines('Replays by age', 'responses', [counts], x=x, smooth=False)]


def _most_replayed(questions: pa.Table, replays: pa.Table) -> list[dict[str, Any]]:
  """Return the most replayed questions, with facts about their first and last visits."""
  rows, counts = np.unique(replays['question'].to_numpy(), return_counts=True)
  top_rows = rows[np.argsort(-counts, kind='stable')][:_MOST_REPLAYED]
  visits = {row: [] for row in top_rows.tolist()}
  is_wanted = np.isin(questions['question'].to_numpy(), top_rows)
  for visit in questions.filter(pa.array(is_wanted)).to_pylist():
    visits[visit['question']].append(visit)
  replay_counts = dict(zip(rows.tolist(), counts.tolist()))
  return [
    {
      'question': row,
      'replays': replay_counts[row],
      'visits': len(row_visits),
      'first': row_visits[0]['correctness'],
      'last': row_visits[-1]['correctness'],
      'step': row_visits[-1]['step'],
      'retired': next(
        (visit['retired_step'] for visit in row_visits if visit['retired_step'] is not None), None
      ),
    }
    for row, row_visits in visits.items()
    if row_visits  # empty if the file with the visits is missing or not yet written
  ]


def _means(steps: np.ndarray, step: np.ndarray, values: np.ndarray) -> np.ndarray:
  place = np.searchsorted(steps, step)
  counts = np.bincount(place, minlength=len(steps))
  return np.bincount(place, weights=values, minlength=len(steps)) / counts


# ---- Visits of questions ----

# A visit is a question in a step. A run may have a hundred thousand visits and eight times as many
# responses, so the page limits the responses.

_MAX_ANSWER = 60  # characters of an extracted answer
_WHOLE_TEXTS = 2_000_000  # characters; up to this total, all questions keep their full texts
# Characters kept per text if the total is larger. Most questions are visited once.
_MAX_TEXT, _MAX_TEXT_ONCE = 400, 120
_ENTROPY_DIGITS = 4


def describe_visits(
  run: Recorded, max_responses: float, with_texts: Collection[Group] = ()
) -> dict[str, Any]:
  """Return the columns of questions, visits, responses and replays; {} if there are no records.

  A visit's responses start at the index 'first'. 'replays' contains a value for each visit with a
  replay, in visit order. With more than `max_responses` responses, 'every' is n > 1, and only every
  n-th step and the groups in `with_texts` keep their responses. 'cut' is the number of questions
  with shortened texts, which is 0 if `max_responses` is infinite.
  """
  visits, responses = run.questions, run.responses
  if not visits.num_rows:
    return {}
  every = max(1, int(-(-responses.num_rows // max_responses)))
  step, keys, response_keys = visits['step'].to_numpy(), _key(visits), _key(responses)
  # Each response's visit index. Both tables are sorted by step and group.
  place = np.minimum(np.searchsorted(keys, response_keys), len(keys) - 1)
  # A response whose visit was lost with a damaged file gets -1 and is dropped.
  place = np.where(keys[place] == response_keys, place, -1)
  with_tokens = [key.step << 32 | key.group for key in with_texts]
  is_shown = np.isin(step, np.unique(step)[::every]) | np.isin(keys, with_tokens)
  is_kept = np.isin(place, np.flatnonzero(is_shown))
  truths = np.array(visits['answer'].to_pylist(), object)[place[is_kept]].tolist()
  first = np.full(visits.num_rows, -1)
  with_responses, starts, counts = np.unique(place[is_kept], return_index=True, return_counts=True)
  first[with_responses] = starts
  num_responses = np.zeros(visits.num_rows, int)
  num_responses[with_responses] = counts
  columns = ('step', 'question', 'bucket_before', 'bucket_after', 'retired_step')
  return {
    'every': every,
    'visits': {name: visits[name].to_pylist() for name in columns}
    | {
      'replayed': flags(visits['is_replay']).astype(int).tolist(),
      'correctness': charts.numbers(visits['correctness'].to_numpy()),
      'first': first.tolist(),
      'responses': num_responses.tolist(),
    },
    'responses': _responses(responses.filter(pa.array(is_kept)), truths),
    'replays': _replays(visits, responses, place),
    'questions': _questions(visits, math.inf if max_responses == math.inf else _WHOLE_TEXTS),
  }


def _key(table: pa.Table) -> np.ndarray:
  """Combine each row's step and group into one number."""
  return table['step'].to_numpy().astype(np.int64) << 32 | table['group'].to_numpy()


def _responses(responses: pa.Table, truths: Sequence[str | None]) -> dict[str, Any]:
  """Return the response columns; an answer that equals the ground truth is replaced by True."""
  outcome = responses['outcome'].combine_chunks().dictionary_encode()
  answers = [answer and answer[:_MAX_ANSWER] for answer in responses['answer'].to_pylist()]
  reasons = enumerate(responses['reason'].to_pylist())
  return {
    'outcomes': outcome.dictionary.to_pylist(),
    'outcome': outcome.indices.to_pylist(),
    'reward': charts.numbers(responses['reward'].to_numpy()),
    'advantage': charts.numbers(responses['advantage'].to_numpy()),
    'length': responses['length'].to_pylist(),
    'truncated': flags(responses['truncated']).astype(int).tolist(),
    'replayed': flags(responses['is_replay']).astype(int).tolist(),
    'entropy': rounded(floats(responses['entropy']), _ENTROPY_DIGITS),
    # Response index -> why grading failed.
    'reason': {str(index): reason for index, reason in reasons if reason is not None},
    'answer': [
      True if answer is not None and answer == truth else answer
      for answer, truth in zip(answers, truths)
    ],
  }


def _replays(visits: pa.Table, responses: pa.Table, place: np.ndarray) -> dict[str, list]:
  """Return columns with the replayed response of each visit that has one.

  If the record of a replayed response is lost, its values are null.
  """
  is_replay = flags(responses['is_replay']) & (place >= 0)
  index = np.full(visits.num_rows, -1)
  index[place[is_replay]] = np.flatnonzero(is_replay)
  index = index[flags(visits['is_replay'])]
  replays = responses.take(pa.array(index, mask=index < 0))
  names = ('ratio_mean', 'ratio_max', 'shaped_mean', 'shaped_variance')
  return {name: charts.numbers(floats(replays[name])) for name in names} | {
    'written': replays['policy_step'].to_pylist(),
    'times': replays['times_replayed'].to_pylist(),
    'entropy': rounded(floats(replays['entropy']), _ENTROPY_DIGITS),
    'candidates': [
      None if entropies is None else rounded(entropies, _ENTROPY_DIGITS)
      for entropies in replays['candidate_entropies'].to_pylist()
    ],
  }


def _questions(visits: pa.Table, max_characters: float) -> dict[str, Any]:
  """Return the row, text and answer of each distinct visited question."""
  rows, index, counts = np.unique(
    visits['question'].to_numpy(), return_index=True, return_counts=True
  )
  questions = visits.take(pa.array(index))
  full_texts = questions['text'].to_pylist()
  texts = full_texts
  if sum(len(text or '') for text in full_texts) > max_characters:
    limits = np.where(counts > 1, _MAX_TEXT, _MAX_TEXT_ONCE).tolist()
    texts = [
      text if text is None or len(text) <= limit else f'{text[:limit]} …'
      for text, limit in zip(full_texts, limits)
    ]
  return {
    'row': rows.tolist(),
    'text': texts,
    'cut': sum(short != text for short, text in zip(texts, full_texts)),
    'answer': questions['answer'].to_pylist(),
  }


# ---- Token by token ----

_DIGITS = 3  # decimals of entropies and log-probabilities, in nats


class Size(NamedTuple):
  """The size of a recorded group, known before its tokens are read."""

  question: int
  tokens: int  # total over its responses


def sizes(workdir: pathlib.Path) -> dict[Group, Size]:
  """Return the size of each group whose tokens are recorded, in step order."""
  size_of: dict[Group, Size] = {}
  for table in step_records.tables(workdir, 'tokens'):
    lengths = table['tokens'].combine_chunks().value_lengths().to_pylist()
    keys = zip(*(table[name].to_pylist() for name in ('step', 'group', 'question')))
    for (step, group, question), length in zip(keys, lengths):
      key = Group(step, group)
      num_tokens = size_of[key].tokens if key in size_of else 0
      size_of[key] = Size(question, num_tokens + length)
  return size_of


def choose(sizes: Mapping[Group, Size], max_tokens: int) -> set[Group]:
  """Choose the groups to show, giving priority to the most visited questions.

  A question is added only if all of its groups still fit.
  """
  by_question: dict[int, list[Group]] = {}
  for key, size in sizes.items():
    by_question.setdefault(size.question, []).append(key)
  chosen_groups: set[Group] = set()
  for groups in sorted(by_question.values(), key=len, reverse=True):
    tokens = sum(sizes[key].tokens for key in groups)
    if tokens <= max_tokens:
      chosen_groups.update(groups)
      max_tokens -= tokens
  return chosen_groups


def read_texts(
  workdir: pathlib.Path, is_wanted: Callable[[Group], bool]
) -> Iterator[dict[str, Any]]:
  """Yield the recorded responses of the wanted groups, with one file in memory at a time."""
  for table in step_records.tables(workdir, 'tokens'):
    keys = map(Group, table['step'].to_pylist(), table['group'].to_pylist())
    yield from table.filter(pa.array([is_wanted(key) for key in keys], pa.bool_())).to_pylist()


def read_step(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Return all recorded responses of one step.

  The responses are in a single file, which is named after this step or an earlier step.
  """
  last_path = step_records.path_of(workdir, 'tokens', step)
  for path in reversed(step_records.files(workdir, 'tokens')):
    if path <= last_path:
      table = step_records.read_file(path, 'tokens')
      if responses := table.filter(pa.array(table['step'].to_numpy() == step)).to_pylist():
        return responses
  return []


def describe_texts(responses: Iterable[dict[str, Any]], pieces: Pieces) -> dict[str, Any]:
  """Describe recorded responses, with a list for each 'step/group'.

  A response is described by its sample number, its text pieces, values per token, and its turns.
  """
  vocabulary = _vocabulary()
  groups: dict[str, list[dict[str, Any]]] = {}
  for response in responses:
    members = groups.setdefault(f'{response["step"]}/{response["group"]}', [])
    members.append(
      {
        'sample': response['sample'],
        'pieces': [vocabulary[text] for text in pieces(response['tokens'])],
        'entropy': rounded(response['entropy'], _DIGITS),
        'logp': rounded(response['logp'], _DIGITS),
        'past': response['past_logp'] and rounded(response['past_logp'], _DIGITS),
        'turns': response['turns'] and [list(turn.values()) for turn in response['turns']],
      }
    )
  return {'groups': groups, 'pieces': list(vocabulary)}


def read_stored(
  workdir: str, rows: Sequence[int], max_tokens: int
) -> dict[int, tuple[Trajectory, ...]] | None:
  """Read these questions' trajectories, oldest first, from the newest readable checkpoint.

  Questions are read in order, up to `max_tokens` tokens. Several checkpoints are tried, because the
  run may delete one at any time. Returns None if no checkpoint can be read.
  """
  for step in reversed(checkpoint.steps(workdir)):
    try:
      return buffer_files.read_some(checkpoint.buffer_folder(workdir, step), rows, max_tokens)
    except (OSError, ValueError):
      continue
  return None


def describe_stored(
  trajectories_by_row: Mapping[int, Sequence[Trajectory]], pieces: Pieces
) -> dict[str, Any]:
  """Describe stored successes by question, oldest first."""
  vocabulary = _vocabulary()
  questions = {
    str(row): [
      {
        'step': trajectory.step,
        'times': trajectory.times_replayed,
        'pieces': [vocabulary[text] for text in pieces(trajectory.tokens.tolist())],
        'logp': rounded(trajectory.logp, _DIGITS),
        'turns': trajectory.turns or None,
      }
      for trajectory in trajectories
    ]
    for row, trajectories in trajectories_by_row.items()
  }
  return {'questions': questions, 'pieces': list(vocabulary)}


def _vocabulary() -> dict[str, int]:
  """Return a dictionary that numbers text pieces in the order in which they are first looked up."""
  return collections.defaultdict(itertools.count().__next__)
