"""Compiled programs are read from their text."""

import jax
import jax.numpy as jnp
import pytest

from exgrpo_jax.capacity import hlo

# As libtpu writes it, cut to what is read; the kernel's metadata breaks its line.
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


def test_operations_have_sizes_cycles_and_operands():
  module = hlo.parse(TEXT)
  assert list(module.computations) == ['condition', 'body', 'main.1_spmd']
  assert module.entry == 'main.1_spmd'
  y = module.computations['body'].operations['y']
  assert (y.kind, y.cycles, y.operands, y.bytes) == ('fusion', 1500, ('x', 'x'), 8 * 128 * 4)
  assert y.attribute('calls') == 'fused' and y.attribute('body') == ''
  attend = module.computations['main.1_spmd'].operations['attend']
  assert attend.cycles is None  # the compiler's mark for what it does not know
  assert attend.attribute('custom_call_target') == 'tpu_custom_call'
  assert attend.bytes == 7 * 64 * 128 * 2 + 7 * 64 * 4
  assert attend.operand_arrays == (('s8', (1, 2)), ('bf16', (7, 64, 128)))
  assert hlo.array_bytes(('s4', (6,))) == 3


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
def test_the_trips_of_a_loop_are_those_of_its_counter(old, new, trips):
  module = hlo.parse(TEXT.replace(old, new))
  assert hlo.trips(module, module.computations[module.entry].operations['loop']) == trips


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
  line = f'  ROOT %sum = f32[8]{{0}} all-reduce(%x), {groups}, to_apply=%add\n'
  module = hlo.parse(f'ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}}}\n')
  assert hlo.group_size(module.computations['main'].operations['sum'], 64) == size


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.parse('jit_step')


def test_a_program_compiled_here_is_read():
  def step(x):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ x), x)

  compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((16, 16), 'float32')).compile()
  module = hlo.parse(compiled.as_text())
  (loop,) = [
    operation
    for computation in module.computations.values()
    for operation in computation.operations.values()
    if operation.kind == 'while'
  ]
  assert hlo.trips(module, loop) == 5
  operations = [
    operation for found in module.computations.values() for operation in found.operations.values()
  ]
  assert any(operation.kind == 'dot' for operation in operations)


def test_computations_of_another_thread_end_too():
  """Of the SparseCore, as on v6e; else what follows would be a part of them."""
  text = (
    '%gather (x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8]{0} parameter(0)\n'
    '}, execution_thread="sparsecore"\n\n'
    'ENTRY %main (y: f32[8]) -> f32[8] {\n  ROOT %y = f32[8]{0} parameter(0)\n}\n'
  )
  module = hlo.parse(text)
  assert {name: [*found.operations] for name, found in module.computations.items()} == {
    'gather': ['x'],
    'main': ['y'],
  }
