"""Training on several hosts: the same run as on one, an end for all of them, and resuming."""

import contextlib
import functools
import pathlib
import re
import shutil
import signal
import time

import pytest
from etils import epath

from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.runtime import preemption
from tests.helpers import buffers, tiny
from tests.helpers.pods import CARRY, Pod

pytestmark = pytest.mark.full
STEPS, RESUMED = 8, 4
assert STEPS % tiny.SAVED_EVERY == RESUMED % tiny.SAVED_EVERY == 0
# Of two hosts, each holds all parameters; heads are split while decoding.
MESH = (
  '--config.mesh.training.data=2',
  '--config.mesh.training.fsdp=2',
  '--config.mesh.decoding.tensor=2',
)
# Of two hosts, each holds half of the parameters while training, and all while decoding.
SHARDED = ('--config.mesh.training.data=1', '--config.mesh.training.fsdp=4')
ENDLESS = '--config.num_steps=9999'


@pytest.fixture(scope='module')
def run(tmp_path_factory, data, compiled):
  """A function: the workdir of the same run on that many processes, with four devices in all."""
  folder = tmp_path_factory.mktemp('hosts')

  def start(count):
    flags = (*MESH, f'--config.num_steps={STEPS}', f'--config.evaluation.every={RESUMED}')
    return Pod(folder / f'{count}', (count, 4 // count), data, compiled, *flags)

  @functools.cache
  def finish(*counts):
    """Side by side."""
    with contextlib.ExitStack() as stack:
      for pod in [stack.enter_context(start(count)) for count in counts]:
        pod.finish()

  def workdir(count):
    finish(1, 2)  # which all tests need
    if count > 2:
      finish(count)
    return folder / f'{count}'

  return workdir


def records_of(workdir):
  """Step -> its metrics without times."""
  return {int(record['step']): record for record in tiny.untimed_records(workdir)}


def assert_close(records, expected, steps):
  for step in steps:
    assert records[step].keys() == expected[step].keys()
    for name, value in expected[step].items():
      assert abs(records[step][name] - value) <= 1e-5 * max(1, abs(value)), (step, name)


def stored_buffers(workdir):
  """Step -> the buffer in its checkpoint."""
  folder = epath.Path(workdir) / 'checkpoints'
  return {
    step: buffer_files.read(folder / str(step) / 'buffer')
    for step in checkpoint.steps(str(workdir))
  }


@pytest.mark.parametrize('count', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_processes_make_the_same_run(run, count):
  expected = records_of(run(1))
  assert list(expected) == list(range(STEPS + 1))
  assert sum(record.get('replay/rows', 0) for record in expected.values()) > STEPS
  assert expected[STEPS]['buffer/retired'] > 0 and expected[STEPS]['epoch'] > 1
  assert_close(records_of(run(count)), expected, range(STEPS + 1))
  expected, by_step = stored_buffers(run(1)), stored_buffers(run(count))
  assert list(by_step) == list(expected) and max(by_step) == STEPS
  for step, buffer in by_step.items():
    buffers.assert_same(buffer, expected[step], atol=1e-5)


@pytest.mark.slow
def test_responses_span_steps_in_the_same_way_on_more_processes(data, compiled, tmp_path):
  flags = (*CARRY, f'--config.num_steps={STEPS}', f'--config.evaluation.every={STEPS}')
  with (
    Pod(tmp_path / 'one', (1, 1), data, compiled, *flags) as one,
    Pod(tmp_path / 'two', (2, 2), data, compiled, *MESH, *flags) as two,
  ):
    one.finish()
    two.finish()
  expected = records_of(tmp_path / 'one')
  assert sum(record.get('carry/token_share', 0) for record in expected.values()) > 0.5
  assert_close(records_of(tmp_path / 'two'), expected, range(STEPS + 1))
  found = (stored_buffers(tmp_path / name)[STEPS] for name in ('two', 'one'))
  buffers.assert_same(*found, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('carry', [False, True])
def test_episodes_are_the_same_on_more_processes(carry, data, compiled, tmp_path):
  """Each host has the environments of its share."""
  flags = (
    *(CARRY if carry else ()),
    '--config.environment.name=tests.helpers.environments:Chance',
    '--config.environment.max_turns=3',
    '--config.environment.max_turn_tokens=3',
    '--config.environment.workers=2',
    f'--config.num_steps={STEPS}',
    f'--config.evaluation.every={STEPS}',
  )
  with (
    Pod(tmp_path / 'one', (1, 1), data, compiled, *flags) as one,
    Pod(tmp_path / 'two', (2, 2), data, compiled, *MESH, *flags) as two,
  ):
    one.finish()
    two.finish()
  clock = ('environment/seconds', 'environment/idle_seconds', 'rollout/slots_busy')
  expected, found = (
    {
      step: {name: value for name, value in record.items() if name not in clock}
      for step, record in records_of(tmp_path / name).items()
    }
    for name in ('one', 'two')
  )
  assert expected[STEPS]['environment/turns_max'] > 1 and expected[STEPS]['replay/rows']
  assert_close(found, expected, range(STEPS + 1))


def test_only_the_first_host_prints_and_writes(run):
  first, second = (pathlib.Path(f'{run(2)}.log.{number}').read_text() for number in range(2))
  assert first.count(f'step {STEPS}/{STEPS}') == 1 and 'hosts: 0 is ' in first
  assert 'step' not in second
  assert len((run(2) / 'metrics.jsonl').read_text().splitlines()) == STEPS + 1


@pytest.fixture
def workdir(run, tmp_path):
  """A copy of what the run on four devices of one process had written after step RESUMED."""
  shutil.copytree(run(1), tmp_path / 'run')
  for path in (tmp_path / 'run' / 'checkpoints').iterdir():
    if int(path.name) > RESUMED:
      shutil.rmtree(path)
  return tmp_path / 'run'


def test_a_run_can_be_resumed_on_twice_the_devices(run, data, compiled, workdir):
  flags = (
    '--config.mesh.training.data=4',
    '--config.mesh.training.fsdp=2',
    '--config.mesh.decoding.tensor=1',
    f'--config.num_steps={STEPS}',
  )
  with Pod(workdir, (1, 8), data, compiled, *flags) as pod:
    pod.finish()
    assert 'config.mesh.training.data was 2, is 4' in pod.log()
    assert f'resumed after step {RESUMED} ' in pod.log()
  assert_close(records_of(workdir), records_of(run(1)), range(STEPS + 1))


def test_two_hosts_resume_stop_together_fall_back_together_and_end_when_one_dies(
  run, data, compiled, workdir
):
  with Pod(workdir, (2, 2), data, compiled, *SHARDED, ENDLESS) as pod:
    pod.wait_until(lambda: f'step    {RESUMED + 2}/' in pod.log())
    assert f'resumed after step {RESUMED} ' in pod.log()
    pod.processes[1].send_signal(signal.SIGTERM)  # the first must stop at the same step
    assert pod.exit_statuses() == [preemption.EXIT_CODE] * 2, pod.log()
    last = max(records_of(workdir))
    assert f'saved after step {last} of' in pod.log()
  assert_close(records_of(workdir), records_of(run(1)), range(min(last, STEPS) + 1))

  folder = workdir / 'checkpoints' / str(last)
  before = max(int(path.name) for path in folder.parent.iterdir() if path != folder)
  # A part that the second host wrote, and that only the second host reads.
  part = max(folder.glob('state/ocdbt.process_1/d/*'), key=lambda path: path.stat().st_size)
  part.write_bytes(part.read_bytes()[:100])
  with Pod(workdir, (2, 2), data, compiled, *SHARDED, ENDLESS) as pod:
    pod.wait_until(lambda: '| reward' in pod.log())
    assert f'the checkpoint of step {last} is damaged' in pod.log()
    assert f'resumed after step {before} ' in pod.log()
    pod.processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert pod.processes[0].wait().status != 0
    assert time.monotonic() - killed < 60
    assert re.search(r'unhealthy \(stopped sending heartbeats\):\n1\n', pod.log())
