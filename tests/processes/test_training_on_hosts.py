"""Training on several hosts: the same run, one end for all, and a way to resume."""

import re
import shutil
import signal
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from exgrpo_jax.learner import checkpoint
from exgrpo_jax.runtime import preemption
from tests.helpers import tiny
from tests.helpers.pods import Pod

STEPS, RESUMED = 20, 12
MESH = ('--config.mesh.data=2', '--config.mesh.fsdp=2')
OWN_PARTS = ('--config.mesh.data=1', '--config.mesh.fsdp=4')  # each host holds half of all
ENDLESS = '--config.num_steps=9999'


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  """What one run compiles the others find."""
  return tmp_path_factory.mktemp('compiled')


@pytest.fixture(scope='module')
def run(tmp_path_factory, data, cache):
  """Gives the workdir of the same run on so many processes, four devices in all."""
  folder = tmp_path_factory.mktemp('hosts')

  @functools.cache
  def made(count):
    workdir = folder / f'{count}'
    with Pod(
      workdir, (count, 4 // count), data, cache, *MESH, f'--config.num_steps={STEPS}'
    ) as pod:
      pod.finish()
    return workdir

  return made


def lasting(workdir):
  """Step -> its metrics but times."""
  return {int(record['step']): record for record in tiny.untimed_records(workdir)}


def assert_close(found, expected, steps):
  for step in steps:
    assert found[step].keys() == expected[step].keys()
    for name, value in expected[step].items():
      assert abs(found[step][name] - value) <= 1e-5 * max(1, abs(value)), (step, name)


def buffers(workdir):
  """Step -> the buffer of its checkpoint, as flat arrays."""
  with checkpoint.open_manager(str(workdir)) as manager:
    return {
      step: manager.restore(step, args=ocp.args.Composite(buffer=ocp.args.StandardRestore()))[
        'buffer'
      ]
      for step in manager.all_steps()
    }


@pytest.mark.parametrize('count', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_processes_make_the_same_run(run, count):
  alone, together = run(1), run(count)
  expected = lasting(alone)
  assert list(expected) == list(range(STEPS + 1))
  assert sum(record.get('replay/rows', 0) for record in expected.values()) > STEPS
  assert_close(lasting(together), expected, range(STEPS + 1))
  left, right = buffers(alone), buffers(together)
  assert list(left) == list(right) and max(left) == STEPS
  for step, arrays in left.items():
    for name in arrays:
      if name != 'logp':
        np.testing.assert_array_equal(arrays[name], right[step][name], f'{step} {name}')
    np.testing.assert_allclose(arrays['logp'], right[step]['logp'], atol=1e-5)


def test_only_the_first_host_prints_and_writes(run):
  first, second = (pathlib.Path(f'{run(2)}.log.{number}') for number in range(2))
  assert first.read_text().count('step 20/20') == 1 and 'hosts: 0 is ' in first.read_text()
  assert 'step' not in second.read_text()
  assert len((run(2) / 'metrics.jsonl').read_text().splitlines()) == STEPS + 1


@pytest.fixture
def workdir(run, tmp_path):
  """What the run on four devices of one process had left after step RESUMED."""
  shutil.copytree(run(1), tmp_path / 'run')
  for path in (tmp_path / 'run' / 'checkpoints').iterdir():
    if int(path.name) > RESUMED:
      shutil.rmtree(path)
  return tmp_path / 'run'


def test_a_run_goes_on_on_twice_the_devices(run, data, cache, workdir):
  with Pod(
    workdir,
    (1, 8),
    data,
    cache,
    '--config.mesh.data=4',
    '--config.mesh.fsdp=2',
    f'--config.num_steps={RESUMED + 4}',
  ) as pod:
    pod.finish()
    assert 'config.mesh.data was 2, is 4' in pod.log()
    assert f'resumed after step {RESUMED} ' in pod.log()
  assert_close(lasting(workdir), lasting(run(1)), range(RESUMED + 5))


def test_two_hosts_go_on_are_told_to_stop_fall_back_and_end_when_one_dies(
  run, data, cache, workdir
):
  with Pod(workdir, (2, 2), data, cache, *OWN_PARTS, ENDLESS) as pod:
    pod.wait_until(lambda: f'step   {RESUMED + 2}/' in pod.log())
    assert f'resumed after step {RESUMED} ' in pod.log()
    pod.processes[1].send_signal(signal.SIGTERM)  # the other must hear of it
    assert pod.exit_statuses() == [preemption.EXIT_CODE] * 2, pod.log()
    last = max(lasting(workdir))
    assert f'saved after step {last} of' in pod.log()
  assert_close(lasting(workdir), lasting(run(1)), range(min(last, STEPS) + 1))

  folder = workdir / 'checkpoints' / str(last)
  before = max(int(path.name) for path in folder.parent.iterdir() if path != folder)
  part = max(folder.glob('state/ocdbt.process_1/d/*'), key=lambda path: path.stat().st_size)
  part.write_bytes(part.read_bytes()[:100])  # of what the second host wrote, and alone reads
  with Pod(workdir, (2, 2), data, cache, *OWN_PARTS, ENDLESS) as pod:
    pod.wait_until(lambda: '| reward' in pod.log())
    assert f'the checkpoint of step {last} is damaged' in pod.log()
    assert f'resumed after step {before} ' in pod.log()
    pod.processes[1].kill()
    killed = time.monotonic()
    assert pod.processes[0].wait(timeout=60) not in (0, None)
    assert time.monotonic() - killed < 60
    assert re.search(r'unhealthy \(stopped sending heartbeats\):\n1\n', pod.log())


def test_tiny_saves_often_enough_for_these():
  assert RESUMED % tiny.SAVED_EVERY == STEPS % tiny.SAVED_EVERY == 0
