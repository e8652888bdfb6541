"""The notebooks in examples/: what is stored in them, and that they run from top to bottom."""

import io
import json
import os
import re
import subprocess
import sys

import jax
import nbclient
import nbformat
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.capacity import examination
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.reporting import metrics
from tests.helpers import hub_server, tabs
from tests.helpers.paths import CHECKPOINTS, REPOSITORY

EXAMPLES = REPOSITORY / 'examples'
ON_MACHINES = ('tpu_v5e8', 'gpu_l4_t4')
TPU, GPU = 'google/gemma-3-1b-it', 'Qwen/Qwen2.5-0.5B-Instruct'
# Appended to a notebook's settings: the same run, small.
SMALL = """

of_machine = get_config


def get_config():
  config = of_machine()
  config.model.update(
    dict(repository='', path=config.model.path or config.model.repository, dtype='float32')
  )
  config.num_steps = 6
  config.rollout.update(dict(questions=8, max_prompt=256, max_response=16, slots=64))
  config.optimizer.learning_rate = 1e-2
  config.logprob_check.max = 1e-3
  config.evaluation.temperature = 1.0
  return config
"""


def cells(name, kind='code'):
  notebook = json.loads((EXAMPLES / f'{name}.ipynb').read_text())
  return [cell for cell in notebook['cells'] if cell['cell_type'] == kind]


def is_tagged(cell, tag):
  return tag in cell['metadata'].get('tags', ())


def written_settings(name, folder):
  """The path of the config file that the notebook writes."""
  [cell] = [cell for cell in cells(name) if is_tagged(cell, 'settings')]
  magic, *lines = cell['source']
  assert magic == '%%writefile run.py\n'
  (folder / 'run.py').write_text(''.join(lines))
  return str(folder / 'run.py')


def test_the_stored_outputs_are_of_one_run_from_top_to_bottom():
  code = cells('library')
  assert [cell['execution_count'] for cell in code] == list(range(1, len(code) + 1))
  kinds = {output['output_type'] for cell in code for output in cell['outputs']}
  assert kinds == {'stream', 'execute_result'}, 'no errors'
  names = {output.get('name') for cell in code for output in cell['outputs']}
  assert 'stderr' not in names


@pytest.mark.parametrize('name', ON_MACHINES)
def test_what_was_not_run_on_its_machine_has_no_outputs(name):
  assert [cell for cell in cells(name) if cell['execution_count'] or cell['outputs']] == []


@pytest.mark.parametrize('kind', ['code', 'markdown'])
def test_notebooks_for_two_machines_differ_in_what_is_the_machines(kind):
  tpu, gpu = (
    [cell['source'] for cell in cells(name, kind) if not is_tagged(cell, 'machine')]
    for name in ON_MACHINES
  )
  assert tpu == gpu != []


@pytest.mark.parametrize(
  ('device', 'listed', 'dtype'),
  [
    ('l4', 'GPU 0: NVIDIA L4 (UUID: GPU-0a2c)', 'bfloat16'),
    ('t4', 'GPU 0: Tesla T4 (UUID: GPU-0a2c)', 'float32'),
  ],
)
def test_the_settings_for_a_gpu_fit_it(device, listed, dtype, tmp_path, monkeypatch):
  monkeypatch.setattr(subprocess, 'getoutput', lambda _: listed)
  config = parse_config(config_files.load(written_settings('gpu_l4_t4', tmp_path)))
  assert config.model.dtype == dtype
  assert examination.examine_gpu(config, device).fits


def test_the_settings_for_a_slice_are_those_that_were_compiled_for_it(tmp_path):
  ours = parse_config(config_files.load(written_settings('tpu_v5e8', tmp_path)))
  compiled = parse_config(config_files.load_config('gemma3_1b'))
  assert ours.model.path == compiled.model.repository == TPU
  for part in ('rollout', 'microbatch', 'optimizer', 'mesh', 'lora'):
    assert getattr(ours, part) == getattr(compiled, part)


# ---- From top to bottom, on eight devices of this machine's CPU ----


def tiny_gemma(folder):
  """Writes config.json and random weights of a Gemma 3 with the tokens of `qwen2_tied`."""
  values = json.loads((CHECKPOINTS / 'gemma3_two_bases' / 'config.json').read_text())
  values |= dict(vocab_size=320, max_position_embeddings=2048)
  shape = architecture.parse(values, 'config.json', 'float32')
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  weights.save(folder, shape, model.init(shape, jax.random.key(0), mesh), values, 'float32')


@pytest.fixture
def hub(tmp_path):
  """A Hub with tiny models and easy questions, by the names that the notebooks have."""
  qwen = {path.name: path.read_bytes() for path in (CHECKPOINTS / 'qwen2_tied').iterdir()}
  shape = json.loads(qwen['config.json']) | {'max_position_embeddings': 2048}
  qwen['config.json'] = json.dumps(shape).encode()
  tiny_gemma(tmp_path / 'gemma')
  gemma = qwen | {path.name: path.read_bytes() for path in (tmp_path / 'gemma').iterdir()}
  table = io.BytesIO()
  rows = [{'question': f'{n} + {7 - n}', 'answer': '7\n#### 7'} for n in range(8)] * 8
  pq.write_table(pa.Table.from_pylist(rows), table)
  splits = {f'main/{name}-00000-of-00001.parquet': table.getvalue() for name in ('train', 'test')}
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    server.add('model', TPU, gemma)
    server.add('model', GPU, qwen)
    server.add('dataset', 'openai/gsm8k', splits)
    yield server


def executed(name, folder, monkeypatch):
  """The notebook after it has run in `folder`, without the installation, and small."""
  notebook = nbformat.read(EXAMPLES / f'{name}.ipynb', 4)
  for cell in notebook.cells:
    cell.source = cell.source.replace('/tmp/run', str(folder / 'run'))
    if is_tagged(cell, 'install'):
      cell.source = re.sub('^%pip .*', '', cell.source, flags=re.MULTILINE)
    elif is_tagged(cell, 'settings'):
      cell.source += SMALL
    elif cell.source.startswith('!'):
      cell.source += '\nassert _exit_code == 0'
  for key, value in {
    'HOME': str(folder),
    'PATH': f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}',
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=8',
  }.items():
    monkeypatch.setenv(key, value)
  place = {'metadata': {'path': str(folder)}}
  return nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()


def outputs(notebook):
  return [output for cell in notebook.cells for output in cell.get('outputs', ())]


@pytest.mark.full
@pytest.mark.parametrize('name', ON_MACHINES)
@pytest.mark.usefixtures('hub')
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
  notebook = executed(name, tmp_path, monkeypatch)
  printed = ''.join(output.get('text', '') for output in outputs(notebook))
  assert 'device      8 cpus, 1 host' in printed
  assert 'after step 0  ->' in printed and '--- 1 of 1: ' in printed
  steps = metrics.read(str(tmp_path / 'run'))
  assert any(step.get('pass_rate/replay') for step in steps), 'a stored success was replayed'
  exported = architecture.read_json(tmp_path / 'run' / 'export' / 'last')
  family = {'tpu_v5e8': 'Gemma3ForCausalLM', 'gpu_l4_t4': 'Qwen2ForCausalLM'}[name]
  assert exported['architectures'] == [family]
  [shown] = [output.data['text/html'] for output in outputs(notebook) if 'data' in output]
  check_report(shown)


def check_report(shown):
  """One goes from page to page of a report that a notebook shows; where there is a browser."""
  if tabs.missing():
    return
  with tabs.opened() as opened:
    page = opened.new_page()
    page.set_content(shown)
    report = page.frame_locator('iframe')
    report.get_by_role('link', name='Buffer').click()
    report.locator('a[aria-current=page]', has_text='Buffer').wait_for()
