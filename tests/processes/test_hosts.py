"""What the hosts of a run exchange, and how they find each other."""

import http.server
import threading

import pytest

from tests.helpers.devices import free_port, in_two_processes, on_two_hosts


def test_hosts_exchange_values_and_check_that_they_agree(tmp_path):
  on_two_hosts(f"""
import os, sys, time
from exgrpo_jax.runtime import hosts
from exgrpo_jax.errors import InputError

me = jax.process_index()
assert hosts.all_gather({{'host': me, 'text': 'x' * 99 * me}}) == [
    {{'host': 0, 'text': ''}}, {{'host': 1, 'text': 'x' * 99}}]
assert hosts.broadcast_from_first(.1 + me) == .1
assert hosts.is_first() == (me == 0)
share = [n for n in range(5) if hosts.is_own_share(n)]
assert share == [[0, 2, 4], [1, 3]][me]
assert hosts.merge_shares([f'piece {{n}}' for n in share]) == [f'piece {{n}}' for n in range(5)]
with hosts.first_host_first('x'):
  if me == 0:
    time.sleep(.3)
    os.mkdir({str(tmp_path / 'made')!r})
  assert os.path.exists({str(tmp_path / 'made')!r})
hosts.check_shared({str(tmp_path)!r})
hosts.barrier('z')
os.makedirs(own_folder := {str(tmp_path)!r} + f'/{{me}}')
try:
  hosts.check_shared(own_folder)
  raise AssertionError('the folder is not shared')
except InputError as error:
  assert 'do not see what host 0 writes into it: 1.' in str(error)
hosts.check_same('x.jsonl', 'the questions', lambda: b'same')
try:
  hosts.check_same('x.jsonl', 'the questions', lambda: b'%d' % me)
  raise AssertionError('they differ')
except InputError as error:
  assert 'x.jsonl: the questions of host 1 differ from those of host 0' in str(error)
""")


def test_a_layout_is_restored_without_a_program():
  """A program for each array, behind a collective, once filled the queue of a step."""
  on_two_hosts("""
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from exgrpo_jax.policy import sharding
from exgrpo_jax.runtime import compilations

mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=8, tensor=1))
layout = NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))
x = jax.jit(lambda: jnp.ones((8, 3)), out_shardings=NamedSharding(mesh, PartitionSpec('fsdp')))()
assert x.sharding != layout
with compilations.counted() as compiled:
  assert sharding.restore_layout(x, layout).sharding == layout
assert not compiled.count, compiled.names
""")


@pytest.fixture
def metadata():
  """The addresses of two Cloud TPU metadata servers, one for each of two workers."""

  def server_of(number):
    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        values = {
          'agent-worker-number': number,
          'tpu-env': "ACCELERATOR_TYPE: 'v5litepod-8'",
          'worker-network-endpoints': 'a:1:localhost,b:2:localhost',
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(values[self.path.rpartition('/')[2]].encode())

      def log_message(self, *_):
        pass

    return http.server.ThreadingHTTPServer(('localhost', 0), Handler)

  servers = [server_of(number) for number in '01']
  for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
  yield [f'localhost:{server.server_port}' for server in servers]
  for server in servers:
    server.shutdown()
    server.server_close()


@pytest.mark.full
@pytest.mark.parametrize('cluster', ['Slurm', 'GKE', 'Cloud TPU'])
def test_hosts_find_each_other_by_the_clusters_environment(cluster, metadata):
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
  by_host = [
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
from exgrpo_jax.runtime import hosts

number = int(os.environ['NUMBER'])
with hosts.joined(hosts.Meeting()):
  assert hosts.all_gather(number) == [0, 1]
""",
    [environment | of_host for of_host in by_host],
  )
