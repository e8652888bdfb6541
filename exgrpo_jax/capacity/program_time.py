"""How long a compiled program takes on its chips: the compiler's cycles, and formulas for the rest.

Estimates, never measurements. The compiler estimates the cycles of the operations that it makes
itself. Pallas kernels and collectives are added here by formula, loops are multiplied by their
trips, and asynchronous collectives cost only what the rest of the same loop's body does not hide.
"""

import dataclasses
import math
from collections.abc import Iterator

from exgrpo_jax.capacity import hlo
from exgrpo_jax.capacity.chips import Chip
from exgrpo_jax.capacity.hlo import Computation, Module, Operation

# Assumptions. An attention kernel's share of the peak, with heads as wide as the matrix units:
_ATTENTION_EFFICIENCY = 0.5
# Any other Pallas kernel's share of the memory's bandwidth:
READ_EFFICIENCY = 0.75
# A collective keeps both links of one axis of the slice busy, and pays for each hop:
LINKS = 2
HOP_SECONDS = 1e-6

# Matrix products of [T, T] by H of each kernel of splash attention; causality halves each.
_SPLASH_PRODUCTS = {'splash_mha_fwd': 2, 'splash_mha_dq': 3, 'splash_mha_dkv': 4}
_FLOATS = ('bf16', 'f32')
_FUSIONS = ('fusion', 'async-start')
_PALLAS = 'tpu_custom_call'
_ASYNC = 'async-collective-start'
_COLLECTIVES = ('all-gather', 'all-reduce', 'all-to-all', 'reduce-scatter', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Time of a program or of a part of it, by the source of the estimate."""

  operations: float = 0.0  # the compiler's estimate
  kernels: float = 0.0  # by formula: Pallas kernels
  collectives: float = 0.0  # by formula: waiting for other chips
  hidden: float = 0.0  # by formula: asynchronous collectives behind the rest; not in the total

  @property
  def total(self) -> float:
    """All but what is hidden."""
    return self.operations + self.kernels + self.collectives

  def __add__(self, other: 'Seconds') -> 'Seconds':
    return Seconds(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

  def __mul__(self, times: float) -> 'Seconds':
    return Seconds(*(times * part for part in dataclasses.astuple(self)))


def estimate(module: Module, chip: Chip, num_chips: int, trips: float = 1) -> Seconds:
  """The time of one run of a program.

  Args:
    module: the program.
    chip: it was compiled for.
    num_chips: of them.
    trips: of loops whose trips depend on data.
  """

  def of(name: str) -> Seconds:
    computation = module.computations[name]
    time, asynchronous = Seconds(), 0.0
    for operation in computation.operations.values():
      time += _own(operation, chip)
      if operation.kind == 'while':
        known = hlo.trips(module, operation)
        time += of(operation.attribute('body')) * (trips if known is None else known)
      elif operation.kind == 'call':
        time += of(operation.attribute('to_apply'))
      elif operation.kind == 'conditional':
        branches = [of(branch) for branch in _branches(operation)]
        time += max(branches, key=lambda branch: branch.total, default=Seconds())
    for collective, is_awaited in _collectives(module, computation):
      seconds = collective_seconds(collective, chip, num_chips)
      if is_awaited:
        time += Seconds(collectives=seconds)
      else:
        asynchronous += seconds
    hidden = min(asynchronous, time.total)
    return time + Seconds(collectives=asynchronous - hidden, hidden=hidden)

  return of(module.entry)


def collective_seconds(collective: Operation, chip: Chip, num_chips: int) -> float:
  """Time of a ring over the chips that it joins: the bytes over a chip's links, and the hops.

  A permutation is one step to a neighbour; an all-reduce is a reduce-scatter and an all-gather.
  """
  kind = collective.kind.removesuffix('-start')
  size = collective.bytes
  if kind != collective.kind:  # a start may have its argument among its results
    size = max(map(hlo.array_bytes, collective.arrays))
  chips = hlo.group_size(collective, num_chips)
  if kind == 'collective-permute':
    return size / chip.link + HOP_SECONDS
  if kind == 'reduce-scatter':
    size *= chips
  phases = 2 if kind == 'all-reduce' and 'all-reduce-scatter' not in collective.name else 1
  passing = size * (chips - 1) / chips / (LINKS * chip.link)
  return phases * (passing + chips // 2 * HOP_SECONDS)


def splash_seconds(heads: int, length: int, head_size: int, products: int, chip: Chip) -> float:
  """Time of causal attention: `products` of [T, H] by [H, T] per head, half of each skipped."""
  flops = products * heads * length * length * head_size
  return flops / chip.flops / attention_efficiency(head_size, chip)


def attention_efficiency(head_size: int, chip: Chip) -> float:
  """The share of the peak that training attention is assumed to reach."""
  return _ATTENTION_EFFICIENCY * min(1, head_size / chip.matrix_unit)


def _own(operation: Operation, chip: Chip) -> Seconds:
  """Time of one operation, without collectives and without what it calls."""
  if operation.cycles is not None:
    return Seconds(operations=operation.cycles / chip.clock)
  if operation.kind != 'custom-call' or operation.attribute('custom_call_target') != _PALLAS:
    return Seconds()
  return Seconds(kernels=_kernel_seconds(operation, chip))


def _kernel_seconds(operation: Operation, chip: Chip) -> float:
  """Time of a Pallas kernel: attention by its products, another by the bytes it moves."""
  for name, products in _SPLASH_PRODUCTS.items():
    if operation.name.startswith(name):
      query = next(sizes for element, sizes in operation.operand_arrays if element in _FLOATS)
      return splash_seconds(math.prod(query[:-2]), query[-2], query[-1], products, chip)
  moved = operation.bytes + sum(map(hlo.array_bytes, operation.operand_arrays))
  return moved / chip.bandwidth / READ_EFFICIENCY


def _collectives(module: Module, computation: Computation) -> Iterator[tuple[Operation, bool]]:
  """Yields (collective, whether the chip waits for it) of a computation, each once.

  The compiler writes an asynchronous collective as a pair of -start and -done, or spreads it over
  a chain of fusions that repeat it under one channel: the first starts it, and it runs beside the
  products of the next ones. It overlaps permutations too.
  """
  channels = set()
  for operation in computation.operations.values():
    called = operation.attribute('calls') if operation.kind in _FUSIONS else ''
    fused = module.computations[called].operations.values() if called else ()
    for inner in (operation, *fused):
      kind, channel = inner.kind.removesuffix('-start'), inner.attribute('channel_id')
      if kind not in _COLLECTIVES or (channel and channel in channels):
        continue
      channels.add(channel)
      starts = inner.kind != kind or operation.name.startswith(_ASYNC)
      overlaps = starts or kind == 'collective-permute' or operation.cycles is not None
      yield inner._replace(name=f'{operation.name} {called}'), not overlaps


def _branches(operation: Operation) -> list[str]:
  listed = operation.attributes.partition('branch_computations={')[2].partition('}')[0]
  names = [name.strip().lstrip('%') for name in listed.split(',') if name.strip()]
  return names or [
    name for name in map(operation.attribute, ('true_computation', 'false_computation')) if name
  ]
