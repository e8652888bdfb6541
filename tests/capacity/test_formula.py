"""The formula of a step's memory is held to the buffers that XLA allocates, within 15%."""

import jax
import pytest
from jax.experimental import topologies

from exgrpo_jax.capacity import arrays as held
from exgrpo_jax.capacity import examination, formula, programs
from exgrpo_jax.configs import base, one_gpu
from exgrpo_jax.experiment.settings import parse_config

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
  spec, decoding = examination.step_spec(config, devices)
  with jax.set_mesh(spec.mesh):
    arrays = held.step_arrays(spec, decoding)
    needs = formula.of_step(config.rollout, spec, decoding, arrays, platform)
    compiled = programs.of_step(config.rollout, spec, decoding, arrays)
    return {name: needs[name].peak / compiled[name]().need.peak - 1 for name in names}


@pytest.mark.parametrize('name', CASES)
def test_an_update_takes_what_the_formula_says(name):
  found = differences(config_of(CASES[name]), formula.CPU, ['update'])
  assert max(map(abs, found.values())) < 0.15, found


def test_the_other_programs_take_what_the_formula_says():
  others = ['score', 'prefill', 'resume', 'decode', 'optimizer']
  values = CASES['all_is_recomputed']
  config = config_of(values | {'rollout': values['rollout'] | {'carry': True}})
  found = differences(config, formula.CPU, others)
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
    formula.of_gpu(config.model.dtype),
    ['score', 'prefill', 'decode', 'update', 'optimizer'],
    devices,
  )
  assert max(map(abs, found.values())) < 0.15, found
