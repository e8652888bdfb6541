"""A program's time: cycles, formulas, loops; figures that can be checked in the head."""

import pytest

from exgrpo_jax.capacity import hlo, program_time
from exgrpo_jax.capacity.chips import Chip

# 1 GHz; 1,000 bytes a second over a link, 10,000 from memory; a hop of 1 microsecond is nothing.
CHIP = Chip(memory=1, flops=1e6, bandwidth=1e4, link=1e3, clock=1e9, matrix_unit=128)


def cycles(seconds):
  return f'backend_config={{"estimated_cycles":"{int(seconds * 1e9)}"}}'


def seconds_of(*lines, trips=1, other=''):
  body = '\n'.join(f'  {line}' for line in lines)
  text = f'{other}ENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n'
  return program_time.estimate(hlo.parse(text), CHIP, 64, trips)


def fused(name, kind='all-gather', channel=1):
  return (
    f'%{name} (p: f32[8]) -> f32[8] {{\n  ROOT %inner.{name} = f32[1000]{{0}} {kind}(%p), '
    f'channel_id={channel}, replica_groups=[16,4]<=[64]\n}}\n\n'
  )


GATHER = '%g = f32[1000]{0} all-gather(%x), channel_id=1, replica_groups=[16,4]<=[64]'


def test_cycles_of_a_loop_count_as_often_as_it_runs():
  loop = (
    '%c (s: (s32[])) -> pred[] {\n  %n = s32[] constant(3)\n  %s = (s32[]) parameter(0)\n'
    '  %i = s32[] get-tuple-element(%s), index=0\n'
    '  ROOT %b = pred[] compare(%i, %n), direction=LT\n}\n\n'
    f'%d (s: (s32[])) -> (s32[]) {{\n  %f = f32[8]{{0}} fusion(%s), {cycles(2)}\n'
    '  ROOT %t = (s32[]) tuple(%f)\n}\n\n'
  )
  own, run = (
    f'%a = f32[8]{{0}} copy(%x), {cycles(1)}',
    '%w = (s32[]) while(%a), condition=%c, body=%d',
  )
  assert seconds_of(own, run, other=loop).operations == pytest.approx(1 + 3 * 2)
  unknown = loop.replace('LT', 'NE')
  assert seconds_of(own, run, other=unknown).total == pytest.approx(1 + 2)
  assert seconds_of(own, run, other=unknown, trips=0).total == pytest.approx(1)


@pytest.mark.parametrize(
  ('kind', 'seconds'),
  [
    # 4,000 bytes, of which three quarters pass a chip's two links.
    ('all-gather', 1.5),
    ('all-reduce', 3.0),
    ('reduce-scatter', 6.0),  # its result is a quarter of what it reduces
    ('all-to-all', 1.5),
    ('collective-permute', 4.0),  # all of it over one link
  ],
)
def test_a_collective_takes_what_passes_a_chips_links(kind, seconds):
  operation = GATHER.replace('all-gather', kind)
  module = hlo.parse(f'ENTRY %m (x: f32[8]) -> f32[8] {{\n  {operation}\n}}\n')
  (parsed,) = module.computations['m'].operations.values()
  assert program_time.collective_seconds(parsed, CHIP, 64) == pytest.approx(seconds, abs=1e-5)


def test_a_synchronous_collective_is_waited_for():
  time = seconds_of(f'%a = f32[8]{{0}} copy(%x), {cycles(1)}', GATHER)
  assert (time.operations, time.hidden) == (pytest.approx(1), 0)
  assert time.total == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize(('work', 'waits'), [(2, 0.0), (1, 0.5)])
def test_an_asynchronous_collective_costs_what_the_rest_does_not_hide(work, waits):
  """Whether it is a pair of operations or spread over fusions, which repeat it."""
  start = GATHER.replace('all-gather', 'all-gather-start').replace(
    'f32[1000]{0}', '(f32[250], f32[1000])'
  )
  pair = seconds_of(
    start, f'%a = f32[8]{{0}} copy(%x), {cycles(work)}', '%e = f32[1000]{0} all-gather-done(%g)'
  )
  other = fused('one') + fused('two')
  chain = seconds_of(
    f'%a = f32[8]{{0}} fusion(%x), calls=%one, {cycles(work / 2)}',
    f'%b = f32[8]{{0}} fusion(%a), calls=%two, {cycles(work / 2)}',
    other=other,
  )
  started = seconds_of(
    '%async-collective-start.1 = f32[8]{0} fusion(%x), calls=%one',
    f'%b = f32[8]{{0}} fusion(%a), calls=%two, {cycles(work)}',
    other=other,
  )
  for time in (pair, chain, started):
    assert time.collectives == pytest.approx(waits, abs=1e-5)
    assert time.hidden == pytest.approx(1.5 - waits, abs=1e-5)
    assert time.total == pytest.approx(work + waits, abs=1e-5)


@pytest.mark.parametrize(
  ('fusion', 'called'), [('all-reduce-scatter.3', 'one'), ('fusion.3', 'all-reduce-scatter.1')]
)
def test_a_reduce_scatter_made_of_an_all_reduce_is_one_phase_of_it(fusion, called):
  other = fused(called, 'all-reduce')
  time = seconds_of(f'%{fusion} = f32[250]{{0}} fusion(%x), calls=%{called}', other=other)
  assert time.collectives == pytest.approx(1.5, abs=1e-5)


def test_a_pallas_kernel_is_timed_by_formula():
  arguments = (
    'operand_layout_constraints={s8[1,2]{1,0}, bf16[2,10,64]{2,1,0}, bf16[1,10,64]{2,1,0}}'
  )
  call = f'custom-call(%x), custom_call_target="tpu_custom_call", {arguments}'
  # Two heads, [10, 10] by 64 twice for the product and its half: 25,600 multiplications and
  # additions of 1e6 a second, at half of the peak, on a matrix unit that is half filled.
  attention = seconds_of(f'%splash_mha_fwd_residuals.1 = bf16[2,10,64]{{2,1,0}} {call}')
  assert attention.kernels == pytest.approx(2 * 2 * 10 * 10 * 64 / 1e6 * 2 * 2)
  backward = seconds_of(f'%splash_mha_dkv.1 = bf16[2,10,64]{{2,1,0}} {call}')
  assert backward.kernels == pytest.approx(2 * attention.kernels)
  # Another: 2 bytes, 2,560 and 1,280 read and 2,560 written, three quarters of 10,000 a second.
  other = seconds_of(f'%kernel = bf16[2,10,64]{{2,1,0}} {call}')
  assert other.kernels == pytest.approx((2 + 2560 + 1280 + 2560) / 7.5e3)
  not_pallas = seconds_of(
    f'%kernel = bf16[2,10,64]{{2,1,0}} {call.replace("tpu_custom_call", "Z")}'
  )
  assert not_pallas.total == 0
