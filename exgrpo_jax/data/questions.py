"""Load the questions named by a data spec.

A spec is one of
  arithmetic:train      a built-in task and its split
  path/to/x.parquet     a .parquet, .jsonl, .json or .csv file; records.py identifies its columns
  path/to/x-*.parquet   several files, sorted by name
  path/to/x.py:train    a Python task: a function that returns rows
  reasoning_gym:chain_sum(max_terms=3):train   reasoning_gym tasks, see reasoning_gym.py
  owner/name:config:split   a Hugging Face Hub dataset, see named_sets.py
  tfds_name:split       a TFDS dataset, such as math_dataset:train
and may end in column names, {question=problem,answer=key}, and a slice in TFDS syntax:
[:640], [100:200], [:10%].
Data is prepared once (see store.py). After that, rows are read by index on demand.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import named_sets, prompt, reasoning_gym, row_files, store
from exgrpo_jax.data.records import Fields
from exgrpo_jax.data.row_files import ENDINGS, RowFile
from exgrpo_jax.data.store import Dataset, Store
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.runtime import hosts

COLUMNS = ('question', 'answer', 'solution')  # a spec may name the columns that contain these

_SPEC = re.compile(
  r'(?P<base>.+?)(?P<columns>\{[^{}]*\})?(?P<slicing>\[[^\[\]]*\])?(?P<columns_last>\{[^{}]*\})?'
)
_SLICE = re.compile(r'\[\s*(-?[\d_.]+%?)?\s*:\s*(-?[\d_.]+%?)?\s*\]')
_LONG_NAME = 120  # bytes; file names add up to 80 more, and the limit is 255


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Question sources and the columns to read from them."""

  train: str = setting('arithmetic:train', None, 'the data spec of the questions to train on')
  validation: tuple[str, ...] = setting(
    (), None, 'the data specs whose scores select the best policy; see config.export.best'
  )
  evaluation: tuple[str, ...] = setting(
    ('arithmetic:validation',), None, 'the data specs whose scores are only reported'
  )
  question_field: str = setting(
    '',
    None,
    "the column with the question, as text or chat messages; '' detects it by name. A data "
    'spec that names columns, such as x.jsonl{question=ask}, uses only those',
  )
  answer_field: str = setting(
    '',
    None,
    "the column with the answer ('a.b' means field b of the structs in a); '' detects it by name",
  )
  solution_field: str = setting(
    '',
    None,
    "the column with a worked solution (rows may lack it); '' detects it by name, or uses the "
    "text before GSM8K's '#### ' or the last assistant turn of a chat",
  )
  default_kind: str = setting(
    '',
    ('', 'math', 'choice', 'text'),
    "how to compare answers if a row does not specify it: '' means math, except that verl rows "
    'with an unknown data_source are rejected',
  )
  on_unverifiable: str = setting(
    'refuse',
    ('refuse', 'drop'),
    "what to do with rows whose answer cannot be checked because it is missing or 'proof'",
  )
  on_overlong: str = setting(
    'refuse', ('refuse', 'drop'), 'what to do with questions whose prompt exceeds the limit'
  )
  cache_dir: str = setting(
    '~/.cache/exgrpo_jax',
    None,
    "folder for prepared data; '' means TFDS's folder: $TFDS_DATA_DIR or ~/tensorflow_datasets",
  )

  @property
  def evaluated(self) -> tuple[str, ...]:
    """Return all data specs to evaluate on."""
    return *self.validation, *self.evaluation


# ---- Loading ----


def load_set(
  config: DataConfig, spec: str, tokenizer: Tokenizer, prompts: prompt.PromptConfig, max_prompt: int
) -> QuestionSet:
  """Load the questions and prompts of `spec`, preparing both if needed. All hosts must call this.

  `max_prompt` is the prompt limit in tokens. config.on_overlong decides what happens to longer
  prompts. Raises InputError if the data does not exist, a row is unusable or too long, or hosts
  have different data.
  """
  settle(config, spec)
  with hosts.first_host_first('load_questions'):  # prepared data may be in a shared folder
    dataset = load(config, spec)
    tokens = store.tokenized(dataset, tokenizer, prompts)
  rows = check_prompts(spec, tokens.lengths, max_prompt, config.on_overlong)
  hosts.check_same(spec, 'the questions', lambda: tokens.checksum + rows.tobytes())
  # Rows are renumbered because the stream and the buffer address questions by index.
  return QuestionSet(spec=spec, questions=dataset.select(rows), prompts=tokens.select(rows))


def settle(config: DataConfig, spec: str) -> None:
  """Make all hosts agree on the commit to read if `spec` names a Hub dataset.

  All hosts must call this before `load`. Raises InputError if the data is neither on the Hub nor in
  the cache.
  """
  if hub_split := named_sets.on_hub(config.cache_dir, split_spec(spec)[0]):
    named_sets.locate(hub_split)


def load(config: DataConfig, spec: str) -> Dataset:
  """Load the questions of a data spec, preparing its data first if necessary.

  Concurrent calls are safe, as with `store.prepared`. Raises InputError if the data
  does not exist or contains an unusable row.
  """
  try:
    spec.encode()
  except UnicodeEncodeError as error:
    raise InputError(f'{spec!r}: the name is not valid UTF-8. Rename the file.') from error
  base, overrides = split_spec(spec)[0], spec_columns(spec)
  columns = {
    key: overrides.get(key, '') if overrides else getattr(config, f'{key}_field') for key in COLUMNS
  }
  fields = Fields(**columns, default_kind=config.default_kind, of_spec=bool(overrides))
  if fields.of_spec and base.startswith((reasoning_gym.PREFIX, *(f'{task}:' for task in TASKS))):
    raise InputError(f'{spec}: tasks have no columns to choose from. Remove the braces.')
  if base.startswith(reasoning_gym.PREFIX):
    tasks, _, split = base.removeprefix(reasoning_gym.PREFIX).rpartition(':')
    if not tasks:
      raise InputError(f"{spec}: a data spec must end in a split, such as '{base}:train'.")
    return _dataset(spec, reasoning_gym.prepared(config.cache_dir, spec, tasks), tasks, split)
  name, _, split = base.rpartition(':')
  if name in TASKS:
    return _dataset(spec, store.of_task(config.cache_dir, name, TASKS[name]), name, split)
  files, source = _files(config, spec, base)
  try:
    data = store.of_files(config.cache_dir, fields, files, source)
  except InputError as error:
    if (source or fields.of_spec) and not str(error).startswith(spec):
      raise InputError(f'{spec}: {error}') from error
    raise
  if data.left_out and config.on_unverifiable == 'refuse':
    total = sum(rows for rows, _ in data.left_out.values())
    counts = ', '.join(f'{reason}: {rows:,}' for reason, (rows, _) in data.left_out.items())
    raise InputError(
      f'{spec}: {counted(total, "row")} {"has" if total == 1 else "have"} no answer that can be '
      f'checked ({counts}). The first is at {next(iter(data.left_out.values())).first}. Give each '
      "row an answer, or set config.data.on_unverifiable='drop' to skip such rows."
    )
  return _dataset(spec, data, files[0].path, store.ROWS)


def _files(config: DataConfig, spec: str, base: str) -> tuple[list[RowFile], str]:
  """Return a spec's files and the source for rows without a source column.

  A source of '' means the file's name. The spec must not name a built-in task.
  """
  if row_files.task_file(base):
    paths, source = [base], ''
  elif base.endswith(ENDINGS):
    paths, source = spec_files(base)
  elif hub_split := named_sets.on_hub(config.cache_dir, base):
    paths, source = named_sets.files(hub_split), hub_split.repository.name
  else:
    check_form(spec)
    name, _, split = base.rpartition(':')
    return [named_sets.of_tfds(config.cache_dir, spec, name, split)], name
  return [row_files.row_file(path) for path in paths], source


def _dataset(spec: str, data: Store, name: str, split: str) -> Dataset:
  """Return the rows selected from a split by the spec's slice."""
  if split not in data.sizes:
    raise InputError(f"{spec}: {name} has no split '{split}' (has: {', '.join(data.sizes)}).")
  if not data.sizes[split]:
    raise InputError(
      f'{spec}: {split} is empty because there are too few distinct questions. Change the task or '
      'its arguments.'
    )
  kept_rows = np.setdiff1d(np.arange(data.sizes[split]), data.excluded)
  rows = spec_rows(spec, len(kept_rows))
  return Dataset(spec, data, split, kept_rows[rows.start : rows.stop])


def check_prompts(spec: str, lengths: np.ndarray, limit: int, overlong: str) -> np.ndarray:
  """Return the indices of the prompts within the limit, in ascending order.

  `lengths` (int [rows]) and `limit` count tokens. `overlong` is DataConfig.on_overlong. Raises
  InputError if a prompt exceeds the limit and `overlong` is 'refuse', or if all prompts exceed it.
  """
  rows = np.flatnonzero(lengths > limit)
  if rows.size and overlong == 'refuse':
    raise InputError(
      f'{spec}: the prompt of row {rows[0]} is {lengths[rows[0]]} tokens long, and {rows.size} of '
      f'{counted(len(lengths), "prompt")} {"exceeds" if rows.size == 1 else "exceed"} the limit of '
      f"{limit}. Raise the limit, or set config.data.on_overlong='drop' to skip such questions."
    )
  if rows.size == len(lengths):
    raise InputError(
      f'{spec}: no prompt is within the limit of {counted(limit, "token")} (the shortest has '
      f"{lengths.min()}), so config.data.on_overlong='drop' would leave none. Raise the limit."
    )
  return np.flatnonzero(lengths <= limit)


# ---- Data specs ----


def check_form(spec: str) -> None:
  """Raise InputError unless a spec has a valid form. The data need not exist."""
  base = split_spec(spec)[0]
  name, _, split = base.rpartition(':')
  is_split = base.startswith(reasoning_gym.PREFIX) or (name and split and '[' not in base)
  if is_split or base.endswith(ENDINGS) or row_files.task_file(base):
    return
  folder = f" '{base}' is a folder: name its files, as in {base}/*.jsonl." * os.path.isdir(base)
  raise InputError(
    f"the data spec '{spec}' is not valid.{folder} It must be a split of a built-in task ("
    f'{", ".join(f"{task}:train" for task in TASKS)}), a file that ends in '
    f'{", ".join(ENDINGS)}, a Python task (mine.py:train), a reasoning_gym task '
    '(reasoning_gym:chain_sum:train), or a split of a Hub dataset (owner/name:config:split) or '
    'a TFDS dataset (name:split). Columns such as {question=problem,answer=key} and a slice '
    'such as [:640] may follow.'
  )


def split_spec(spec: str) -> tuple[str, str]:
  """Split a data spec into its base (without columns) and its bracketed slice ('' if none)."""
  match = _SPEC.fullmatch(spec)
  return (match['base'], match['slicing'] or '') if match else ('', '')


def spec_columns(spec: str) -> dict[str, str]:
  """Return the columns named in a spec, keyed by their role, or {} if there are none.

  'x.jsonl{question=problem,answer=key}[:500]' is {'question': 'problem', 'answer': 'key'}. The
  braces may follow the slice. Raises InputError if their content has any other form.
  """
  match = _SPEC.fullmatch(spec)
  braces = [part for part in (match['columns'], match['columns_last']) if part] if match else []
  pairs = [pair.partition('=') for text in braces for pair in text[1:-1].split(',')]
  columns = {key.strip(): column.strip() for key, _, column in pairs}
  if len(columns) < len(pairs) or not set(columns) <= set(COLUMNS) or not all(columns.values()):
    raise InputError(
      f'{spec}: {" and ".join(braces)} must map question, answer or solution to column names, each '
      'at most once, as in {question=problem,answer=key}. A column whose name contains a comma or '
      'a brace can only be named in config.data.question_field, answer_field or solution_field.'
    )
  return columns


def spec_files(base: str) -> tuple[list[str], str]:
  """Return the files named by a spec (without its slice), sorted, and a common name for them.

  In the last part of the path, `*` matches any characters, and the common name is the text before
  it (or the folder's name if there is none). Without a `*`, the common name is ''. Raises
  InputError if no file matches.
  """
  folder, _, pattern = base.rpartition('/')
  if '*' not in pattern:
    return [base], ''
  paths = sorted(map(os.fspath, epath.Path(folder).expanduser().glob(pattern)))
  if not paths:
    raise InputError(f'{base}: no file matches this pattern. Check the folder and the pattern.')
  return paths, pattern.partition('*')[0].rstrip('-_.') or pathlib.PurePath(folder).name


def spec_rows(spec: str, size: int) -> range:
  """Return the rows selected by a spec's slice in TFDS syntax: [:640], [100:-5], [:10%].

  Raises InputError if the slice is malformed, extends beyond the `size` rows, or selects nothing.
  """
  slicing = split_spec(spec)[1]
  if not slicing:
    return range(size)
  match = _SLICE.fullmatch(slicing)
  bounds = match.groups() if match else (None, None)
  is_percent = any(bound and '%' in bound for bound in bounds)
  try:
    if not any(bounds):
      raise ValueError
    begin, end = (
      _row(bound.rstrip('%'), is_percent, size) if bound else default
      for bound, default in zip(bounds, (0, size))
    )
  except ValueError as error:
    raise InputError(
      f'{spec}: the slice {slicing} must follow TFDS syntax, such as [:640], [100:200] or [:10%], '
      f'and stay within the {counted(size, "row")} of the split.'
    ) from error
  if begin >= end:
    raise InputError(
      f'{spec}: the slice {slicing} selects none of the {counted(size, "row")} of the split.'
    )
  return range(begin, end)


def _row(bound: str, is_percent: bool, size: int) -> int:
  row = round(float(bound) * size / 100) if is_percent else int(bound)
  if abs(row) > size:
    raise ValueError
  return row + size if float(bound) < 0 else row  # a small negative percentage may round to 0


def spec_name(spec: str) -> str:
  """Derive a name from a spec, using only letters, digits, '_', '.' and '-'.

  The name includes a file's folder because many files are called test.jsonl: '/data/gsm8k/
  test.jsonl' becomes gsm8k_test. A slice is spelled out: 'arithmetic:test[64:96]' becomes
  arithmetic_test_64_to_96. Arguments of reasoning_gym tasks and the end of a long name are hashed
  because names are used in paths.
  """
  base, slicing = split_spec(spec)
  if base.endswith(ENDINGS):
    path = pathlib.PurePath(base)
    base = f'{path.parent.name}_{path.stem}'
  elif arguments := re.search(r'\(.*\)', base):
    digest = hashlib.sha256(arguments[0].encode()).hexdigest()[:6]
    base = base.replace(arguments[0], f'_{digest}')
  name = re.sub(r'[^\w.-]+', '_', base).strip('_.')
  if len(encoded := name.encode()) > _LONG_NAME:
    digest = hashlib.sha256(encoded).hexdigest()[:6]
    name = f'{encoded[:_LONG_NAME].decode(errors="ignore")}_{digest}'
  return name + _SLICE.sub(_spell, slicing).replace('%', 'pct')


def _spell(match: re.Match[str]) -> str:
  """Spell out '[64:96]' as '_64_to_96', '[:64]' as '_to_64', '[64:]' as '_from_64'."""
  low, high = match.groups()
  return f'_{low}_to_{high}' if low and high else f'_from_{low}' if low else high and f'_to_{high}'


def check_distinct(specs: Iterable[str], where: str) -> None:
  """Raise InputError if two specs share a name and would overwrite each other's results.

  The message starts with `where`, a setting such as 'config.data.evaluation'.
  """
  spec_of_name: dict[str, str] = {}
  for spec in specs:
    name = spec_name(spec)
    if name in spec_of_name:
      raise InputError(
        f"{where}: '{spec_of_name[name]}' and '{spec}' would both be reported as '{name}', because "
        'a reported name consists of the folder, file and slice (or task, split and slice). Rename '
        'or remove one of them.'
      )
    spec_of_name[name] = spec


def check_apart(validation: Sequence[str], evaluation: Sequence[str]) -> None:
  """Raise InputError if the lists share a spec, or two specs would share a reported name."""
  for spec in validation:
    if spec in evaluation:
      raise InputError(
        f"config.data.validation and config.data.evaluation both contain '{spec}'. Scores must "
        'not be reported on data that was used to select the policy. Remove the spec from one of '
        'the two settings.'
      )
  check_distinct((*validation, *evaluation), 'config.data.validation and config.data.evaluation')
