"""The parts of `benchmark all`: which they are on a device, of which size, and how long they take.

Each part is a command of its own, so that one which fails, even by ending its process, leaves the
device to the next.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from exgrpo_jax.performance.roofline import layer_parameter_count, parameter_count
from exgrpo_jax.performance.shapes import SHAPES
from exgrpo_jax.policy import attention, kv_cache, model

# Bytes of one parameter during an update: itself, its gradient and two moments in float32.
_BYTES_OF_PARAMETER = 16
_SHARE_FOR_PARAMETERS = 0.6  # of a device's memory; the rest is for activations and logits

_OF_A_DEVICE = ('slots', 'questions')  # sizes that are multiplied by the number of devices

_Flags = dict[str, Any]  # of a command, by name


class Part(NamedTuple):
  """One command of `benchmark`."""

  name: str  # on the page
  benchmark: str  # one of the command's words
  flags: _Flags
  seconds: float  # that it takes, compilation included, on the machine that it is sized for
  can_shrink: bool = True

  @property
  def command(self) -> list[str]:
    """The words of its command line."""
    flags = [f'--{name}={item}' for name, value in self.flags.items() for item in _items(value)]
    return [sys.executable, '-m', 'exgrpo_jax', 'benchmark', self.benchmark, *flags]

  def shrunk(self) -> 'Part':
    """The part with shorter responses, each measurement made once, in half of the time."""
    flags = self.flags | {'response': max(1, self.flags['response'] // 2), 'repeats': 1}
    return self._replace(flags=flags, seconds=self.seconds / 2)


def device_part(shape: str | None) -> Part:
  """The first part, which says what the others run on."""
  flags = {'shape': shape} if shape else {}
  return Part('device', 'device', flags, 30, can_shrink=False)


def parts(facts: Mapping[str, Any], shape: str | None) -> list[Part]:
  """The parts after the first, most telling first.

  Args:
    facts: of the device, those of `device_facts.describe`; empty where it could not be asked.
    shape: one of SHAPES; by default the platform's.
  """
  platform = facts.get('platform', 'cpu')
  shape = shape or ('reference' if platform == 'cpu' else 'qwen2_5_1_5b')
  layers = fitting_layers(SHAPES[shape], facts.get('memory'))
  sizes, dtype = _SIZES[shape], SHAPES[shape].dtype
  common: _Flags = {'shape': shape, 'layers': layers}

  def of_all_devices(flags: _Flags) -> _Flags:
    count = facts.get('count', 1)
    return {name: value * count if name in _OF_A_DEVICE else value for name, value in flags.items()}

  def part(name: str, benchmark: str, **flags: Any) -> Part:
    size = sizes[benchmark]
    return Part(name, benchmark, {**common, **of_all_devices(size.flags), **flags}, size.seconds)

  return [
    part('parity of sampler and trainer', 'parity'),
    *(
      part(f'training attention: {backend}', 'attention', backend=backend)
      for backend in attention.backends_on(platform, dtype)
    ),
    *(
      part(f'decode attention: {backend}', 'decode_attention', backend=backend)
      for backend in kv_cache.backends_on(platform)
    ),
    part('rollout', 'rollout', scheduling=False),
    part('update', 'update'),
    Part('smoke run', 'smoke', sizes['smoke'].flags, sizes['smoke'].seconds, can_shrink=False),
    part('loss', 'loss'),
  ]


def fitting_layers(shape: model.Config, memory: float | None) -> int:
  """As many of the shape's layers as can be trained in `memory` bytes on all devices together."""
  if memory is None:  # the CPU's is not known
    return shape.num_layers
  room = _SHARE_FOR_PARAMETERS * memory / _BYTES_OF_PARAMETER
  embeddings = parameter_count(dataclasses.replace(shape, num_layers=0))
  return int(max(1, min(shape.num_layers, (room - embeddings) // layer_parameter_count(shape))))


class _Size(NamedTuple):
  """Of one benchmark, for one shape."""

  flags: _Flags
  seconds: float


def _size(seconds: float, prompt: int, response: int, repeats: int, **flags: Any) -> _Size:
  return _Size({'prompt': prompt, 'response': response, 'repeats': repeats, **flags}, seconds)


_SIZES = {
  'tiny': {
    'parity': _size(20, 16, 16, 1, slots=4, questions=4, microbatch=128, chunk=16),
    'attention': _size(20, 16, 16, 1, questions=2),
    'decode_attention': _size(20, 16, 16, 1, slots=4),
    'rollout': _size(20, 16, 16, 1, slots=4, questions=4),
    'update': _size(20, 16, 16, 1, questions=2, samples=2, microbatch=64, chunk=16),
    'loss': _size(20, 16, 16, 1, questions=2, samples=2, chunk=16),
    'smoke': _Size(
      {
        'setting': [
          *('num_steps=1', 'warm_start.num_updates=2', 'evaluation.every=1'),
          *('data.train=arithmetic:train[:64]', 'data.evaluation=()'),
          *('rollout.questions=2', 'rollout.slots=8'),
        ]
      },
      60,
    ),
  },
  'reference': {
    'parity': _size(15, 64, 32, 1, slots=8, questions=8),
    'attention': _size(10, 64, 448, 3, questions=4),
    'decode_attention': _size(10, 64, 448, 3, slots=32),
    'rollout': _size(40, 64, 64, 1, slots=32, questions=32),
    'update': _size(65, 64, 128, 1, questions=4, samples=8),
    'loss': _size(35, 64, 128, 1, questions=2, samples=8),
    'smoke': _Size({}, 45),
  },
  'qwen2_5_1_5b': {
    'parity': _size(60, 128, 128, 1, slots=16, questions=16, microbatch=4096),
    'attention': _size(25, 512, 1536, 5, questions=4),
    'decode_attention': _size(25, 512, 1536, 5, slots=128),
    'rollout': _size(90, 512, 512, 2, slots=128, questions=128),
    'update': _size(80, 512, 1536, 2, questions=4, samples=8, microbatch=8192, chunk=2048),
    'loss': _size(40, 512, 1536, 3, questions=2, samples=1, chunk=512),
    'smoke': _Size({}, 90),
  },
}


def _items(value: Any) -> list[Any]:
  return value if isinstance(value, list) else [value]
