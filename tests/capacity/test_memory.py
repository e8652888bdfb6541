"""The formula of a step's memory is held to the buffers that XLA allocates, within 15%."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from jax.experimental import topologies

from exgrpo_jax.capacity import fitting, memory, step
from exgrpo_jax.configs import base, one_gpu
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import lora, model
from exgrpo_jax.runtime.compilations import Program

# In float32, which alone XLA:CPU does not convert. So large that temporary arrays count.
SHAPE = dict(
  vocab_size=4096,
  width=256,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_size=64,
  mlp_width=1024,
  dtype='float32',
)
ROLLOUT = dict(questions=8, samples=4, max_prompt=64, max_response=128, slots=16, logit_chunk=256)
GRADIENT = dict(tokens_per_microbatch=2048)
CASES = {
  'all_is_recomputed': dict(
    rollout=dict(max_response=1216), gradient=dict(tokens_per_microbatch=2560)
  ),
  'products_are_kept': dict(  # with few tokens, so that parameters and gradients count
    model=dict(width=512, tied_embeddings=False, attention_bias=False, query_key_norm=True),
    rollout=dict(logit_chunk=128),
    gradient=dict(remat='all_but_products', tokens_per_microbatch=512),
  ),
  'all_is_kept': dict(
    model=dict(num_layers=4), rollout=dict(samples=8), gradient=dict(remat='none')
  ),
}


def config_of(changes):
  values = base.get_config()
  values.optimizer.minibatches = 1
  for section, settings in dict(model=SHAPE, rollout=ROLLOUT, gradient=GRADIENT).items():
    values[section].update(settings | changes.get(section, {}))
  return parse_config(values)


def differences(config, platform, names, devices=None):
  """Program -> by what share the formula's peak exceeds that of the compiled program."""
  whole = step.of_config(config, devices)
  found = {one.name: one for one in step.needed(fitting.programs(whole)) if one.name in names}
  assert set(found) == set(names)
  return {
    name: memory.estimated(one, whole.spec, platform).peak
    / memory.of_compiled(one.lower().compile()).peak
    - 1
    for name, one in found.items()
  }


@pytest.mark.parametrize('name', CASES)
def test_an_update_takes_what_the_formula_says(name):
  found = differences(config_of(CASES[name]), memory.CPU, ['update'])
  assert max(map(abs, found.values())) < 0.15, found


def test_the_other_programs_take_what_the_formula_says():
  others = ['score', 'prefill', 'resume', 'decode', 'optimizer']
  values = CASES['all_is_recomputed']
  config = config_of(values | {'rollout': values['rollout'] | {'carry': True}})
  found = differences(config, memory.CPU, others)
  assert max(map(abs, found.values())) < 0.15, found


# What XLA has to know of an H100 to compile for one.
H100 = """\
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.mark.parametrize(
  'choice', ['qwen2_5_1_5b,40gb,gsm8k', 'qwen3_1_7b,40gb,math', 'qwen2_5_7b,40gb,gsm8k']
)
def test_a_gpu_takes_what_the_formula_says(choice):
  """Compiled for an H100, in bfloat16, where jax[cuda12] is installed; there need not be one."""
  pytest.importorskip('jax_cuda12_plugin')
  slice_of_one = dict(target_config=H100, topology='1x1x1')
  devices = list(topologies.get_topology_desc('', 'cuda', **slice_of_one).devices)
  config = parse_config(one_gpu.get_config(choice))
  found = differences(
    config,
    memory.of_gpu(config.model.dtype),
    ['score', 'prefill', 'decode', 'update', 'optimizer'],
    devices,
  )
  assert max(map(abs, found.values())) < 0.15, found


def program(name, args=(), kept=(), size=(0, 0)):
  return Program(name, None, args, None, size, kept)


def test_what_is_kept_beside_a_program_is_counted_once_and_its_arguments_not_again():
  params, moments, cache = (np.zeros(count, np.float32) for count in (1, 2, 4))
  of = program('decode', args=(dict(own=params), 3), kept=(params, [cache, cache]))
  assert memory.beside(of, (params, moments, None)) == 4 * (2 + 4)
  assert memory.size_of((params, None, 'static')) == 4


def test_a_program_that_does_not_compile_ends_nothing(capsys):
  held = np.zeros(1, np.float32)

  def need_of(one):
    if one.name == 'decode':
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: too large')
    return memory.Need(one.size[0], 2, 3)

  found = [program('update', size=(20, 5)), program('update', size=(9, 5)), program('decode')]
  peaks = memory.print_peaks(found, held, 25, need_of)
  assert peaks == {'update': 20 + 2 + 3 + 4, 'decode': float('inf')}
  large, small, decode = capsys.readouterr().out.splitlines()
  assert 'update 20 x 5 ' in large and 'DOES NOT FIT: -16% to spare' in large
  assert 'fits, 28% to spare' in small and 'DOES NOT FIT: RESOURCE_EXHAUSTED' in decode


@pytest.mark.parametrize('rank', [0, 2])
def test_the_abstract_arrays_are_those_of_a_run(rank):
  """With LoRA a step keeps its base in the compute dtype."""
  config = config_of(dict(model=dict(dtype='bfloat16')))
  config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=rank))
  whole = step.of_config(config)
  shape, mesh = whole.spec.model, whole.spec.mesh
  params = model.init(shape, jax.random.key(0), mesh)
  trained = lora.init(lora.shapes(config.lora, params), jax.random.key(1)) if rank else params
  state = optimizer.init(config.optimizer, config.num_updates, trained)
  decode_params = model.decode_layout(
    shape, lora.joined(config.lora, params, trained), whole.meshes
  )
  for real, abstract in ((state, whole.state), (decode_params, whole.decode_params)):
    chex.assert_trees_all_equal_shapes_and_dtypes(real, abstract)
    assert memory.size_of(real) == memory.size_of(abstract)
  base = model.frozen(shape, params, mesh) if rank else None
  assert memory.size_of(base) == memory.size_of(whole.initial)
