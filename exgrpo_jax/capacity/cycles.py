"""Estimates of a compiled program's run time, from the compiler's cycle counts and our formulas.

The HLO text from libtpu lists the operations in scheduled order, with the shapes of the arrays on
one chip. It contains cycle estimates for the operations that the compiler generates itself. This
module estimates Pallas kernels and collectives by formula, and multiplies the time of each loop
body by its trip count. An asynchronous collective adds only the time that is not hidden by the rest
of the loop body. The text from other compilers can be parsed too, but contains no cycle counts.
"""

import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from exgrpo_jax.capacity.devices import Chip

# HLO element type -> bytes per element; other types (tokens, opaque) take no memory.
_ELEMENT = {'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 'f8e4m3fn': 1, 'f8e5m2': 1} | {
  f'{kind}{8 * size}': size for kind in ('s', 'u', 'f') for size in (2, 4, 8)
}
_ELEMENT['bf16'] = 2

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$')
_END = re.compile(r'\}(, execution_thread="\w+")?\s*')  # end of a computation; v6e adds its thread
# A Pallas kernel's metadata contains a line break, and the rest of the line is not indented.
_BREAK = re.compile(rf'\n(?!  |%|ENTRY |{_END.pattern}$)', re.MULTILINE)
_OPERATION = re.compile(
  r'(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<kind>[\w\-]+)\((?P<operands>.*?)\)'
)
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**12  # the compiler's placeholder; no program has this many

Array = tuple[str, tuple[int, ...]]  # element type, dimensions


class Operation(NamedTuple):
  """One line of a computation."""

  name: str
  kind: str  # the opcode
  arrays: tuple[Array, ...]  # the result
  operands: tuple[str, ...]  # the operands' names; for a constant, its value
  cycles: int | None  # the compiler's estimate; None if the line has no estimate
  attributes: str  # the rest of the line

  @property
  def bytes(self) -> float:
    """Return the size of the result in bytes."""
    return sum(array_bytes(array) for array in self.arrays)

  def attribute(self, name: str) -> str:
    """Return an attribute such as 'body' or 'channel_id'; '' if the operation lacks it."""
    match = re.search(rf'\b{name}="?%?([\w.\-]+)', self.attributes)
    return match[1] if match else ''

  @property
  def operand_arrays(self) -> tuple[Array, ...]:
    """Return the arguments of a Pallas kernel."""
    match = re.search(r'operand_layout_constraints=\{(.*?\})\}', self.attributes)
    return _arrays(match[1]) if match else ()


class Computation(NamedTuple):
  """A function in the program: the entry, a loop's body or condition, or a fusion's body."""

  operations: Mapping[str, Operation]  # by name, in the order in which they run
  root: str


class Module(NamedTuple):
  """A compiled program: its computations by name."""

  computations: Mapping[str, Computation]
  entry: str


def array_bytes(array: Array) -> float:
  """Return the size of an array in bytes; 0 if its element type takes no memory."""
  element, sizes = array
  return _ELEMENT.get(element, 0) * math.prod(sizes)


def parse(text: str) -> Module:
  """Parse the result of `compiled.as_text()`; raise ValueError if it has no entry computation."""
  computations: dict[str, Computation] = {}
  operations: dict[str, Operation] = {}
  name = entry = root = ''
  for line in map(str.strip, _BREAK.sub('', text).splitlines()):
    start = _COMPUTATION.match(line)
    if start:
      name, operations = start[2], {}
      entry = name if start[1] else entry
    elif name and _END.fullmatch(line):
      computations[name], name = Computation(operations, root), ''
    elif name and (match := _OPERATION.match(line)):
      operation = _operation(match, line)
      operations[operation.name] = operation
      root = operation.name if match['root'] else root
  if not entry:
    raise ValueError('the text has no ENTRY computation, so it is not a compiled program.')
  return Module(computations, entry)


def module_of(lowered: jax.stages.Lowered, executable: jax.stages.Compiled) -> Module:
  """Return a compiled program's module.

  If JAX cannot print the program, compiles it again and reads libtpu's dump. JAX 0.10.2 fails on
  some programs for v6e ("async-update instruction should have 1 operands").
  """
  try:
    return parse(executable.as_text() or '')
  except jax.errors.JaxRuntimeError:
    with tempfile.TemporaryDirectory() as folder:
      lowered.compile(compiler_options={'xla_dump_to': folder})
      (path,) = pathlib.Path(folder).glob('*.after_codegen.txt')
      return parse(path.read_text())


def known_trips(module: Module, loop: Operation) -> int | None:
  """Return a `while` loop's trip count, or None if it depends on data.

  The compiler states the count for some loops. In others, the condition compares a counter starting
  at 0 with a constant, and the body adds a constant to the counter. An increment that cannot be
  determined is assumed to be 1.
  """
  match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if match:
    return int(match[1])
  condition = module.computations[loop.attribute('condition')]
  test = condition.operations[condition.root]
  if test.kind != 'compare' or test.attribute('direction') != 'LT':
    return None
  counter, limit = (condition.operations[name] for name in test.operands)
  if counter.kind != 'get-tuple-element' or limit.kind != 'constant':
    return None
  body = module.computations[loop.attribute('body')]
  result = body.operations[body.root].operands[int(counter.attribute('index'))]
  increment = body.operations.get(result)
  operands = increment.operands if increment and increment.kind == 'add' else ()
  terms = map(body.operations.get, operands)
  steps = [int(term.operands[0]) for term in terms if term and term.kind == 'constant']
  return -(-int(limit.operands[0]) // (steps[0] if len(steps) == 1 else 1))


def group_size(collective: Operation, num_chips: int) -> int:
  """Return the number of chips that take part in a collective."""
  groups = re.search(
    r'replica_groups=(mesh\[(?P<mesh>[^]]*)\] \{(?P<axes>[^}]*)\}|\[\d+,(?P<size>\d+)\]<='
    r'|\{\{(?P<first>[\d,]*)\})',
    collective.attributes,
  )
  if not groups:
    return num_chips
  if groups['size']:
    return int(groups['size'])
  if groups['first']:
    return groups['first'].count(',') + 1
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups['mesh']))
  return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", groups['axes']))


def _operation(match: re.Match[str], line: str) -> Operation:
  cycles = _CYCLES.search(line)
  count = int(cycles[1]) if cycles else _UNKNOWN_CYCLES
  operands = re.sub(r'/\*.*?\*/', '', match['operands']).split(',')
  return Operation(
    name=match['name'],
    kind=match['kind'],
    arrays=_arrays(match['shape']),
    operands=tuple(operand.split()[-1].lstrip('%') for operand in operands if operand.strip()),
    cycles=count if count < _UNKNOWN_CYCLES else None,
    attributes=line[line.index(match['operands'], line.index(' = ')) + len(match['operands']) :],
  )


def _arrays(text: str) -> tuple[Array, ...]:
  return tuple(
    (element, tuple(int(size) for size in sizes.split(',') if size))
    for element, sizes in _ARRAY.findall(text)
  )


# ---- Time ----

# Assumed fraction of peak FLOPs in an attention kernel with heads as wide as the matrix units.
ATTENTION_EFFICIENCY = 0.5
# Assumed fraction of the memory bandwidth in any other Pallas kernel.
READ_EFFICIENCY = 0.75
# A collective is assumed to keep both links of one slice axis busy. Each hop adds latency.
LINKS = 2
HOP_SECONDS = 1e-6

# Number of [T, T] by H matrix products in each splash attention kernel; causality halves the work.
_SPLASH_PRODUCTS = {'splash_mha_fwd': 2, 'splash_mha_dq': 3, 'splash_mha_dkv': 4}
_FLOATS = ('bf16', 'f32')
_FUSIONS = ('fusion', 'async-start')
_PALLAS = 'tpu_custom_call'
_ASYNC = 'async-collective-start'
_COLLECTIVES = ('all-gather', 'all-reduce', 'all-to-all', 'reduce-scatter', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class Seconds:
  """The time that a program or part of a program takes, split by how it was estimated."""

  operations: float = 0.0  # the compiler's estimate
  kernels: float = 0.0  # by formula: Pallas kernels
  collectives: float = 0.0  # by formula: waiting for other chips
  hidden: float = 0.0  # by formula: collectives that overlap other work; not in the total

  @property
  def total(self) -> float:
    """Return the total time, excluding hidden collectives."""
    return self.operations + self.kernels + self.collectives

  def __add__(self, other: 'Seconds') -> 'Seconds':
    return Seconds(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

  def __sub__(self, other: 'Seconds') -> 'Seconds':
    return self + other * -1

  def __mul__(self, times: float) -> 'Seconds':
    return Seconds(*(times * part for part in dataclasses.astuple(self)))


def estimate(module: Module, chip: Chip, num_chips: int, trips: float = 1) -> Seconds:
  """Estimate the time that a program takes to run once.

  `trips` is the assumed trip count of loops whose trip count depends on data.
  """

  def seconds_of(name: str) -> Seconds:
    computation = module.computations[name]
    time, asynchronous = Seconds(), 0.0
    for operation in computation.operations.values():
      time += _own_seconds(operation, chip)
      if operation.kind == 'while':
        loop_trips = known_trips(module, operation)
        loop_trips = trips if loop_trips is None else loop_trips
        time += seconds_of(operation.attribute('body')) * loop_trips
      elif operation.kind == 'call':
        time += seconds_of(operation.attribute('to_apply'))
      elif operation.kind == 'conditional':
        branches = [seconds_of(branch) for branch in _branches(operation)]
        time += max(branches, key=lambda branch: branch.total)
    for collective, is_awaited in _collectives(module, computation):
      seconds = collective_seconds(collective, chip, num_chips)
      if is_awaited:
        time += Seconds(collectives=seconds)
      else:
        asynchronous += seconds
    hidden = min(asynchronous, time.total)
    return time + Seconds(collectives=asynchronous - hidden, hidden=hidden)

  return seconds_of(module.entry)


def collective_seconds(collective: Operation, chip: Chip, num_chips: int) -> float:
  """Estimate a collective's time on a ring of chips: transfer time plus a latency for each hop.

  A permutation is one step to a neighbor. An all-reduce is a reduce-scatter plus an all-gather.
  """
  kind = collective.kind.removesuffix('-start')
  size = collective.bytes
  if kind != collective.kind:  # the results of a -start may include its argument
    size = max(map(array_bytes, collective.arrays))
  chips = group_size(collective, num_chips)
  if kind == 'collective-permute':
    return size / chip.link + HOP_SECONDS
  if kind == 'reduce-scatter':
    size *= chips
  phases = 2 if kind == 'all-reduce' and 'all-reduce-scatter' not in collective.name else 1
  passing = size * (chips - 1) / chips / (LINKS * chip.link)
  return phases * (passing + chips // 2 * HOP_SECONDS)


def _own_seconds(operation: Operation, chip: Chip) -> Seconds:
  """Return an operation's own time, excluding collectives and called computations.

  Estimates attention kernels from their FLOPs, and other Pallas kernels from the bytes they move.
  """
  if operation.cycles is not None:
    return Seconds(operations=operation.cycles / chip.clock)
  if operation.kind != 'custom-call' or operation.attribute('custom_call_target') != _PALLAS:
    return Seconds()
  for name, products in _SPLASH_PRODUCTS.items():
    if operation.name.startswith(name):
      query = next(sizes for element, sizes in operation.operand_arrays if element in _FLOATS)
      flops = products * math.prod(query) * query[-2]  # causality skips half of each product
      efficiency = ATTENTION_EFFICIENCY * min(1, query[-1] / chip.matrix_unit)
      return Seconds(kernels=flops / chip.flops / efficiency)
  num_bytes = operation.bytes + sum(map(array_bytes, operation.operand_arrays))
  return Seconds(kernels=num_bytes / chip.bandwidth / READ_EFFICIENCY)


def _collectives(module: Module, computation: Computation) -> Iterator[tuple[Operation, bool]]:
  """Yield each collective of a computation once, as (collective, True if the chip waits for it).

  The compiler writes an asynchronous collective as a -start and a -done operation, or as a chain of
  fusions that repeat it with the same channel. The first fusion starts the collective, which then
  overlaps the matrix products in the following fusions. Permutations also overlap other work.
  """
  channels = set()
  for operation in computation.operations.values():
    callee = operation.attribute('calls') if operation.kind in _FUSIONS else ''
    fused_operations = module.computations[callee].operations.values() if callee else ()
    for inner in (operation, *fused_operations):
      kind, channel = inner.kind.removesuffix('-start'), inner.attribute('channel_id')
      if kind not in _COLLECTIVES or (channel and channel in channels):
        continue
      channels.add(channel)
      starts = inner.kind != kind or operation.name.startswith(_ASYNC)
      overlaps = starts or kind == 'collective-permute' or operation.cycles is not None
      yield inner._replace(name=f'{operation.name} {callee}'), not overlaps


def _branches(operation: Operation) -> list[str]:
  if match := re.search(r'branch_computations=\{(.*?)\}', operation.attributes):
    return re.findall(r'[\w.\-]+', match[1])
  return [operation.attribute('true_computation'), operation.attribute('false_computation')]
