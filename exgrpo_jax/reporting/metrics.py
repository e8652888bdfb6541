"""The metrics of a run: metrics.jsonl, and the writer that also feeds TensorBoard and wandb."""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import tensorboardX
from tensorboardX import record_writer, summary

from exgrpo_jax import renamed
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.replacement import replacing

# ---- Weights & Biases ----


def check_wandb(project: str) -> None:
  """Refuses a project where wandb is not installed or not logged in; '' is no project.

  Called before anything that takes long. Where there is a terminal, wandb asks for the key.
  """
  if project and hosts.is_first():
    wandb = _package(project)
    try:
      wandb.login()
    except wandb.Error as error:
      raise InputError(
        f"config.metrics.wandb_project='{project}': {_one_line(error)}; set WANDB_API_KEY, run "
        'wandb login, or set WANDB_MODE=offline.'
      ) from error


def start_wandb(
  project: str, workdir: pathlib.Path, first_step: int, settings: Mapping[str, Any]
) -> Any:
  """A new run in the project, with the resolved config; its files lie in workdir/wandb.

  Weights & Biases cannot take back steps, and a resumed run repeats those since its checkpoint. So
  each start is a run of its own there, in a group with the name of the workdir.
  """
  wandb = _package(project)
  group = workdir.resolve().name
  try:
    return wandb.init(
      project=project,
      group=group,
      name=f'{group}-from-{first_step}',
      dir=str(workdir),
      config=dict(settings),
    )
  except wandb.Error as error:
    raise InputError(
      f"config.metrics.wandb_project='{project}': {_one_line(error)}; the same command tries "
      'again, and WANDB_MODE=offline keeps the metrics in the workdir.'
    ) from error


def _package(project: str) -> Any:
  """The wandb module; InputError if it is not installed."""
  try:
    wandb = importlib.import_module('wandb')
  except ImportError:
    wandb = None
  # A folder wandb/, such as wandb leaves behind, can be imported too.
  if not hasattr(wandb, 'init'):
    raise InputError(
      f"config.metrics.wandb_project='{project}' needs wandb, which is not installed: run "
      "pip install -e '.[wandb]' in the clone (elsewhere pip install wandb), or leave the project "
      'empty.'
    )
  return wandb


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split()).rstrip('.')


_TEXTS = 2  # completions of each kind in a step
_TEXT_LIMIT = 4000  # characters of a prompt or a completion; samples/ has all of them
# Tags of the metrics that have no group in their name.
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
# The settings on the HParams page, which has a column for each.
_COMPARED = ('seed', 'num_steps', 'objective.', 'optimizer.', 'replay.', 'rollout.')
_CHARTS = {  # title -> the metrics in it
  'Pass rates': 'pass_rate/.*',
  'Outcomes': 'grading/.*',
  'Buckets of the replay buffer': 'buffer/bucket_.*',
  'Groups solved by all and by none': 'groups/.*',
  'Entropies of correct and of other responses': 'entropy/.*',
  'Token probabilities': 'probability/.*',
  'Buckets of replayed questions': 'replay/bucket_.*',
  'Importance ratios of replayed tokens': 'replay/ratio_.*',
  'Importance ratios of carried tokens': 'staleness/ratio_.*',
  'Seconds by phase': 'time/(?!compile_total).*',
}
_PREFIX = 'patient:'  # of a folder, for tensorboardX alone
_BOUNDS = ('_low', '_high')  # of an evaluation's interval


def tag(name: str) -> str:
  """The tag of a metric, always in a group; ends of intervals are in a group of their own."""
  if name.endswith(_BOUNDS):
    name = name.replace('eval/', 'eval_interval/', 1)
  # tensorboardX allows no other characters, and the charts must name the tags as it writes them.
  return re.sub(r'[^-/\w.]', '_', _TAGS.get(name, name).replace('@', '_at_'))


class _EventFile:
  """A file that skips what it cannot write.

  An error would end tensorboardX's thread, and the run would wait for that forever. metrics.jsonl,
  which has the same values, notices a disk that fails.
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
  """Opens tensorboardX's files in folders that begin with _PREFIX."""

  def open(self, path: str) -> _EventFile:
    return _EventFile(path.removeprefix(_PREFIX))

  def directory_check(self, path: str) -> None:
    os.makedirs(path.removeprefix(_PREFIX), exist_ok=True)


record_writer.register_writer_factory(_PREFIX.rstrip(':'), _EventFiles())


class Board:
  """Writes a run's TensorBoard files."""

  def __init__(
    self, folder: str | os.PathLike, first_step: int, settings: Mapping[str, Any] | None
  ) -> None:
    """Opens a file in `folder`; steps from `first_step` on in earlier ones are no longer shown.

    `settings` is the run's resolved config, nested; None for a page without hparams and charts.
    """
    self._writer = tensorboardX.SummaryWriter(f'{_PREFIX}{folder}', purge_step=first_step)
    self._settings = settings if first_step == 0 else None  # a resumed run's are there already

  def write(
    self, step: int, values: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Writes a step's metrics, and some of its `step_rows.sample_rows`."""
    if self._settings is not None:
      self._writer.add_custom_scalars(charts(values))
      self._write_settings(self._settings, values)
      self._settings = None
    for name, value in values.items():
      if name != 'timestamp':  # every event has one
        self._writer.add_scalar(tag(name), value, step)
    for kind, is_replay in (('fresh', False), ('replayed', True)):
      chosen = [row for row in rows if row['replayed'] == is_replay][:_TEXTS]
      for number, row in enumerate(chosen, 1):
        self._writer.add_text(f'completions/{kind}_{number}', markdown(row), step)

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()

  def _write_settings(self, settings: Mapping[str, Any], values: Mapping[str, float]) -> None:
    # The page shows the first one unasked.
    wanted = [*(name for name in values if name.startswith('eval/') and '@' in name), 'reward']
    shown = {tag(name): 0.0 for name in wanted if not name.endswith(_BOUNDS)}
    file: Any = self._writer.file_writer  # add_hparams would make another run of them
    compared = {name: value for name, value in flat(settings).items() if name.startswith(_COMPARED)}
    for part in summary.hparams(compared, shown)[:2]:  # the third says that the run is over
      file.add_summary(part)


def charts(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
  """The layout of the Custom Scalars page: each evaluation with its interval, metrics together."""
  intervals = [name for name in names if f'{name}_low' in names]
  return {
    'Evaluation with 95% intervals': {
      name.removeprefix('eval/'): ['Margin', [tag(name), tag(f'{name}_low'), tag(f'{name}_high')]]
      for name in intervals
    },
    'Training': {title: ['Multiline', [pattern]] for title, pattern in _CHARTS.items()},
  }


def flat(settings: Mapping[str, Any], prefix: str = '') -> dict[str, bool | str | float]:
  """Nested settings under dotted names; what is no finite number is text."""
  result = {}
  for name, value in settings.items():
    if isinstance(value, Mapping):
      result |= flat(value, f'{prefix}{name}.')
    else:
      is_number = isinstance(value, bool | int | float) and math.isfinite(value)
      result[prefix + name] = value if is_number else str(value)
  return result


def markdown(row: Mapping[str, Any]) -> str:
  """A row of `step_rows.sample_rows` as TensorBoard's text page shows it."""
  facts = {name: row[name] for name in ('row', 'answer', 'outcome', 'reward', 'truncated')}
  if row['replayed']:
    facts['written in step'] = row['written_in_step']
  lines = [', '.join(f'{name}: {value}' for name, value in facts.items())]
  for name in ('question', 'response'):
    text = row[name]
    if len(text) > _TEXT_LIMIT:
      text = f'{text[:_TEXT_LIMIT]} … ({len(text) - _TEXT_LIMIT} more characters)'
    # Indented, which makes it code whatever is in it.
    lines += [f'**{name}**', '\n'.join(f'    {line}' for line in text.split('\n'))]
  return '\n\n'.join(lines)


FILE = 'metrics.jsonl'

Run = Sequence[Mapping[str, float]]  # the records of its metrics.jsonl, oldest first


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
  """What a run records in addition to metrics.jsonl and TensorBoard files."""

  sampled_rows: int = setting(16, '[0, inf)', 'responses of each step that are written to samples/')
  records_every: int = setting(
    10, '[1, inf)', 'steps whose rows are written to records/ together, as one file of each table'
  )
  recorded_groups: int = setting(
    4, '[0, inf)', 'groups of each step whose responses are recorded token by token; 0 is none'
  )
  traced_steps: tuple[int, ...] = setting(
    (),
    None,
    "steps of which JAX's profiler writes a trace into the workdir's traces/, such as (10,)",
  )
  wandb_project: str = setting(
    '', None, "the Weights & Biases project that metrics are also sent to; '' is none"
  )


class Writer:
  """Writes each step's metrics to metrics.jsonl, to TensorBoard and optionally to wandb.

  With several hosts only the first one writes.

  Opening a writer at `first_step` drops the records that an earlier process wrote from that step
  on: a resumed run starts from its last checkpoint and repeats the steps after it.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    first_step: int,
    wandb_project: str = '',
    settings: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens the files in `workdir`; raises InputError for a damaged metrics.jsonl or no wandb.

    `settings` is the resolved config of a run, nested; None for a warm start.
    """
    self._writes = hosts.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._wandb = (
      start_wandb(wandb_project, workdir, first_step, settings or {}) if wandb_project else None
    )
    path = workdir / FILE
    _write(path, (record for record in read(workdir) if record['step'] < first_step))
    self._file = path.open('a', encoding='utf-8')
    self._board = Board(workdir / 'tensorboard', first_step, settings)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    self.close(failed=kind is not None)

  def write(
    self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Records the `metrics` of `step`: name -> Python or array scalar; and the time.

    `rows` are the step's `step_rows.sample_rows`, some of which TensorBoard shows.
    """
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()} | {'timestamp': time.time()}
    self._file.write(json_line({'step': step, **values}))
    self._file.flush()
    self._board.write(step, values, rows)
    if self._wandb:
      self._wandb.log(values, step=step)

  def close(self, failed: bool = False) -> None:
    """Closes the files and finishes the wandb run, marked as `failed` or not."""
    if not self._writes:
      return
    self._file.close()
    self._board.close()
    if self._wandb:
      self._wandb.finish(exit_code=int(failed))


def read(workdir: str | os.PathLike) -> list[dict[str, float]]:
  """The records of metrics.jsonl, oldest first; none if the file does not exist.

  A last line without a newline, as a killed process leaves it, is skipped. Raises InputError for
  any other line that is not a record.
  """
  path = pathlib.Path(workdir) / FILE
  if not path.exists():
    return []
  # Bytes that are not UTF-8 make a line that is not a record.
  lines = path.read_text(encoding='utf-8', errors='backslashreplace').split('\n')[:-1]
  return [_parse(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object per line to `path`, atomically; creates its folder.

  With several hosts only the first one writes.
  """
  if hosts.is_first():
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, rows)


def json_line(record: Mapping[str, Any]) -> str:
  """The record as strict JSON, with its newline; NaN and infinity become text."""
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Write one record per line; a killed process leaves the old file or the new one, complete."""
  # UTF-8 cannot encode a lone surrogate; backslashreplace writes its JSON escape.
  with (
    replacing(path) as unfinished,
    unfinished.open('w', encoding='utf-8', errors='backslashreplace') as file,
  ):
    file.writelines(map(json_line, records))
    file.flush()
    os.fsync(file.fileno())


def _parse(line: str, location: str) -> dict[str, float]:
  try:
    record = json.loads(line)
    step = record.pop('step')
    return {'step': step} | renamed.current_metrics({k: float(v) for k, v in record.items()})
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(
      f'{location}: {line[:80]!r} is not a record of metrics ({error}); delete the line to read '
      'the others.'
    ) from error
