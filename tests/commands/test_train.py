"""The train command: a run that is killed and resumed, stopped by a signal, or finished."""

import copy
import json
import os
import re
import shlex
import signal
import sys
import time
import types

import jax
import numpy as np
import pytest
from pyarrow import compute

from exgrpo_jax.commands import export, train
from exgrpo_jax.experiment import experiment, policies
from exgrpo_jax.grading import programs
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import step_records
from exgrpo_jax.runtime import activity, preemption
from exgrpo_jax.runtime.clock import Clock
from tests.helpers import buffers, forked, recording, tiny
from tests.helpers.devices import caching
from tests.helpers.paths import CHECKPOINTS, TINY_CONFIG
from tests.huggingface.stored_checkpoints import read_config, read_tensors


def test_a_run_that_is_longer_than_requested_is_finished_and_unchanged(recorded, values, capsys):
  config = copy.deepcopy(values)
  config.num_steps = 5
  before = {path: path.stat().st_mtime_ns for path in recorded.workdir.rglob('*')}
  train.main(types.SimpleNamespace(config=config, workdir=str(recorded.workdir)))
  out = capsys.readouterr().out
  assert f'It has taken {tiny.NUM_STEPS} steps, and config.num_steps=5. Nothing was changed' in out
  assert before == {path: path.stat().st_mtime_ns for path in recorded.workdir.rglob('*')}


@pytest.mark.full
def test_a_killed_and_resumed_run_is_bit_for_bit_the_uninterrupted_run(recorded, data, tmp_path):
  workdir = tmp_path / 'killed'
  settings = {'data.train': data.train, 'warm_start.data': data.train}
  settings |= {'data.evaluation': f"('{data.evaluation}',)", 'data.cache_dir': data.cache}
  command = ['train', f'--config={TINY_CONFIG}', f'--workdir={workdir}']
  command += [f'--config.{name}={value}' for name, value in settings.items()]
  environment = caching(recorded.compiled) | {'JAX_PLATFORMS': 'cpu'}
  with forked.start(command, **environment) as process:
    while not (workdir / 'checkpoints' / str(tiny.SAVED_EVERY)).exists():
      assert process.is_running(), process.wait()
      time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    refused = forked.run_one(command, **environment)
    assert refused.status == 2 and not refused.used_device
    assert f'The lock was taken by process {process.pid} on ' in refused.err
    process.send_signal(signal.SIGKILL)
    assert process.wait().status == -signal.SIGKILL
  assert not (workdir / 'checkpoints' / str(tiny.NUM_STEPS)).exists()
  last = max(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())
  with open(workdir / 'metrics.jsonl', 'a') as file:  # as if killed one step later
    file.write(json.dumps({'step': last + 1, 'reward': -1.0}) + '\n')
  outcome = forked.run_one(command, **environment)
  assert outcome.status == 0, outcome.err
  assert 'config.data.train contains 4 of its 4 prompts' in outcome.err
  assert 'resumed after step' in outcome.out and 'warm start' not in outcome.out
  check_what_it_said(outcome.out, (workdir / 'console.log').read_text(), last, command)

  expected, resumed = (recorded.last_snapshot(path) for path in (recorded.workdir, workdir))
  jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
  buffers.assert_same(resumed.buffer, expected.buffer)
  assert resumed.cursor == expected.cursor and resumed.step == expected.step == tiny.NUM_STEPS
  assert tiny.untimed_records(workdir) == tiny.untimed_records(recorded.workdir)
  assert samples_of(workdir) == samples_of(recorded.workdir)
  assert step_records.read(workdir) == step_records.read(recorded.workdir)
  assert tiny.token_rows(workdir) == tiny.token_rows(recorded.workdir) != []
  assert {path.name for path in (workdir / 'tokenizer').iterdir()} >= {'tokenizer.model'}


def samples_of(workdir):
  return {path.name: path.read_text() for path in (workdir / 'samples').iterdir()}


def check_what_it_said(out, kept, done, command):
  """Check a resumed run's banner, time left and closing message, and that all output is kept."""
  first, second = re.split(r'^---- \S+ \S+  ', kept, flags=re.MULTILINE)[1:]
  assert 'warm start 30/30' in first and 'warm start' not in second
  python, *words = shlex.split(second.splitlines()[0])
  assert os.path.samefile(python, sys.executable)  # the path may differ after ../v/bin/python
  assert words == ['-m', 'exgrpo_jax', 'train', *command[1:]]
  printed = out.splitlines()
  assert [line for line in second.splitlines()[1:] if line in printed] == printed
  assert f'  steps       {tiny.NUM_STEPS} ({done} already done)' in printed
  steps = [line for line in printed if line.startswith('step ')]
  assert steps[0].endswith('       - left')  # unknown, because the step compiled
  assert not steps[-2].endswith('- left') and steps[-1].endswith(' 0:00:00 left')
  assert re.search(r'\n  \S+ -m exgrpo_jax evaluate --checkpoint=\S+ --samples=4\n', out)


@pytest.fixture
def terminate_in(monkeypatch):
  """(phase, n, signal) -> signal this process when a run enters the phase for the nth time."""
  awaited = []  # the phase, once for each entry up to the signal, and the signal
  enter = Clock.__call__

  def enter_and_count(clock, phase, *args, **kwargs):
    if phase in awaited:
      awaited.remove(phase)
      if len(awaited) == 1:
        os.kill(os.getpid(), awaited.pop())
    return enter(clock, phase, *args, **kwargs)

  monkeypatch.setattr(Clock, '__call__', enter_and_count)

  def terminate(phase, n, number):
    awaited.extend([phase] * n + [number])

  # A shell's background jobs ignore Ctrl-C, and so do tests that one of them starts.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield terminate
  signal.signal(signal.SIGINT, before)


@pytest.mark.full
def test_a_run_that_gets_a_signal_finishes_and_saves_its_step_and_can_be_resumed(
  recorded, values, tmp_path, monkeypatch, terminate_in, capsys
):
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)
  config = copy.deepcopy(values)
  config.num_steps = 10
  opened = experiment.open_experiment(config, str(tmp_path))

  def run():
    layout = model.shardings(opened.model, opened.meshes.training)
    params = jax.device_put(recorded.steps[1].params, layout)
    with recorded.compiling():
      recording.run_training(opened, params)

  assert tiny.SAVED_EVERY == 4
  for phase, n, step, number in (
    ('generate', 2, 2, signal.SIGTERM),
    ('grade', 2, 4, signal.SIGINT),
    ('await_update', 2, 6, signal.SIGINT),
    ('save', 1, 8, signal.SIGTERM),
  ):
    terminate_in(phase, n, number)
    with pytest.raises(SystemExit) as stopped:
      run()
    assert stopped.value.code == preemption.EXIT_CODE
    err = capsys.readouterr().err
    assert f'{number.name}: the run will stop after this step is finished and saved' in err
    assert f'stopped by {number.name}: the run was saved after step {step} of 10' in err
  run()
  snapshot = recorded.last_snapshot(tmp_path)
  assert snapshot.step == 10
  jax.tree.map(np.testing.assert_array_equal, snapshot.state.params, recorded.steps[11].params)
  buffers.assert_same(snapshot.buffer, recorded.steps[10].after)
  for table, expected in zip(step_records.read(tmp_path), step_records.read(recorded.workdir)):
    assert table == expected.filter(compute.field('step') <= 10)


# ---- A model of any origin becomes a Hugging Face folder, by one command ----


STORED = CHECKPOINTS / 'qwen2_tied'


@pytest.fixture
def run(tmp_path, capsys):
  """A function that exports a model and returns (folder, output)."""

  def run(model, dtype=None):
    out = tmp_path / 'out'
    flags = dict(checkpoint=None, step=None, model=str(model), adapters=False)
    flags |= dict(push=None, public=False)
    export.main(types.SimpleNamespace(**flags, out=str(out), dtype=dtype))
    return out, capsys.readouterr().out

  return run


@pytest.fixture
def gguf(tmp_path, monkeypatch):
  """The stored checkpoint as a GGUF file."""
  pytest.importorskip('gguf')
  from tests.helpers import gguf_files

  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  return gguf_files.write(tmp_path / 'model.gguf', STORED)


def assert_same_weights(folder):
  found, expected = read_tensors(folder), read_tensors(STORED)
  assert set(found) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array)


@pytest.mark.full
def test_a_folder_is_exported_bit_for_bit(run):
  out, printed = run(STORED)
  assert printed == f'{out}: {STORED}, in float32\n'
  assert_same_weights(out)
  assert (out / 'tokenizer.json').read_bytes() == (STORED / 'tokenizer.json').read_bytes()


def test_the_activity_names_the_export_and_what_it_compiles(run, monkeypatch):
  said, write = [], export.write

  def watched(*args):
    said.append(activity.now())
    activity.compiling('cast')
    said.append(activity.now())
    write(*args)

  monkeypatch.setattr(export, 'write', watched)
  run(STORED)
  assert said[0].startswith(f'exporting {STORED} (') and ': compiling cast (' in said[1]


@pytest.mark.full
def test_a_gguf_file_becomes_a_folder_with_the_same_model(run, gguf):
  out, printed = run(gguf)
  assert printed == f'{out}: {gguf}, in float32\n'
  assert_same_weights(out)
  assert read_config(out) == read_config(STORED)
  text = '<|im_start|>\\boxed{12}\n café ###'
  given, written, stored = (policies.open_policy(str(path)) for path in (gguf, out, STORED))
  of_given, of_written, of_stored = (
    (p.experiment.model, tok.encode(text), tok.eos_ids, tok.chat.template)
    for p in (given, written, stored)
    for tok in [p.experiment.tokenizer]
  )
  assert of_given == of_written == of_stored


def test_the_flag_sets_the_dtype(run, gguf):
  out, printed = run(gguf, 'bfloat16')
  assert printed.endswith('in bfloat16\n')
  assert {str(array.dtype) for array in read_tensors(out).values()} == {'bfloat16'}
