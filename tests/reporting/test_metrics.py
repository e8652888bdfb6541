"""Metrics are written and read back: metrics.jsonl, TensorBoard, Weights & Biases."""

import json
import math
import os
import struct
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from exgrpo_jax.commands import train
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics
from tests.helpers import tiny


def write_steps(workdir, first_step, steps, value):
  with metrics.Writer(workdir, first_step) as writer:
    for step in steps:
      writer.write(step, {'reward': value})


@pytest.fixture
def at_noon(monkeypatch):
  """Every record is written at second 12."""
  monkeypatch.setattr('time.time', lambda: 12.0)


@pytest.mark.usefixtures('at_noon')
def test_a_step_is_one_line_of_strict_json_that_can_be_read_at_once(tmp_path):
  with metrics.Writer(tmp_path, 0) as writer:
    writer.write(0, {'reward': np.float64(1 / 3), 'entropy': math.nan, 'max': math.inf, 'n': 2})
    (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert line == (
    '{"step": 0, "reward": 0.3333333333333333, "entropy": "nan", "max": "inf", "n": 2.0, '
    '"timestamp": 12.0}'
  )
  (record,) = metrics.read(tmp_path)
  assert record['reward'] == 1 / 3 and math.isnan(record['entropy']) and record['max'] == math.inf


@pytest.mark.usefixtures('at_noon')
def test_a_resumed_run_drops_the_records_of_steps_that_it_repeats(tmp_path):
  write_steps(tmp_path, 0, range(4), 0.0)
  write_steps(tmp_path, 2, [2], 1.0)
  assert metrics.read(tmp_path) == [
    {'step': step, 'reward': reward, 'timestamp': 12.0} for step, reward in enumerate((0, 0, 1))
  ]


def test_an_evaluation_that_a_full_disk_cut_off_is_dropped(tmp_path):
  folder = tmp_path / 'evaluation'
  folder.mkdir()
  metrics.append_evaluation(str(folder), {'step': 4, 'data': 'first'})
  with open(folder / 'evaluations.jsonl', 'a') as file:
    file.write('{"step": 4, "da')
  assert [one['data'] for one in metrics.read_evaluations(tmp_path, 4)] == ['first']
  metrics.append_evaluation(str(folder), {'step': 4, 'data': 'second'})
  assert [one['data'] for one in metrics.read_evaluations(tmp_path, 4)] == ['first', 'second']


@pytest.mark.parametrize('line', ['oops', '[1]', '{"data": "x"}'])
def test_a_damaged_evaluation_is_named(tmp_path, line):
  (tmp_path / 'evaluation').mkdir()
  (tmp_path / 'evaluation' / 'evaluations.jsonl').write_text(f'{{"step": 4}}\n{line}\n')
  with pytest.raises(InputError, match=r'evaluations\.jsonl:2: .* is not an evaluation record'):
    metrics.read_evaluations(tmp_path, 4)


def test_an_incomplete_last_line_is_dropped(tmp_path):
  write_steps(tmp_path, 0, range(2), 0.0)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "rew')
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1]
  write_steps(tmp_path, 3, [3], 0.0)
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1, 3]


@pytest.mark.parametrize(
  'line',
  [
    b'{"reward": 1.0}',
    b'oops',
    b'[1]',
    b'{"step": 1, "reward": "x"}',
    b'{"step": NaN}',
    b'{"step": 1.5}',
    b'\xff',
  ],
)
def test_a_damaged_record_is_named(tmp_path, line):
  write_steps(tmp_path, 0, [0], 0.0)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(line + b'\n')
  with pytest.raises(InputError, match=r'metrics\.jsonl:2: .* is not a metrics record'):
    metrics.Writer(tmp_path, 0)


@pytest.mark.parametrize('steps', [(0, 1, 3), (0, 1, 2), (0, 1, 2, 2, 3), ()])
def test_a_resumed_run_warns_if_records_are_missing_or_repeated(tmp_path, steps, capsys):
  write_steps(tmp_path, 0, range(5), 0.0)
  write_steps(tmp_path, 4, [4], 0.0)
  assert capsys.readouterr().err == ''
  metrics.write_rows(tmp_path / metrics.FILE, [{'step': step, 'reward': 0.0} for step in steps])
  write_steps(tmp_path, 4, [4], 0.0)
  assert 'metrics.jsonl: the file must have one record for each step from 1 to 3, but' in (
    capsys.readouterr().err
  )
  assert [record['step'] for record in metrics.read(tmp_path)] == [*steps, 4]


def test_metrics_outlive_a_power_cut_once_they_are_flushed(tmp_path, monkeypatch):
  synced = []
  monkeypatch.setattr('os.fsync', lambda file: synced.append(os.readlink(f'/proc/self/fd/{file}')))
  with metrics.Writer(tmp_path, 0) as writer:
    writer.write(1, {'reward': 0.0})
    synced.clear()
    writer.flush()
  assert str(tmp_path / metrics.FILE) in synced


def test_a_kill_while_resuming_leaves_the_old_records(tmp_path, monkeypatch):
  write_steps(tmp_path, 0, range(3), 0.0)
  monkeypatch.setattr('os.replace', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    metrics.Writer(tmp_path, 1)
  assert len(metrics.read(tmp_path)) == 3


def test_without_a_file_there_are_no_records(tmp_path):
  assert metrics.read(tmp_path) == []


def test_rows_are_readable_text_and_strict_json(tmp_path):
  rows = [
    {'question': '1+1=?\n', 'response': '二 \ud800', 'reward': 1.0, 'correct': True},
    {'question': 'q', 'response': '', 'reward': math.nan, 'correct': False},
  ]
  path = tmp_path / 'samples' / 'step_000012.jsonl'
  metrics.write_rows(path, rows)
  text = path.read_text()
  assert '二' in text
  assert [json.loads(line) for line in text.splitlines()] == [rows[0], {**rows[1], 'reward': 'nan'}]
  assert list(path.parent.iterdir()) == [path]


# ---- TensorBoard ----


def events(workdir):
  """The events under workdir/tensorboard; a file repeats length, checksum, event, checksum."""
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      yield event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]


def of_plugin(workdir, name):
  """(step, value) of the summaries that a plugin shows."""
  return [
    (event.step, value)
    for event in events(workdir)
    for value in event.summary.value
    if value.metadata.plugin_data.plugin_name == name
  ]


def scalars(workdir):
  return [(step, value.tag, value.simple_value) for step, value in of_plugin(workdir, '')]


def test_a_resumed_run_drops_the_scalars_of_steps_that_it_repeats(tmp_path):
  with metrics.Writer(tmp_path, 3) as writer:
    for step in (3, 4):
      writer.write(step, {'reward': 0.5})
  assert scalars(tmp_path) == [(3, 'reward/mean', 0.5), (4, 'reward/mean', 0.5)]
  starts = [e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START]
  assert starts == [3]


def test_every_tag_of_a_real_run_is_in_a_group_and_every_metric_has_one(recorded):
  written = {(step, tag) for step, tag, _ in scalars(recorded.workdir)}
  assert all('/' in tag for _, tag in written)
  assert written == {
    (record['step'], metrics.tag(name))
    for record in metrics.read(recorded.workdir)
    for name in record
    if name not in ('step', 'timestamp')
  }
  assert all('/' in tag for _, tag, _ in scalars(recorded.workdir / 'warm_start'))
  assert metrics.tag('eval/a b/pass@1_low') == 'eval_interval/a_b/pass_at_1_low'


def test_every_step_has_completions_and_the_settings_appear_once(recorded):
  texts = of_plugin(recorded.workdir, 'text')
  # tensorboardX itself adds the last part.
  named = [(step, value.tag.removesuffix('/text_summary'), value) for step, value in texts]
  (settings,) = [(step, value) for step, name, value in named if name == 'settings']
  assert settings[0] == 0
  assert f'"ratio": {tiny.RATIO}'.encode() in settings[1].tensor.string_val[0]
  completions = [(step, name, value) for step, name, value in named if name != 'settings']
  assert {step for step, _, _ in completions} == set(range(1, tiny.NUM_STEPS + 1))
  assert {name for _, name, _ in completions} == {
    f'completions/{kind}_{number}' for kind in ('fresh', 'replayed') for number in (1, 2)
  }
  assert all(b'**response**' in value.tensor.string_val[0] for _, _, value in completions)


def test_a_completion_is_formatted_as_code_and_cut_if_it_is_long():
  row = dict(row=3, answer='7', outcome='wrong', reward=0.0, truncated=True, replayed=False)
  row |= {'question': '<|user|>3+4\n```', 'response': 'x' * 4100}
  text = metrics.markdown(row)
  assert text.startswith('row: 3, answer: 7, outcome: wrong, reward: 0.0, truncated: True\n\n')
  assert '**question**\n\n    <|user|>3+4\n    ```\n\n' in text
  assert text.endswith(f'    {"x" * 4000} … (100 more characters)')
  replayed = metrics.markdown(row | {'replayed': True, 'written_in_step': 2})
  assert 'written in step: 2' in replayed


def test_a_full_disk_neither_ends_nor_blocks_a_run(tmp_path):
  """An error would end the board's thread, and its queue of ten events would never empty."""
  with open('/dev/full', 'wb') as full, metrics.Writer(tmp_path, 0) as writer:
    (board,) = writer._board.all_writers.values()
    events = board.event_writer._ev_writer
    file = events._py_recordio_writer._writer
    with events._lock:  # the writing thread must not find a closed file
      file._file.close()
      file._file = full
    for step in range(1000):
      writer.write(step, {'reward': 1.0})


# ---- Weights & Biases, with a fake package ----


class WandbError(Exception):
  """A fake wandb.Error."""


@pytest.fixture
def package(monkeypatch):
  """A fake wandb package that records its calls in `calls`."""
  calls = []
  run = types.SimpleNamespace(
    log=lambda values, step: calls.append((values, step)),
    finish=lambda exit_code: calls.append(f'finished with {exit_code}'),
  )
  module = types.SimpleNamespace(
    init=lambda **options: calls.append(options) or run,
    login=lambda: True,
    Error=WandbError,
    calls=calls,
  )
  monkeypatch.setitem(sys.modules, 'wandb', module)
  return module


def refuse(*_, **__):
  raise WandbError('api_key not configured (no-tty).\n  call wandb.login()')


def test_a_run_gets_the_config_and_the_metrics(package, tmp_path):
  settings = {'seed': 3, 'replay': {'ratio': 0.5}}
  with metrics.Writer(tmp_path / 'run', 7, 'replay', settings) as writer:
    writer.write(7, {'reward': 1})
  options, (values, step), end = package.calls
  names = {'project': 'replay', 'group': 'run', 'name': 'run-from-7'}
  assert options == names | {'dir': str(tmp_path / 'run'), 'config': settings}
  assert values['reward'] == 1.0 and step == 7 and end == 'finished with 0'


def test_only_a_run_that_fails_is_marked_as_failed(package, tmp_path):
  for error, code in (SystemExit(75), 0), (SystemExit(1), 1), (ValueError(), 1):
    with pytest.raises(type(error)), metrics.Writer(tmp_path, 0, 'replay', {}):
      raise error  # a run that stops to be resumed exits with 75
    assert package.calls[-1] == f'finished with {code}'


INSTALL = r"Run pip install -e '\.\[wandb\]' in the clone"


@pytest.mark.parametrize(
  ('installed', 'message'),
  [
    (None, INSTALL),
    (types.ModuleType('wandb'), INSTALL),  # a folder wandb/, which wandb leaves behind
    (
      types.SimpleNamespace(login=refuse, init=None, Error=WandbError),
      r'no-tty\)\. call wandb\.login\(\)\. Set WANDB_API_KEY, run',
    ),
  ],
  ids=['absent', 'a_folder', 'without_a_key'],
)
def test_missing_wandb_or_login_is_refused_before_anything_is_prepared(
  config, tmp_path, monkeypatch, installed, message
):
  monkeypatch.setitem(sys.modules, 'wandb', installed)
  config.metrics.wandb_project = 'replay'
  with pytest.raises(InputError, match=message):
    train.main(types.SimpleNamespace(config=config, workdir=str(tmp_path / 'run')))
  assert not (tmp_path / 'run').exists()


def test_a_start_that_fails_is_one_line(package, tmp_path, monkeypatch):
  monkeypatch.setattr(package, 'init', refuse)
  message = 'With WANDB_MODE=offline, wandb writes only to the workdir'
  with pytest.raises(InputError, match=message) as refused:
    metrics.Writer(tmp_path, 0, 'replay', {})
  assert refused.value.status == 1
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_without_a_project_wandb_is_not_needed(monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  metrics.check_wandb('')
  assert tiny.values('', '').metrics.wandb_project == ''
