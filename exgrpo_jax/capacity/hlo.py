"""Reads a compiled program's HLO text: its operations, its loops and how often they run.

libtpu's text is scheduled, has one chip's shapes, and estimates the cycles of most operations.
Other compilers' text is read too, without estimates.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Bytes of one element, by HLO's name of its type; other types (tokens, opaque) take no memory.
_ELEMENT = {'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 'f8e4m3fn': 1, 'f8e5m2': 1} | {
  f'{kind}{8 * size}': size for kind in ('s', 'u', 'f') for size in (2, 4, 8)
}
_ELEMENT['bf16'] = 2

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$')
_END = re.compile(r'\}(, execution_thread="\w+")?\s*')  # of a computation; v6e has other threads
_OPERATION = re.compile(
  r'(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<kind>[\w\-]+)\((?P<operands>.*?)\)'
)
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\]')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**12  # more than any program has: the compiler's mark for what it cannot say

Array = tuple[str, tuple[int, ...]]  # element type and sizes


class Operation(NamedTuple):
  """One line of a computation."""

  name: str
  kind: str  # the opcode
  arrays: tuple[Array, ...]  # of its result
  operands: tuple[str, ...]  # names; of a constant its value
  cycles: int | None  # the compiler's estimate; None where it has none
  attributes: str  # the rest of the line

  @property
  def bytes(self) -> float:
    """The size of its result."""
    return sum(array_bytes(array) for array in self.arrays)

  def attribute(self, name: str) -> str:
    """An attribute such as 'body' or 'channel_id'; '' where it has none."""
    found = re.search(rf'\b{name}="?%?([\w.\-]+)', self.attributes)
    return found[1] if found else ''

  @property
  def operand_arrays(self) -> tuple[Array, ...]:
    """The arguments of a Pallas kernel."""
    found = re.search(r'operand_layout_constraints=\{(.*?\})\}', self.attributes)
    return _arrays(found[1]) if found else ()


class Computation(NamedTuple):
  """A function of the program: the entry, a loop's body or condition, or what a fusion fuses."""

  operations: Mapping[str, Operation]  # by name, in the order in which they run
  root: str


class Module(NamedTuple):
  """A program."""

  computations: Mapping[str, Computation]
  entry: str


def array_bytes(array: Array) -> float:
  """The size of an array; 0 for what is not data."""
  element, sizes = array
  return _ELEMENT.get(element, 0) * math.prod(sizes)


def parse(text: str) -> Module:
  """The program of `compiled.as_text()`; ValueError where the text has no entry."""
  computations: dict[str, Computation] = {}
  operations: dict[str, Operation] = {}
  name = entry = root = ''
  for line in _joined_lines(text):
    start = _COMPUTATION.match(line)
    if start:
      name, operations = start[2], {}
      entry = name if start[1] else entry
    elif name and _END.fullmatch(line):
      computations[name], name = Computation(operations, root), ''
    elif name and (found := _OPERATION.match(line)):
      operation = _operation(found, line)
      operations[operation.name] = operation
      root = operation.name if found['root'] else root
  if not entry:
    raise ValueError('the text has no ENTRY computation: it is not a compiled program.')
  return Module(computations, entry)


def trips(module: Module, loop: Operation) -> int | None:
  """How often a `while` runs its body; None where that depends on data.

  The compiler says it of some loops. In others the condition compares a counter from 0 with a
  constant, and the body adds a constant to it: 1, where that is not plain to see.
  """
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return int(known[1])
  condition = module.computations[loop.attribute('condition')]
  test = condition.operations[condition.root]
  if test.kind != 'compare' or test.attribute('direction') != 'LT':
    return None
  counter, limit = (condition.operations[name] for name in test.operands)
  if counter.kind != 'get-tuple-element' or limit.kind != 'constant':
    return None
  body = module.computations[loop.attribute('body')]
  results = body.operations[body.root].operands
  step = _step(body, results[int(counter.attribute('index'))])
  return -(-int(limit.operands[0]) // step)


def group_size(collective: Operation, num_chips: int) -> int:
  """How many chips a collective joins."""
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


def _joined_lines(text: str) -> Iterator[str]:
  """Lines without indentation; a Pallas kernel's metadata may hold line breaks."""
  line = ''
  for part in text.splitlines():
    if part.startswith(('  ', '%', 'ENTRY ')) or _END.fullmatch(part):
      yield line
      line = ''
    line += part.strip()
  yield line


def _operation(found: re.Match[str], line: str) -> Operation:
  cycles = _CYCLES.search(line)
  count = int(cycles[1]) if cycles else _UNKNOWN_CYCLES
  operands = re.sub(r'/\*.*?\*/', '', found['operands']).split(',')
  return Operation(
    name=found['name'],
    kind=found['kind'],
    arrays=_arrays(found['shape']),
    operands=tuple(operand.split()[-1].lstrip('%') for operand in operands if operand.strip()),
    cycles=count if count < _UNKNOWN_CYCLES else None,
    attributes=line[line.index(found['operands'], line.index(' = ')) + len(found['operands']) :],
  )


def _arrays(text: str) -> tuple[Array, ...]:
  return tuple(
    (element, tuple(int(size) for size in sizes.split(',') if size))
    for element, sizes in _ARRAY.findall(text)
  )


def _step(body: Computation, name: str) -> int:
  """What the body adds to its counter; 1 unless one addition of a constant makes the new one."""
  added = body.operations.get(name)
  if added is None or added.kind != 'add':
    return 1
  values = [body.operations[operand] for operand in added.operands if operand in body.operations]
  steps = [int(value.operands[0]) for value in values if value.kind == 'constant']
  return steps[0] if len(steps) == 1 else 1
