"""Several hosts are one run: the same losses and buffer, one end, and a way on from it."""

import functools
import http.server
import pathlib
import re
import shutil
import signal
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import flagsaver

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.runtime import hosts, preemption
from tests.helpers import tiny
from tests.helpers.devices import free_port, in_two_processes, on_two_hosts
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


def test_what_hosts_tell_each_other(tmp_path):
  on_two_hosts(f"""
import os, sys, time
from exgrpo_jax.runtime import hosts
from exgrpo_jax.errors import InputError

me = jax.process_index()
assert hosts.all_gather({{'host': me, 'long': 'x' * 99 * me}}) == [
    {{'host': 0, 'long': ''}}, {{'host': 1, 'long': 'x' * 99}}]
assert hosts.broadcast_from_first(.1 + me) == .1
assert hosts.is_first() == (me == 0)
pieces = [n for n in range(5) if hosts.is_own_share(n)]
assert pieces == [[0, 2, 4], [1, 3]][me]
assert hosts.merge_shares([f'piece {{n}}' for n in pieces]) == [f'piece {{n}}' for n in range(5)]
with hosts.first_host_first('x'):
  if me == 0:
    time.sleep(.3)
    os.mkdir({str(tmp_path / 'made')!r})
  assert os.path.exists({str(tmp_path / 'made')!r})
hosts.check_shared({str(tmp_path)!r})
hosts.barrier('z')
os.makedirs(own := {str(tmp_path)!r} + f'/{{me}}')
try:
  hosts.check_shared(own)
  raise AssertionError('each has its own')
except InputError as error:
  assert 'do not see what host 0 writes into it: 1.' in str(error)
hosts.check_same('x.jsonl', 'the questions', lambda: b'same')
try:
  hosts.check_same('x.jsonl', 'the questions', lambda: b'%d' % me)
  raise AssertionError('they differ')
except InputError as error:
  assert 'x.jsonl: the questions of host 1 are not those of host 0' in str(error)
""")


@pytest.fixture
def metadata():
  """A Cloud TPU VM's metadata server, as one for each of two workers; gives their addresses."""

  def of_worker(number):
    class Answer(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        known = {
          'agent-worker-number': number,
          'tpu-env': "ACCELERATOR_TYPE: 'v5litepod-8'",
          'worker-network-endpoints': 'a:1:localhost,b:2:localhost',
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(known[self.path.rpartition('/')[2]].encode())

      def log_message(self, *_):
        pass

    return http.server.ThreadingHTTPServer(('localhost', 0), Answer)

  servers = [of_worker(number) for number in '01']
  for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
  yield [f'localhost:{server.server_port}' for server in servers]
  for server in servers:
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize('cluster', ['Slurm', 'GKE', 'Cloud TPU'])
def test_hosts_are_found_by_what_the_cluster_says(cluster, metadata):
  environment = {
    'Slurm': {
      'SLURM_JOB_ID': '7',
      'SLURM_STEP_NODELIST': 'localhost',
      'SLURM_NTASKS': '2',
      'SLURM_STEP_NUM_NODES': '1',
    },
    'GKE': {
      'JAX_FORCE_TPU_INIT': '1',
      'TPU_WORKER_HOSTNAMES': 'localhost,localhost',
      'MEGASCALE_COORDINATOR_ADDRESS': 'localhost',
      'MEGASCALE_NUM_SLICES': '1',
      'MEGASCALE_SLICE_ID': '0',
    },
    'Cloud TPU': {'JAX_FORCE_TPU_INIT': '1'},
  }[cluster]
  environment['JAX_COORDINATOR_PORT'] = str(free_port())
  own = [
    {
      'NUMBER': str(number),
      'SLURM_PROCID': str(number),
      'SLURM_LOCALID': str(number),
      'TPU_WORKER_ID': str(number),
      'GCE_METADATA_IP': metadata[number],
    }
    for number in (0, 1)
  ]
  in_two_processes(
    f"""
import os
import jax
if {cluster == 'Cloud TPU'}:  # JAX sees that there are no chips, and would not ask
  os.environ.pop('TPU_SKIP_MDS_QUERY')
from absl import flags
from exgrpo_jax.runtime import hosts

flags.FLAGS.mark_as_parsed()
number = int(os.environ['NUMBER'])
with hosts.joined():
  assert hosts.all_gather(number) == [0, 1]
""",
    [environment | one for one in own],
  )


def test_one_host_tells_itself():
  assert (
    hosts.all_gather([1]) == [[1]] and hosts.broadcast_from_first('a') == 'a' and hosts.is_first()
  )
  assert hosts.merge_shares([1, 2]) == [1, 2] and hosts.is_own_share(1)
  with hosts.first_host_first('x'):
    hosts.barrier('y')
  hosts.check_shared('/nowhere')


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ({'process_id': 0}, 'belong together'),
    ({'num_processes': 2}, 'belong together'),
    ({'coordinator_address': 'localhost:1'}, 'belong together'),
    (
      {'coordinator_address': 'localhost:1', 'num_processes': 2, 'process_id': 2},
      '--process_id=2 must be below --num_processes=2',
    ),
    (
      {'coordinator_address': 'localhost', 'num_processes': 2, 'process_id': 1},
      '--coordinator_address=localhost must be host:port',
    ),
  ],
)
def test_flags_that_name_no_place_are_refused(flags, message):
  flagsaver.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(**flags), pytest.raises(InputError, match=message), hosts.joined():
    pass


def test_one_process_alone_joins_nobody():
  flagsaver.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(num_processes=1), hosts.joined():
    assert hosts.is_first()


def test_tiny_saves_often_enough_for_these():
  assert RESUMED % tiny.SAVED_EVERY == STEPS % tiny.SAVED_EVERY == 0
