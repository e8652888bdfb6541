"""Tests of parsing and timing programs, with numbers that are easy to check by hand."""

import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from exgrpo_jax.capacity import cycles, devices, diagnosis
from exgrpo_jax.capacity.devices import Chip
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine

# As written by libtpu, reduced to what is parsed. The kernel's metadata contains a line break.
TEXT = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/code/step.py"

%condition (state: (u32[], f32[8,128])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %state = (u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %below = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%body (state.1: (u32[], f32[8,128])) -> (u32[], f32[8,128]) {
  %two = u32[]{:T(128)} constant(2)
  %state.1 = (u32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %counter.1 = u32[]{:T(128)} get-tuple-element(%state.1), index=0
  %x = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%state.1), index=1
  %next = u32[]{:T(128)S(6)} add(%counter.1, %two), metadata={op_name="jit(step)/add"}
  %y = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x, /*index=5*/%x), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"1500"}}
  ROOT %states = (u32[]{:T(128)}, f32[8,128]{1,0}) tuple(%next, %y)
}

ENTRY %main.1_spmd (param: f32[8,128], bits: s4[6]) -> f32[8,128] {
  %param = f32[8,128]{1,0:T(8,128)} parameter(0)
  %attend = (bf16[7,64,128]{2,1,0:T(8,128)(2,1)}, f32[7,64]{1,0}) custom-call(%param), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2]{1,0}, \
bf16[7,64,128]{2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"estimated_cycles":"9223372036854775807"}
  %loop = (u32[]{:T(128)}, f32[8,128]{1,0}) while(%param), condition=%condition, body=%body
  ROOT %result = f32[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""


def program(*lines, other=''):
  body = '\n'.join(f'  {line}' for line in lines)
  return cycles.parse(f'{other}ENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n')


def operations_of(module):
  return [one for found in module.computations.values() for one in found.operations.values()]


def test_operations_have_sizes_cycles_and_operands():
  module = cycles.parse(TEXT)
  assert list(module.computations) == ['condition', 'body', 'main.1_spmd']
  assert module.entry == 'main.1_spmd'
  y = module.computations['body'].operations['y']
  assert (y.kind, y.cycles, y.operands, y.bytes) == ('fusion', 1500, ('x', 'x'), 8 * 128 * 4)
  assert y.attribute('calls') == 'fused' and y.attribute('body') == ''
  attend = module.computations['main.1_spmd'].operations['attend']
  assert attend.cycles is None  # the compiler's placeholder for unknown cycles
  assert attend.attribute('custom_call_target') == 'tpu_custom_call'
  assert attend.bytes == 7 * 64 * 128 * 2 + 7 * 64 * 4
  assert attend.operand_arrays == (('s8', (1, 2)), ('bf16', (7, 64, 128)))
  assert cycles.array_bytes(('s4', (6,))) == 3


@pytest.mark.parametrize(
  ('old', 'new', 'trips'),
  [
    ('', '', 4),  # 0, 2, 4, 6
    ('constant(2)', 'constant(3)', 3),
    ('add(%counter.1, %two)', 'fusion(%counter.1), kind=kLoop', 8),
    ('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"28"}}', 28),
    ('direction=LT', 'direction=NE', None),
    ('%limit = u32[]{:T(128)} constant(8)', '%limit = u32[] get-tuple-element(%state)', None),
  ],
)
def test_a_loops_trips_follow_from_its_counter(old, new, trips):
  module = cycles.parse(TEXT.replace(old, new))
  assert cycles.known_trips(module, module.computations[module.entry].operations['loop']) == trips


@pytest.mark.parametrize(
  ('groups', 'size'),
  [
    ('replica_groups=[4,16]<=[16,4]T(1,0)', 16),
    ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_1'}", 4),
    ("replica_groups=mesh['a'=2,'b'=4,'c'=8] {'a', 'c'}", 16),
    ('replica_groups={{0,1,2},{3,4,5}}', 3),
    ('channel_id=1', 64),
  ],
)
def test_the_chips_of_a_collective_are_counted(groups, size):
  (found,) = operations_of(
    program(f'ROOT %sum = f32[8]{{0}} all-reduce(%x), {groups}, to_apply=%add')
  )
  assert cycles.group_size(found, 64) == size


def test_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    cycles.parse('jit_step')


def test_a_program_compiled_here_is_parsed():
  def step(x):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ x), x)

  compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((16, 16), 'float32')).compile()
  module = cycles.parse(compiled.as_text())
  (loop,) = [one for one in operations_of(module) if one.kind == 'while']
  assert cycles.known_trips(module, loop) == 5
  assert any(one.kind == 'dot' for one in operations_of(module))


def test_computations_of_another_thread_are_parsed():
  """As for v6e's SparseCore. Otherwise, the next computation would become part of them."""
  of_thread = (
    '%gather (x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8]{0} parameter(0)\n'
    '}, execution_thread="sparsecore"\n\n'
  )
  found = program('ROOT %y = f32[8]{0} parameter(0)', other=of_thread).computations
  assert [*found['gather'].operations, *found['main'].operations] == ['x', 'y']


def test_a_program_that_jax_cannot_print_is_read_from_libtpus_dump():
  """With a stand-in for both compilations, because no program fails reliably."""

  class Unreadable:
    def as_text(self):
      raise jax.errors.JaxRuntimeError('INTERNAL: RET_CHECK failure')

    def compile(self, compiler_options):
      folder = pathlib.Path(compiler_options['xla_dump_to'])
      (folder / 'module_0001.jit_f.cl_1.after_codegen.txt').write_text(TEXT)
      (folder / 'module_0001.jit_f.cl_1.before_optimizations.txt').write_text('')

  assert cycles.module_of(Unreadable(), Unreadable()) == cycles.parse(TEXT)


# ---- Time ----

# 1 GHz; 1,000 bytes per second over a link, 10,000 from memory. A hop's microsecond is negligible.
CHIP = Chip(memory=1, flops=1e6, bandwidth=1e4, link=1e3, clock=1e9, matrix_unit=128)


def taking(seconds):
  return f'backend_config={{"estimated_cycles":"{int(seconds * 1e9)}"}}'


def copying(seconds):
  return f'%a = f32[8]{{0}} copy(%x), {taking(seconds)}'


def seconds_of(*lines, trips=1, other=''):
  return cycles.estimate(program(*lines, other=other), CHIP, 64, trips)


def fused(name, kind='all-gather', channel=1):
  return (
    f'%{name} (p: f32[8]) -> f32[8] {{\n  ROOT %inner.{name} = f32[1000]{{0}} {kind}(%p), '
    f'channel_id={channel}, replica_groups=[16,4]<=[64]\n}}\n\n'
  )


GATHER = '%g = f32[1000]{0} all-gather(%x), channel_id=1, replica_groups=[16,4]<=[64]'


def test_a_loops_cycles_are_multiplied_by_its_trips():
  loop = (
    '%c (s: (s32[])) -> pred[] {\n  %n = s32[] constant(3)\n  %s = (s32[]) parameter(0)\n'
    '  %i = s32[] get-tuple-element(%s), index=0\n'
    '  ROOT %b = pred[] compare(%i, %n), direction=LT\n}\n\n'
    f'%d (s: (s32[])) -> (s32[]) {{\n  %f = f32[8]{{0}} fusion(%s), {taking(2)}\n'
    '  ROOT %t = (s32[]) tuple(%f)\n}\n\n'
  )
  lines = copying(1), '%w = (s32[]) while(%a), condition=%c, body=%d'
  assert seconds_of(*lines, other=loop).operations == pytest.approx(1 + 3 * 2)
  unknown = loop.replace('LT', 'NE')
  assert seconds_of(*lines, other=unknown).total == pytest.approx(1 + 2)
  assert seconds_of(*lines, other=unknown, trips=0).total == pytest.approx(1)


def test_times_are_added_and_subtracted_part_by_part():
  first, second = cycles.Seconds(3, 2, 1, 0), cycles.Seconds(1, 2, 0, 4)
  assert first + second == cycles.Seconds(4, 4, 1, 4) and first + second - second == first


@pytest.mark.parametrize(
  ('kind', 'seconds'),
  [
    # Three quarters of 4,000 bytes pass over a chip's two links.
    ('all-gather', 1.5),
    ('all-reduce', 3.0),
    ('reduce-scatter', 6.0),  # its result is a quarter of its input
    ('all-to-all', 1.5),
    ('collective-permute', 4.0),  # all of it over one link
  ],
)
def test_a_collectives_time_is_its_bytes_over_the_links(kind, seconds):
  (parsed,) = operations_of(program(GATHER.replace('all-gather', kind)))
  assert cycles.collective_seconds(parsed, CHIP, 64) == pytest.approx(seconds, abs=1e-5)


def test_a_synchronous_collective_is_waited_for():
  time = seconds_of(copying(1), GATHER)
  assert (time.operations, time.hidden) == (pytest.approx(1), 0)
  assert time.total == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize(('work', 'waits'), [(2, 0.0), (1, 0.5)])
def test_an_asynchronous_collective_costs_only_the_time_that_is_not_hidden(work, waits):
  """It may be a pair of operations, or a chain of fusions that repeat it."""
  start = GATHER.replace('f32[1000]{0} all-gather', '(f32[250], f32[1000]) all-gather-start')
  pair = seconds_of(start, copying(work), '%e = f32[1000]{0} all-gather-done(%g)')
  other = fused('one') + fused('two')
  chain = seconds_of(
    f'%a = f32[8]{{0}} fusion(%x), calls=%one, {taking(work / 2)}',
    f'%b = f32[8]{{0}} fusion(%a), calls=%two, {taking(work / 2)}',
    other=other,
  )
  started = seconds_of(
    '%async-collective-start.1 = f32[8]{0} fusion(%x), calls=%one',
    f'%b = f32[8]{{0}} fusion(%a), calls=%two, {taking(work)}',
    other=other,
  )
  for time in (pair, chain, started):
    assert time.collectives == pytest.approx(waits, abs=1e-5)
    assert time.hidden == pytest.approx(1.5 - waits, abs=1e-5)
    assert time.total == pytest.approx(work + waits, abs=1e-5)


@pytest.mark.parametrize(
  ('fusion', 'called'), [('all-reduce-scatter.3', 'one'), ('fusion.3', 'all-reduce-scatter.1')]
)
def test_an_all_reduce_scatter_has_one_phase(fusion, called):
  other = fused(called, 'all-reduce')
  time = seconds_of(f'%{fusion} = f32[250]{{0}} fusion(%x), calls=%{called}', other=other)
  assert time.collectives == pytest.approx(1.5, abs=1e-5)


def test_a_pallas_kernel_is_timed_by_formula():
  arguments = (
    'operand_layout_constraints={s8[1,2]{1,0}, bf16[2,10,64]{2,1,0}, bf16[1,10,64]{2,1,0}}'
  )
  call = f'custom-call(%x), custom_call_target="tpu_custom_call", {arguments}'
  # Two heads, two products of [10, 10] by 64, half of each skipped: 25,600 FLOPs at 1e6 per second,
  # with 50% efficiency and a half-filled matrix unit.
  attention = seconds_of(f'%splash_mha_fwd_residuals.1 = bf16[2,10,64]{{2,1,0}} {call}')
  assert attention.kernels == pytest.approx(2 * 2 * 10 * 10 * 64 / 1e6 * 2 * 2)
  backward = seconds_of(f'%splash_mha_dkv.1 = bf16[2,10,64]{{2,1,0}} {call}')
  assert backward.kernels == pytest.approx(2 * attention.kernels)
  # Reads 2, 2,560 and 1,280 bytes and writes 2,560, at three quarters of 10,000 bytes per second.
  other = seconds_of(f'%kernel = bf16[2,10,64]{{2,1,0}} {call}')
  assert other.kernels == pytest.approx((2 + 2560 + 1280 + 2560) / 7.5e3)
  call = call.replace('tpu_custom_call', 'Z')
  assert seconds_of(f'%kernel = bf16[2,10,64]{{2,1,0}} {call}').total == 0


# ---- Names of slices and GPUs ----


@pytest.mark.parametrize('name', ['v9:2x2', 'v5e', ''])
def test_an_unknown_slice_is_refused(name):
  with pytest.raises(InputError, match='Supported generations: v5e, v5p, v6e'):
    devices.chip_of(name)


@pytest.mark.parametrize(('name', 'units'), [('v5e', 4), ('v5p', 8), ('v6e', 4)])
def test_the_clock_gives_the_peak(name, units):
  """Each cell of a matrix unit does one multiply-add per cycle."""
  chip = devices.CHIPS[name]
  peak = 2 * units * chip.matrix_unit**2 * chip.clock
  assert peak == pytest.approx(chip.flops, rel=0.01)


SPELLINGS = {
  16: ['GeForce RTX 4080', 'Tesla V100-SXM2-16GB'],
  24: ['L4', 'RTX-4090', 'rtx_3090_ti', '24gb', '24 GB', '24G', '24'],
  32: ['5090 32 GiB'],
  40: ['A100 40'],
  48: ['RTX 6000 Ada Generation'],
  80: ['a100-80gb', 'A100 80 GB PCIe', 'NVIDIA A100-SXM4-80GB', 'H100 80GB HBM3'],
  94: ['H100 NVL'],
  24 * 2**30 / 1e9: ['24 GiB'],
}


def test_a_gpu_is_known_in_any_spelling():
  spelled = {text: size for size, texts in SPELLINGS.items() for text in texts}
  for text, gigabytes in (devices.GPUS | spelled).items():
    assert devices.usable_memory(text) == pytest.approx(machine.SHARE * 1e9 * gigabytes), text


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('A100', 'a100-80, a100-40'),
    ('4090 16GB', 'b200, .*, or the memory'),
    ('4090 laptop', 'b200, '),
    ('0gb', 'b200, '),
    ('', 'b200, '),
  ],
)
def test_an_unknown_gpu_is_refused(text, message):
  with pytest.raises(InputError, match=f'--device={text}: .*{message}'):
    devices.usable_memory(text)


def test_a_gpu_without_bfloat16_needs_float32():
  devices.check_dtype('l4', 'bfloat16')
  devices.check_dtype('16gb', 'bfloat16')  # a GPU known only by its memory
  devices.check_dtype('t4', 'float32')
  with pytest.raises(InputError, match=r'--device=T4: .* --config\.model\.dtype=float32'):
    devices.check_dtype('T4', 'bfloat16')


# ---- Diagnosis of a machine, and the suggested run ----


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
  monkeypatch.setattr(diagnosis.machine, 'platforms', list)


def problems():
  return [finding.text for finding in diagnosis.findings() if finding.is_problem]


def gpu(memory, kind='NVIDIA GeForce RTX 6090'):
  """Return a GPU as described by JAX, which reserves 90% of its memory."""
  stats = {'bytes_limit': int(0.9 * memory)}
  return types.SimpleNamespace(platform='gpu', device_kind=kind, memory_stats=lambda: stats)


def test_a_machine_without_accelerator_is_offered_a_run_on_its_cpu():
  texts = [finding.text for finding in diagnosis.findings()]
  assert problems() == []
  assert any(f'jax {jax.__version__}, ' in text for text in texts)
  assert any('GB free' in text for text in texts)
  suggested = diagnosis.suggestion(jax.devices('cpu')[0])
  assert suggested == 'exgrpo train --config=chains --workdir=/tmp/chains'


@pytest.mark.parametrize(
  ('platform', 'driver', 'environment', 'words'),
  [
    ('cuda', '535.104.05', '', "pip install -e '.[cuda12]'"),
    ('cuda', '580.65', '', "pip install -e '.[cuda13]'"),
    ('cuda', '', '', 'The NVIDIA driver is not loaded'),
    ('cuda', '580.65', 'cpu', 'JAX_PLATFORMS=cpu'),
    ('tpu', '', '', "pip install -e '.[tpu]'"),
    ('rocm', '', '', 'AMD GPUs'),
  ],
)
def test_an_accelerator_that_jax_does_not_use_is_a_problem(
  platform, driver, environment, words, monkeypatch
):
  monkeypatch.setattr(diagnosis.machine, 'platforms', lambda: [platform])
  monkeypatch.setattr(diagnosis.machine, 'nvidia_driver', lambda: driver)
  monkeypatch.setenv('JAX_PLATFORMS', environment)
  [problem] = problems()
  assert words in problem


def test_a_plugin_for_another_jaxlib_is_a_problem(monkeypatch):
  versions = {'jax': '0.10.2', 'jaxlib': '0.10.2', 'jax-cuda12-pjrt': '0.9.0'}
  monkeypatch.setattr(diagnosis.environment, 'versions', lambda: versions)
  [problem] = problems()
  assert 'jax-cuda12-pjrt 0.9.0 does not match jaxlib 0.10.2' in problem


@pytest.mark.full
@pytest.mark.parametrize(
  ('memory', 'config'),
  [
    (84.9e9, 'one_gpu:qwen3_1_7b,80gb,gsm8k '),
    (42.3e9, 'one_gpu:qwen3_1_7b,40gb,gsm8k '),
    (23.6e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k '),
    (14e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k --config.rollout.slots='),
    (8e9, 'smoke_gpu '),
  ],
)
def test_a_gpu_is_offered_the_largest_model_that_fits_in_full(memory, config):
  assert f'--config={config}' in diagnosis.suggestion(gpu(memory))


@pytest.mark.parametrize('kind', ['Tesla T4', 'Tesla V100-SXM2-16GB'])
def test_a_gpu_without_bfloat16_is_offered_a_run_in_float32(kind):
  suggested = diagnosis.suggestion(gpu(16.1e9, kind))
  assert suggested == 'exgrpo train --config=one_gpu:qwen2_5_0_5b,t4,gsm8k --workdir=/tmp/run'
