"""The folder records/: a row for every response and every question in each step of a run.

Three tables are stored in Parquet files of several steps each. A file's name ends with its first
step, but only the `step` column shows which steps the file contains. `Writer` writes the files
during the run, so that a resumed run has the same rows as a run that never stopped. step_rows.py
computes the values.

Later versions may add nullable columns, which are null when older files are read.
"""

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pyarrow import compute, parquet

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import exists

FOLDER = 'records'  # in the workdir
# Steps per file. With fewer, a long run would write thousands of files; with more, the report of an
# active run would lag further behind.
STEPS_PER_FILE = 10
# `question` is a row in the data, `group` is the question's index in the step, from 0, and `sample`
# is the response's index in the group, 0 … K - 1, where a replayed response comes last.
_KEYS = [pa.field(n, pa.int32(), nullable=False) for n in ('step', 'question', 'group', 'sample')]

# One response in a step, generated or replayed. Its tokens include the end token.
# "Now" means under the policy at the start of the step.
RESPONSES = pa.schema(
  [
    *_KEYS,
    pa.field('is_replay', pa.bool_(), nullable=False),
    pa.field('reward', pa.float64(), nullable=False),
    # Name -> value of each function in config.grading.rewards, before weighting. Null if grading
    # failed, and for replayed responses, which keep only the weighted sum.
    pa.field('components', pa.map_(pa.string(), pa.float64())),
    # The verdict's outcome; 'correct' or 'wrong' for a replayed response.
    pa.field('outcome', pa.string(), nullable=False),
    pa.field('reason', pa.string()),  # why grading failed; null if it succeeded
    # The answer that the verifier extracted, cut to worker.MAX_ANSWER characters. Null if there is
    # none, if grading failed, or if the response is replayed.
    pa.field('answer', pa.string()),
    pa.field('length', pa.int32(), nullable=False),  # tokens
    pa.field('truncated', pa.bool_(), nullable=False),  # cut off at the limit
    # Means over tokens of the entropy in nats and of the probability exp(logp): from the sampler if
    # the response is fresh, computed now if it is replayed.
    pa.field('entropy', pa.float32(), nullable=False),
    pa.field('probability', pa.float32(), nullable=False),
    pa.field('advantage', pa.float32(), nullable=False),  # 0 in groups that were dropped
    # The step that generated the response's first token.
    pa.field('policy_step', pa.int32(), nullable=False),
    pa.field('has_code_block', pa.bool_(), nullable=False),
    pa.field('valid_steps', pa.bool_()),  # null if the task cannot check steps
    # All columns below are null for fresh responses.
    # Mean token entropy, now, of each stored trajectory for the question, oldest first. Null if
    # replay.trajectory_selection does not need the entropies.
    pa.field('candidate_entropies', pa.list_(pa.float32())),
    # Statistics over tokens of w = pi_now / pi_past; w = 1 without objective.importance_correction.
    pa.field('ratio_mean', pa.float32()),
    pa.field('ratio_max', pa.float32()),
    pa.field('ratio_variance', pa.float32()),
    # Statistics over tokens of the factor on the advantage: f(w), or objective.shaping of w.
    pa.field('shaped_mean', pa.float32()),
    pa.field('shaped_variance', pa.float32()),
    pa.field('times_replayed', pa.int32()),  # including this time
  ]
)

# One question in a step.
QUESTIONS = pa.schema(
  [
    *_KEYS[:3],
    # The user messages, separated by blank lines, without the system prompt and chat template.
    pa.field('text', pa.string()),
    pa.field('answer', pa.string()),  # the ground truth
    pa.field('is_replay', pa.bool_(), nullable=False),
    # Share of correct responses; counts the replayed response if replay.count_replayed is set.
    pa.field('correctness', pa.float64(), nullable=False),
    pa.field('bucket_before', pa.int32()),  # null if it is not in the buffer
    pa.field('bucket_after', pa.int32()),
    pa.field('retired_step', pa.int32()),  # this step, if the question retired in it; else null
  ]
)

_TURN = pa.struct([('written', pa.int32()), ('observed', pa.int32()), ('reward', pa.float64())])
# One response recorded token by token (config.metrics.recorded_groups). Each list has one value for
# each token, including the end token; logp and entropy are in nats.
TOKENS = pa.schema(
  [
    *_KEYS,
    pa.field('tokens', pa.list_(pa.int32()), nullable=False),  # ids
    # From the sampler if the response is fresh, computed now if it is replayed.
    pa.field('logp', pa.list_(pa.float32()), nullable=False),
    pa.field('entropy', pa.list_(pa.float32()), nullable=False),
    # Under the policy that generated the replayed response; null for a fresh response.
    pa.field('past_logp', pa.list_(pa.float32())),
    # The turns of an episode (see datatypes.Turn), null for single-turn responses. At the
    # environment's tokens, logp, entropy and past_logp are 0.
    pa.field('turns', pa.list_(_TURN)),
  ]
)

SCHEMAS = {'responses': RESPONSES, 'questions': QUESTIONS, 'tokens': TOKENS}


class Records(NamedTuple):
  """A run's responses and questions, sorted by step, group and sample.

  The tokens table may be large, so read it file by file with `tables`.
  """

  responses: pa.Table  # schema RESPONSES
  questions: pa.Table  # schema QUESTIONS


def read(workdir: str | os.PathLike) -> Records:
  """Read the records that a run has written so far; the tables are empty if there are none.

  `read(workdir).responses['entropy'].to_numpy()` returns a column as a NumPy array. While a run
  is active, its latest steps may not be on disk yet. Raises InputError for a damaged file.
  """
  sorted_tables = []
  for name in Records._fields:
    schema = SCHEMAS[name]
    table = pa.concat_tables([schema.empty_table(), *tables(workdir, name)])
    order = [(key, 'ascending') for key in ('step', 'group', 'sample') if key in schema.names]
    sorted_tables.append(table.sort_by(order))
  return Records(*sorted_tables)


def tables(workdir: str | os.PathLike, name: str) -> Iterator[pa.Table]:
  """Yield the contents of each file for table `name`, in order. Raises InputError like `read`."""
  return (read_file(path, name) for path in files(workdir, name))


def files(workdir: str | os.PathLike, name: str) -> list[pathlib.Path]:
  """Return the sorted paths of the files for table `name`."""
  return sorted((pathlib.Path(workdir) / FOLDER).glob(f'{name}_*.parquet'))


def path_of(workdir: str | os.PathLike, name: str, first_step: int) -> pathlib.Path:
  """Return the path of the file for table `name` that begins at `first_step`."""
  return pathlib.Path(workdir) / FOLDER / f'{name}_{first_step:06d}.parquet'


def read_file(path: pathlib.Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
  """Read one file for table `name`; columns missing from an older file are null.

  Reads only `columns` if they are given. Raises InputError if the file cannot be read.
  """
  schema = pa.schema([SCHEMAS[name].field(column) for column in columns or SCHEMAS[name].names])
  try:
    table = parquet.ParquetFile(path).read(columns)
    for place, field in enumerate(schema):
      if field.nullable and field.name not in table.column_names:
        nulls = pa.nulls(table.num_rows, field.type)
        table = table.add_column(min(place, table.num_columns), field, nulls)
    return table.cast(schema)
  except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
    raise InputError(
      f"{path}: this file cannot be read as a run's {name} ({str(error).splitlines()[0]:.200}). "
      'Restore the file from a backup, or delete it to continue without its rows.'
    ) from error


def write_file(path: pathlib.Path, table: pa.Table) -> None:
  """Write a table atomically, so that a killed process never leaves a partial file."""
  with replacing(path) as unfinished, unfinished.open('wb') as file:
    parquet.write_table(table, file, compression='zstd')


# ---- The writer ----

Columns = Mapping[str, Sequence[Any]]  # column name -> values, for rows of one table
Rows = Mapping[str, Columns]  # table name (a key of SCHEMAS) -> a step's rows


class Writer:
  """A writer that saves each step's rows in a thread.

  With several hosts, only the first host writes. A file contains a window of steps, such as 11 to
  20. It is written when the window is complete; before each checkpoint, it is written with the
  steps so far. So every step that a checkpoint covers is on disk, and at most one window is in
  memory.

  Opening a writer at `first_step` drops the rows from that step on, because a resumed run starts
  from its last checkpoint and repeats the later steps. Errors in the thread are raised by the next
  call.
  """

  def __init__(
    self, workdir: str | os.PathLike, first_step: int, every: int = STEPS_PER_FILE
  ) -> None:
    """Open records/, with `every` steps per file; raise InputError if a file is damaged."""
    self._writes = hosts.is_first()
    if not self._writes:
      return
    self._workdir, self._every = pathlib.Path(workdir), every
    (self._workdir / FOLDER).mkdir(parents=True, exist_ok=True)
    _drop(self._workdir, first_step)
    # Only this thread uses the window and its tables, so they need no lock.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='records')
    self._pending: list[concurrent.futures.Future[None]] = []
    self._window = 0  # the first step of the current window; 0 if there is none
    self._tables: dict[str, pa.Table] = {}  # table name -> rows of the window
    self._is_written = True  # True if all these rows are on disk

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if not self._writes:
      return
    # An error while flushing must not hide the error that ends the run.
    with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
      self.flush()
    self._thread.shutdown()

  def add(self, step: int, rows: Rows) -> None:
    """Queue a step's rows without waiting. Steps must be added in increasing order."""
    if not self._writes:
      return
    self._await([future for future in self._pending if future.done()])
    self._pending.append(self._thread.submit(self._add_rows, step, rows))

  def flush(self) -> None:
    """Wait until all rows so far are on disk."""
    if not self._writes:
      return
    self._pending.append(self._thread.submit(self._write))
    self._await(list(self._pending))

  def _await(self, futures: Sequence[concurrent.futures.Future[None]]) -> None:
    for future in futures:
      self._pending.remove(future)
      future.result()

  def _add_rows(self, step: int, rows: Rows) -> None:
    window = (step - 1) // self._every * self._every + 1
    if window != self._window:
      self._write()
      self._window, self._tables = window, {}
      for name in rows:  # start with the rows on disk, because a run may resume within a window
        path = path_of(self._workdir, name, window)
        is_present = exists(path)
        self._tables[name] = read_file(path, name) if is_present else SCHEMAS[name].empty_table()
    for name, columns in rows.items():
      new_rows = pa.table(dict(columns), schema=SCHEMAS[name])
      self._tables[name] = pa.concat_tables([self._tables[name], new_rows])
    self._is_written = False
    if step == window + self._every - 1:
      self._write()

  def _write(self) -> None:
    if self._is_written:
      return
    for name, table in self._tables.items():
      if table.num_rows:  # the tokens table may be empty
        write_file(path_of(self._workdir, name, self._window), table)
    self._is_written = True


def _drop(workdir: pathlib.Path, first_step: int) -> None:
  """Remove the rows from `first_step` on, and incomplete files left by a killed process."""
  for path in (workdir / FOLDER).glob('*.new'):
    path.unlink()
  for name in SCHEMAS:
    for path in files(workdir, name):
      # Read the steps first, because reading all columns of a long run's records is slow.
      step_N = read_file(path, name, ['step'])['step'].to_numpy()
      if not (step_N < first_step).all() or not step_N.size:
        kept_rows = read_file(path, name).filter(compute.field('step') < first_step)
        write_file(path, kept_rows) if kept_rows.num_rows else path.unlink()
