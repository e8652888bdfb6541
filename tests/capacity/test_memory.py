"""Tests that the memory formula is within 15% of the buffers that XLA allocates."""

import dataclasses

import chex
import jax
import numpy as np
import pyarrow as pa
import pytest
from jax.experimental import topologies

from exgrpo_jax.capacity import devices, fitting, lengths, memory, step
from exgrpo_jax.configs import base, one_gpu
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import step_records
from exgrpo_jax.runtime.compilations import Program

# float32, because XLA:CPU converts bfloat16. Large enough that temporary arrays matter.
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
ROLLOUT = dict(
  questions=8, group_size=4, max_prompt=64, max_response=128, slots=16, logit_chunk=256
)
MICROBATCH = dict(tokens=2048)
CASES = {
  'all_is_recomputed': dict(rollout=dict(max_response=1216), microbatch=dict(tokens=2560)),
  'products_are_kept': dict(  # few tokens, so that parameters and gradients matter
    model=dict(width=512, tied_embeddings=False, attention_bias=False, query_key_norm=True),
    rollout=dict(logit_chunk=128),
    microbatch=dict(remat='all_but_products', tokens=512),
  ),
  'all_is_kept': dict(
    model=dict(num_layers=4), rollout=dict(group_size=8), microbatch=dict(remat='none')
  ),
}


def config_of(changes):
  values = base.get_config()
  values.optimizer.minibatches = 1
  for section, settings in dict(model=SHAPE, rollout=ROLLOUT, microbatch=MICROBATCH).items():
    values[section].update(settings | changes.get(section, {}))
  return parse_config(values)


def check_differences(config, platform, names, devices=None):
  whole = step.of_config(config, devices)
  found = {one.name: one for one in step.needed(fitting.programs(whole)) if one.name in names}
  assert set(found) == set(names)
  for name, one in found.items():
    compiled = memory.of_compiled(one.executable).peak
    formula = memory.estimated(one, whole.spec, platform).peak
    assert formula == pytest.approx(compiled, rel=0.15), name


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_the_formula_matches_xlas_cpu_buffers(name):
  """Check the update in every case, and the other programs in one."""
  config, names = config_of(CASES[name]), ['update']
  if name == 'all_is_recomputed':
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, partial=True))
    names += ['score', 'prefill', 'resume', 'decode', 'optimizer']
  check_differences(config, memory.CPU, names)


# The description that XLA needs to compile for an H100.
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
def test_the_formula_matches_xlas_gpu_buffers(choice):
  """Compile for an H100 in bfloat16 if jax[cuda12] is installed. This needs no GPU."""
  pytest.importorskip('jax_cuda12_plugin')
  slice_of_one = dict(target_config=H100, topology='1x1x1')
  devices = list(topologies.get_topology_desc('', 'cuda', **slice_of_one).devices)
  config = parse_config(one_gpu.get_config(choice))
  names = ['score', 'prefill', 'decode', 'update', 'optimizer']
  check_differences(config, memory.of_gpu(config.model.dtype), names, devices)


def program(name, args=(), kept=(), size=(0, 0)):
  return Program(name, None, args, None, size, kept)


def test_other_arrays_are_counted_once_and_exclude_arguments():
  params, moments, cache = (np.zeros(count, np.float32) for count in (1, 2, 4))
  of = program('decode', args=(dict(own=params), 3), kept=(params, [cache, cache]))
  assert memory.other_arrays(of, (params, moments, None)) == 4 * (2 + 4)
  assert memory.size_of((params, None, 'static')) == 4


def test_a_program_that_does_not_compile_does_not_stop_the_others(capsys):
  held = np.zeros(1, np.float32)

  def need_of(one):
    if one.name == 'decode':
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: too large')
    return memory.Need(one.size[0], 2, 3)

  found = [program('update', size=(20, 5)), program('update', size=(9, 5)), program('decode')]
  peaks = memory.print_peaks(found, held, 25, need_of)
  assert peaks == {'update': 20 + 2 + 3 + 4, 'decode': float('inf')}
  large, small, decode = capsys.readouterr().out.splitlines()
  assert 'update 20 x 5 ' in large and 'DOES NOT FIT: 16.0% over the limit' in large
  assert 'fits, 28% to spare' in small and 'DOES NOT FIT: RESOURCE_EXHAUSTED' in decode


@pytest.mark.full
@pytest.mark.parametrize('rank', [0, 2])
def test_abstract_arrays_match_a_runs(rank):
  """With LoRA, a step keeps its base in the compute dtype."""
  config = config_of(dict(model=dict(dtype='bfloat16')))
  config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=rank))
  whole = step.of_config(config)
  shape, mesh = whole.spec.model, whole.spec.mesh
  params = model.init(shape, jax.random.key(0), mesh)
  trained = lora.init(lora.shapes(config.lora, params), jax.random.key(1)) if rank else params
  state = optimizer.init(config.optimizer, config.num_updates, trained)
  policy = lora.joined(config.lora, params, trained)
  decode_params = model.decode_layout(shape, policy, whole.meshes)
  for real, abstract in ((state, whole.state), (decode_params, whole.decode_params)):
    chex.assert_trees_all_equal_shapes_and_dtypes(real, abstract)
    assert memory.size_of(real) == memory.size_of(abstract)
  base = model.frozen(shape, params, mesh) if rank else None
  assert memory.size_of(base) == memory.size_of(whole.initial)


# ---- Configs for one GPU, which must fit by formula ----


def opened(choice):
  return parse_config(config_files.load_config(f'one_gpu:{choice}'))


@pytest.mark.full
@pytest.mark.parametrize('choice', one_gpu.FITS, ids='-'.join)
def test_a_config_is_the_largest_that_fits(choice):
  config, limit = opened(','.join(choice)), devices.usable_memory(choice[1])
  assert max(fitting.peaks(config).values()) <= limit
  assert fitting.fit(config, limit) == (config.rollout.slots, config.microbatch.tokens)


def test_a_config_that_does_not_fit_is_refused():
  with pytest.raises(InputError, match='qwen2_5_7b does not fit 24gb with gsm8k'):
    opened('qwen2_5_7b')


@pytest.mark.full
def test_keeping_caches_between_turns_doubles_their_memory():
  base = opened('qwen2_5_0_5b,24gb,gsm8k')
  rollout = dataclasses.replace(base.rollout, max_response=2048)
  environment = dataclasses.replace(base.environment, name='attempts')
  kept = dataclasses.replace(base, rollout=rollout, environment=environment)
  environment = dataclasses.replace(environment, keep_caches=False)
  without = dataclasses.replace(kept, environment=environment)
  [decode] = [one for one in step.of_config(kept).generating() if one.name == 'decode']
  slots, found = memory.size_of(decode.args[3].cache), fitting.peaks(kept)
  of_generating = 'prefill', 'resume', 'decode'
  more = {name: found[name] - size for name, size in fitting.peaks(without).items()}
  assert more == pytest.approx({name: slots * (name in of_generating) for name in more}, rel=0.001)
  limit = devices.usable_memory('24gb')
  most, fewer = (fitting.fit(config, limit) for config in (without, kept))
  assert most and fewer and (most.slots, fewer.slots) == (256, 128)


@pytest.mark.full
@pytest.mark.parametrize('model', ['qwen2_5_1_5b', 'qwen3_1_7b'])
def test_lora_is_used_only_if_full_fine_tuning_does_not_fit(model, monkeypatch):
  """Full fine-tuning does not fit with bfloat16 moments either."""
  assert opened(model).lora.rank
  monkeypatch.setitem(one_gpu.FITS, (model, '24gb', 'gsm8k'), (8, 1536, 'bfloat16'))
  config = parse_config(one_gpu.get_config(model))
  assert not config.lora.rank
  assert fitting.fit(config, devices.usable_memory('24gb')) is None


def test_config_arguments_come_in_any_order_and_have_defaults():
  first, second = (opened(words) for words in ('math,qwen2_5_0_5b', 'qwen2_5_0_5b,24gb,math'))
  assert first == second != opened('')
  with pytest.raises(InputError, match="'qwen9' after the colon must be one of qwen2_5_0_5b, "):
    opened('qwen9')


# ---- Response lengths ----


MANY = 100_000


@pytest.mark.parametrize(  # without a spec, the median is an eighth of the limit
  ('spec', 'median', 'limit'),
  [('lognormal:1000', 1000, 8192), ('lognormal:1000,4096', 1000, 4096), ('', 1024, 8192)],
)
def test_lognormal_lengths_have_the_median_and_the_limit(spec, median, limit):
  drawn = lengths.draw(spec, MANY, 8192)
  assert np.median(drawn) == pytest.approx(median, rel=0.02)
  assert drawn.min() >= 1 and drawn.max() == limit
  described = lengths.describe(spec, 8192)
  assert f'median {median:,}' in described and f'limit {limit:,}' in described


def test_the_99th_percentile_is_eight_medians():
  drawn = lengths.draw('lognormal:100', MANY, 8192)
  assert np.quantile(drawn, 0.99) == pytest.approx(800, rel=0.05)
  assert drawn.mean() == pytest.approx(149, rel=0.05)
  assert lengths.draw('lognormal:100', MANY, 8192).tolist() == drawn.tolist()


def test_a_runs_lengths_are_sampled_from_its_generated_responses(tmp_path):
  write_records(tmp_path, length=[7, 50, 9000, 3], is_replay=[False, False, False, True])
  drawn = lengths.draw(str(tmp_path), MANY, 8192)
  assert sorted(set(drawn)) == [7, 50, 8192]
  assert np.mean(drawn == 7) == pytest.approx(1 / 3, rel=0.05)
  assert str(tmp_path) in lengths.describe(str(tmp_path), 8192)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('lognormal', r'--lengths=lognormal: .* must be lognormal:MEDIAN or lognormal:MEDIAN,LIMIT'),
    ('lognormal:0', r'--lengths=lognormal:0: .* must be lognormal:MEDIAN'),
    ('lognormal:10,20,30', r'must be lognormal:MEDIAN'),
    ('lognormal:1e3', r'must be lognormal:MEDIAN'),
    ('lognormal:1000,9000', r'9000: the limit exceeds config\.rollout\.max_response=8192'),
    ('nowhere', r'--lengths=nowhere: this folder contains no records.* must be .* workdir of a'),
  ],
)
def test_invalid_lengths_are_refused(spec, message):
  with pytest.raises(InputError, match=message):
    lengths.draw(spec, 1, 8192)


def test_a_run_without_responses_is_refused(tmp_path):
  write_records(tmp_path, length=[3], is_replay=[True])
  with pytest.raises(InputError, match='the run has no recorded responses yet'):
    lengths.draw(str(tmp_path), 1, 8192)


def write_records(workdir, **columns):
  """Write responses with these columns; other columns are empty or zero."""
  count, values = len(columns['is_replay']), {}
  for field in step_records.RESPONSES:
    blank = None if field.nullable else '' if field.type == pa.string() else 0
    values[field.name] = pa.array(columns.get(field.name, [blank] * count))
  table = pa.table(values).cast(step_records.RESPONSES)
  path = step_records.path_of(workdir, 'responses', 1)
  path.parent.mkdir()
  step_records.write_file(path, table)
