"""A run that trains LoRA's adapters on a Hugging Face checkpoint, resumed and exported."""

import copy
import json
import re
import shutil
import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from exgrpo_jax.commands import export
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment, policies, warm_start
from exgrpo_jax.grading import workers
from exgrpo_jax.huggingface import weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime.workdir import read_config
from tests.helpers import buffers, recording, tiny
from tests.helpers.paths import CHECKPOINTS

pytestmark = pytest.mark.full
STORED = CHECKPOINTS / 'qwen2_tied'
HALF = 4  # steps
RANK, ALPHA = 2, 8.0


@pytest.fixture(scope='module')
def start(values, tmp_path_factory):
  """A copy of the stored checkpoint, and the ConfigDict of a run of 2 * HALF steps on it."""
  folder = shutil.copytree(STORED, tmp_path_factory.mktemp('start') / 'checkpoint')
  changed = copy.deepcopy(values)
  changed.num_steps = 2 * HALF
  changed.model.path = str(folder)
  changed.prompt.template = 'chat'
  changed.rollout.max_prompt = 64
  changed.warm_start.num_updates = 0
  changed.lora.update(dict(rank=RANK, alpha=ALPHA))
  changed.objective.kl_coefficient = 0.01
  changed.data.evaluation = ()
  changed.checkpoint.every = HALF
  changed.export.last = True
  return changed


@pytest.fixture(scope='module')
def train(start, compiled):
  """A function of a workdir and a number of steps: trains there, from its newest checkpoint."""

  def call(workdir, num_steps):
    changed = copy.deepcopy(start)
    changed.num_steps = num_steps
    run = recording.Recording(workdir, compiled, changed, steps={})
    with pytest.MonkeyPatch.context() as patch, run.compiling():
      patch.setattr(workers, 'COMMAND', tiny.WORKER)
      with jax.set_mesh(run.experiment.meshes.training):
        initial = warm_start.initial_params(run.experiment)
        recording.run_training(run.experiment, initial, changed)
    return initial

  return call


@pytest.fixture(scope='module')
def run(train, tmp_path_factory):
  """The workdir of a run without a break, and the base that it was given, as it is afterwards."""
  workdir = tmp_path_factory.mktemp('lora')
  initial = train(workdir, 2 * HALF)
  return types.SimpleNamespace(workdir=workdir, base=initial, experiment=opened(workdir))


def opened(workdir):
  return experiment.open_experiment(ConfigDict(read_config(str(workdir))), str(workdir))


def snapshot(run, workdir, step=2 * HALF):
  with checkpoint.open_manager(str(workdir)) as manager:
    return checkpoint.restore(manager, step, experiment.state_shapes(run.experiment))


def test_only_adapters_change(run):
  """Over steps with replay; the base stays to the bit what its files hold."""
  records = metrics.read(run.workdir)
  assert sum(record.get('replay/rows', 0) for record in records) >= 4
  loaded = weights.load(STORED, run.experiment.model, run.experiment.meshes.training)
  jax.tree.map(np.testing.assert_array_equal, run.base, loaded)
  first, last = (snapshot(run, run.workdir, step).state.params for step in (HALF, 2 * HALF))
  assert set(last) == {'layers'}  # of the checkpoint: the adapters alone
  for earlier, later in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
    assert np.abs(earlier).max() > 0 and not np.array_equal(earlier, later)


def test_the_kl_term_refers_to_the_base(run):
  """The policy begins as its base, so the first minibatch of all has a KL of 0."""
  records = {record['step']: record for record in metrics.read(run.workdir)}
  assert 0 < records[1]['kl'] < 0.1 * records[2 * HALF]['kl']


def test_a_run_resumed_halfway_is_bit_for_bit_the_run_without_a_break(run, train, tmp_path):
  train(tmp_path, HALF)
  train(tmp_path, 2 * HALF)
  resumed, whole = snapshot(run, tmp_path), snapshot(run, run.workdir)
  jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
  buffers.assert_same(resumed.buffer, whole.buffer)
  assert resumed.cursor == whole.cursor
  names = {'loss', 'reward', 'kl', 'gradient_norm', 'entropy'}
  assert [{name: record.get(name) for name in names} for record in tiny.untimed_records(tmp_path)][
    -HALF:
  ] == [{name: record.get(name) for name in names} for record in tiny.untimed_records(run.workdir)][
    -HALF:
  ]


# ---- Exports ----


def write(run, out, **flags):
  """What the export command writes."""
  export.main(
    types.SimpleNamespace(
      **dict(checkpoint=str(run.workdir), model=None, step=None, out=str(out), dtype=None)
      | dict(adapters=False)
      | flags
    )
  )
  return out


@pytest.fixture(scope='module')
def merged(run, tmp_path_factory):
  return write(run, tmp_path_factory.mktemp('exported') / 'merged')


@pytest.fixture(scope='module')
def adapters(run, tmp_path_factory):
  return write(run, tmp_path_factory.mktemp('exported') / 'adapters', adapters=True)


def test_an_export_is_base_plus_adapters(merged, adapters):
  """From the three files alone: W + (alpha / r) B A, in the layout [out, in] of the files."""
  base, whole = (load_file(folder / 'model.safetensors') for folder in (STORED, merged))
  config = json.loads((adapters / 'adapter_config.json').read_text())
  adapter = load_file(adapters / 'adapter_model.safetensors')
  assert (config['r'], config['lora_alpha']) == (RANK, ALPHA)
  assert len(adapter) == 2 * 2 * len(config['target_modules'])  # A and B, two layers
  for name, weight in base.items():
    stem = f'base_model.model.{name.removesuffix(".weight")}'
    if f'{stem}.lora_A.weight' in adapter:
      a, b = (adapter.pop(f'{stem}.lora_{part}.weight').astype(np.float64) for part in 'AB')
      assert a.shape == (RANK, weight.shape[1]) and np.abs(b @ a).max() > 1e-3
      weight = weight + ALPHA / RANK * (b @ a)
    np.testing.assert_allclose(whole[name], weight, atol=1e-6)
  assert adapter == {}


def test_a_run_exports_its_last_policy_merged(run, merged):
  file = 'model.safetensors'
  last = run.workdir / 'export' / 'last' / file
  assert last.read_bytes() == (merged / file).read_bytes()


def test_transformers_and_peft_compute_the_policys_logits(run, merged, adapters):
  torch, transformers, peft = map(pytest.importorskip, ('torch', 'transformers', 'peft'))
  policy, _ = policies.of_run(run.experiment, str(run.workdir), None)
  tokens_T = np.random.default_rng(0).integers(0, run.experiment.model.vocab_size, 40)
  hidden_BTD = model.hidden_states(run.experiment.model, policy, tokens_T[None].astype(np.int32))
  ours_TV = (hidden_BTD @ model.unembedding(run.experiment.model, policy))[0]

  def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  for theirs in (load(merged), peft.PeftModel.from_pretrained(load(STORED), adapters)):
    with torch.no_grad():
      theirs_TV = theirs.eval()(torch.tensor(tokens_T[None])).logits[0].numpy()
    assert np.abs(ours_TV - theirs_TV).max() < 1e-5


# ---- Refusals ----


def test_adapters_are_refused_on_another_base(run, start, train):
  file = f'{start.model.path}/model.safetensors'
  shutil.copy(file, file + '.right')
  shutil.copy(run.workdir / 'export' / 'last' / 'model.safetensors', file)
  try:
    with pytest.raises(
      InputError, match=re.escape("another base than this one (differing: base['l")
    ):
      policies.of_run(run.experiment, str(run.workdir), None)
    with pytest.raises(InputError, match='holds adapters that were trained on another base'):
      train(run.workdir, 2 * HALF)
  finally:
    shutil.move(file + '.right', file)
  assert policies.of_run(run.experiment, str(run.workdir), None)[1] == 2 * HALF


@pytest.mark.parametrize(
  ('flags', 'changes', 'message'),
  [
    (dict(dtype='bfloat16'), {}, 'they are written as they were trained, in float32'),
    ({}, {'lora.rank': 0}, 'this run trained the whole model (config.lora.rank=0) and has none'),
    ({}, {'warm_start.num_updates': 9}, 'what they belong to is no folder that others have'),
    ({}, {'model.path': ''}, 'what they belong to is no folder that others have'),
    ({}, {'model.extension.rope_theta': 1e5}, "they would come without the run's config.model.ext"),
  ],
)
def test_adapters_of_no_use_are_not_exported(run, flags, changes, message):
  values = ConfigDict(read_config(str(run.workdir)))
  values.update_from_flattened_dict(changes)
  with pytest.raises(InputError, match=re.escape(f'--adapters: {message}')):
    export._check_adapters(experiment.parse_config(values), flags.get('dtype'))


def test_a_warm_start_that_is_gone_is_not_trained_again(config, tmp_path):
  config.lora.rank = RANK
  with pytest.raises(InputError, match='no longer holds the warm start that the run began with'):
    warm_start.initial_params(experiment.open_experiment(config, str(tmp_path)))
