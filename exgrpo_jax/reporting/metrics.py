"""A run's metrics: metrics.jsonl, and the writer that also feeds TensorBoard and wandb."""

import contextlib
import dataclasses
import importlib
import json
import math
import operator
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import tensorboardX
from tensorboardX import record_writer

from exgrpo_jax import renamed
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts, preemption
from exgrpo_jax.runtime.replacement import replacing

# ---- metrics.jsonl ----

FILE = 'metrics.jsonl'
EVALUATIONS = 'evaluations.jsonl'  # one line for each use of `exgrpo evaluate`

Run = Sequence[Mapping[str, float]]  # the records in a run's metrics.jsonl, oldest first


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
  """Settings for the records that a run writes besides metrics.jsonl and TensorBoard files."""

  sampled_rows: int = setting(16, '[0, inf)', 'responses per step to write to samples/')
  recorded_groups: int = setting(
    4,
    '[0, inf)',
    'groups per step whose responses are recorded token by token; 0 records no groups',
  )
  traced_steps: tuple[int, ...] = setting(
    (),
    None,
    "steps, such as (10,), for which JAX's profiler writes a trace to traces/ in the workdir",
  )
  wandb_project: str = setting(
    '', None, "Weights & Biases project that also receives the metrics; '' turns wandb off"
  )


def read(workdir: str | os.PathLike, before: float = math.inf) -> list[dict[str, float]]:
  """Read the records in metrics.jsonl for steps below `before`, oldest first.

  Returns [] if the file does not exist. Ignores a final line without a newline, which a killed
  process may leave behind. Raises InputError for any other line that is not a record.
  """

  def parsed(record: dict[str, Any]) -> dict[str, float]:
    step = {'step': operator.index(record.pop('step'))}
    return step | {renamed.METRICS.get(name, name): float(value) for name, value in record.items()}

  records = _parse_lines(pathlib.Path(workdir, FILE), 'a metrics record', parsed)
  return [record for record in records if record['step'] < before]


def read_evaluations(workdir: str | os.PathLike, step: int) -> list[dict[str, Any]]:
  """Read the records that `exgrpo evaluate` wrote for a run's policy at `step`, oldest first."""
  path = pathlib.Path(workdir, 'evaluation', EVALUATIONS)
  records = _parse_lines(path, 'an evaluation record', lambda record: (record['step'], record))
  return [record for record_step, record in records if record_step == step]


def _parse_lines(path: pathlib.Path, kind: str, parse: Callable[[Any], Any]) -> list[Any]:
  """Parse a file's complete lines. Raises InputError for a line that is not `kind`."""
  records = []
  for number, line in enumerate(_complete_lines(path), 1):
    try:
      records.append(parse(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise InputError(
        f'{path}:{number}: {line[:80]!r} is not {kind} ({error}). Delete the line to read the '
        'other records.'
      ) from error
  return records


def append_evaluation(folder: str, record: Mapping[str, Any]) -> None:
  """Append a record from `exgrpo evaluate`.

  If the last line was cut off because the disk was full, that line is removed first.
  """
  with open(os.path.join(folder, EVALUATIONS), 'a+b') as file:
    file.seek(0)
    file.truncate(file.read().rfind(b'\n') + 1)
    file.write(f'{json.dumps(record)}\n'.encode())


def _complete_lines(path: pathlib.Path) -> list[str]:
  """Return the lines that end in a newline, or [] if the file does not exist."""
  try:
    # Escape bytes that are not UTF-8, so that parsing the line as a record fails.
    return path.read_text(encoding='utf-8', errors='backslashreplace').split('\n')[:-1]
  except FileNotFoundError:
    return []


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Write one JSON object per line to `path`, atomically. Creates missing folders.

  With several hosts, only the first host writes.
  """
  if hosts.is_first():
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, rows)


def json_line(record: Mapping[str, Any]) -> str:
  """Return a record as strict JSON with a newline; NaN and infinity become strings."""
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Write one record per line, atomically, so that a killed process never leaves a partial file."""
  # UTF-8 cannot encode a lone surrogate; backslashreplace writes its JSON escape.
  with (
    replacing(path) as unfinished,
    unfinished.open('w', encoding='utf-8', errors='backslashreplace') as file,
  ):
    file.writelines(map(json_line, records))


# ---- Weights & Biases ----


def check_wandb(project: str) -> None:
  """Raise InputError if wandb is not installed or not logged in. Does nothing if `project` is ''.

  Call this before any slow work. In a terminal, wandb asks for the API key.
  """
  if project and hosts.is_first():
    with _explain_errors(project, 'Set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline'):
      _wandb(project).login()


def _start_wandb(
  project: str, workdir: pathlib.Path, first_step: int, settings: Mapping[str, Any]
) -> Any:
  """Start a wandb run with the resolved config; its files go to workdir/wandb.

  Weights & Biases cannot delete steps, and a resumed run repeats the steps since its checkpoint.
  So each start is a separate wandb run, in a group named after the workdir.
  """
  group = workdir.resolve().name
  remedy = 'Rerun the command. With WANDB_MODE=offline, wandb writes only to the workdir'
  with _explain_errors(project, remedy, status=1):
    return _wandb(project).init(
      project=project,
      group=group,
      name=f'{group}-from-{first_step}',
      dir=str(workdir),
      config=dict(settings),
    )


@contextlib.contextmanager
def _explain_errors(project: str, remedy: str, status: int = 2) -> Iterator[None]:
  """Turn wandb's errors into InputError."""
  try:
    yield
  except _wandb(project).Error as error:
    reason = ' '.join(str(error).split()).rstrip('.')
    message = f"config.metrics.wandb_project='{project}': {reason}. {remedy}."
    raise InputError(message, status) from error


def _wandb(project: str) -> Any:
  """Import wandb; raise InputError if it is not installed."""
  try:
    wandb = importlib.import_module('wandb')
  except ImportError:
    wandb = None
  # A folder named wandb, which wandb itself may leave behind, can be imported too.
  if not hasattr(wandb, 'init'):
    raise InputError(
      f"config.metrics.wandb_project='{project}': wandb is not installed. Run "
      "pip install -e '.[wandb]' in the clone (without a clone, pip install wandb), or set the "
      "project to ''."
    )
  return wandb


# ---- TensorBoard ----

_TEXTS = 2  # responses of each kind per step
_TEXT_LIMIT = 4000  # characters per prompt or response; samples/ contains the full texts
# Tags of metrics whose names have no group.
_TAGS = {
  'reward': 'reward/mean',
  'reward_std': 'reward/std',
  'reward_std_within': 'reward/std_within_groups',
  'entropy': 'policy/entropy',
  'kl': 'policy/kl',
  'loss': 'update/loss',
  'gradient_norm': 'update/gradient_norm',
  'learning_rate': 'update/learning_rate',
  'epoch': 'update/epoch',
}
_PREFIX = 'patient:'  # prefix of the paths passed to tensorboardX, but not of the paths on disk
_BOUNDS = ('_low', '_high')  # suffixes of the bounds of an evaluation's interval


def tag(name: str) -> str:
  """Return a metric's TensorBoard tag, which always begins with the name of a group.

  Interval bounds are in a separate group.
  """
  if name.endswith(_BOUNDS):
    name = name.replace('eval/', 'eval_interval/', 1)
  # tensorboardX allows no other characters.
  return re.sub(r'[^-/\w.]', '_', _TAGS.get(name, name).replace('@', '_at_'))


def markdown(row: Mapping[str, Any]) -> str:
  """Format a row from `step_rows.sample_rows` for TensorBoard's Text tab."""
  facts = {name: row[name] for name in ('row', 'answer', 'outcome', 'reward', 'truncated')}
  if row['replayed']:
    facts['written in step'] = row['written_in_step']
  lines = [', '.join(f'{name}: {value}' for name, value in facts.items())]
  for name in ('question', 'response'):
    text = row[name]
    if len(text) > _TEXT_LIMIT:
      text = f'{text[:_TEXT_LIMIT]} … ({len(text) - _TEXT_LIMIT} more characters)'
    lines += [f'**{name}**', _code(text)]
  return '\n\n'.join(lines)


def _code(text: str) -> str:
  """Indent text so that Markdown shows it as code, whatever it contains."""
  return '\n'.join(f'    {line}' for line in text.split('\n'))


class _EventFile:
  """A file that ignores write errors.

  An error would kill tensorboardX's thread, and the run would then wait forever for that thread. A
  failing disk still raises an error when the same values are written to metrics.jsonl.
  """

  def __init__(self, path: str) -> None:
    self._file = open(path, 'wb')  # noqa: SIM115  # closed by tensorboardX

  def write(self, data: bytes) -> None:
    with contextlib.suppress(OSError):
      self._file.write(data)

  def flush(self) -> None:
    with contextlib.suppress(OSError):
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._file.close()


class _EventFiles:
  """A factory that opens tensorboardX's files in folders whose names begin with _PREFIX."""

  def open(self, path: str) -> _EventFile:
    return _EventFile(path.removeprefix(_PREFIX))

  def directory_check(self, path: str) -> None:
    os.makedirs(path.removeprefix(_PREFIX), exist_ok=True)


record_writer.register_writer_factory(_PREFIX.rstrip(':'), _EventFiles())


# ---- The writer ----


class Writer:
  """A writer that sends each step's metrics to metrics.jsonl, TensorBoard and optionally wandb.

  With several hosts, only the first host writes.

  Opening a writer at `first_step` drops existing records from that step on, because a resumed run
  starts from its last checkpoint and repeats the later steps.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    first_step: int,
    wandb_project: str = '',
    settings: Mapping[str, Any] | None = None,
  ) -> None:
    """Open the files in `workdir`; raise InputError for a damaged metrics.jsonl or missing wandb.

    `settings` is the run's resolved config as nested mappings, or None for a warm start.
    """
    self._writes = hosts.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._wandb = (
      _start_wandb(wandb_project, workdir, first_step, settings or {}) if wandb_project else None
    )
    path = workdir / FILE
    records = read(workdir, first_step)
    steps = sorted(record['step'] for record in records if record['step'])
    if steps != list(range(1, first_step)):
      hosts.warn(
        f'{path}: the file must have one record for each step from 1 to {first_step - 1}, but some '
        'are missing or repeated. Stop the run and restore the file from a backup.'
      )
    _write(path, records)
    self._file = path.open('a', encoding='utf-8')
    # With purge_step, TensorBoard hides steps from `first_step` on in earlier files.
    folder = f'{_PREFIX}{workdir / "tensorboard"}'
    self._board = tensorboardX.SummaryWriter(folder, purge_step=first_step)
    if settings and first_step == 0:  # a resumed run has already written them
      self._board.add_text('settings', _code(json.dumps(settings, indent=2, default=str)), 0)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
    is_stopped = isinstance(error, SystemExit) and error.code == preemption.EXIT_CODE
    self.close(failed=error is not None and not is_stopped)  # a stopped run will be resumed

  def write(
    self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Record a step's `metrics` (name -> Python or array scalar) and the time.

    `rows` come from `step_rows.sample_rows`; TensorBoard shows some of them.
    """
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()}
    record = values | {'timestamp': time.time()}
    self._file.write(json_line({'step': step, **record}))
    self._file.flush()
    for name, value in values.items():  # without the time, which every event has anyway
      self._board.add_scalar(tag(name), value, step)
    for kind, is_replay in (('fresh', False), ('replayed', True)):
      kind_rows = [row for row in rows if row['replayed'] == is_replay][:_TEXTS]
      for number, row in enumerate(kind_rows, 1):
        self._board.add_text(f'completions/{kind}_{number}', markdown(row), step)
    if self._wandb:
      self._wandb.log(record, step=step)

  def flush(self) -> None:
    """Wait until metrics.jsonl is on disk, so that it survives a power failure."""
    if self._writes:
      os.fsync(self._file.fileno())

  def close(self, failed: bool = False) -> None:
    """Close the files and finish the wandb run; `failed` marks it as failed."""
    if not self._writes:
      return
    self._file.close()
    self._board.close()
    if self._wandb:
      self._wandb.finish(exit_code=int(failed))
