"""How fast this machine is, with random weights; compare figures within one run only.

python -m benchmarks all --out=report.md
python -m benchmarks rollout --slots=32 --questions=32 --samples=1
python -m benchmarks rollout --carry --slots=16 --questions=2 --samples=8
python -m benchmarks update --questions=8 --samples=8
python -m benchmarks loss --questions=8 --samples=8
python -m benchmarks grading --workers=2
python -m benchmarks host --percent=10
python -m benchmarks report --steps=70

Exit status: 1 where a check failed or, of `all`, a part.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import jax
from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import (
  all_benchmark,
  attention_benchmark,
  carry_benchmark,
  device_benchmark,
  device_facts,
  grading_benchmark,
  host_benchmark,
  loss_benchmark,
  measurement,
  parity_benchmark,
  peaks,
  report_benchmark,
  rollout_benchmark,
  smoke_benchmark,
  update_benchmark,
)
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.shapes import SHAPES
from exgrpo_jax.performance.synthetic.history import Size
from exgrpo_jax.performance.workload import LENGTHS, Workload
from exgrpo_jax.policy import attention, kv_cache, model, sharding
from exgrpo_jax.policy.sharding import Meshes

# On all devices, with random weights.
_ON_MESHES: dict[str, Callable[[command_line.Args, Workload, Meshes], list[Measurement]]] = {
  'parity': lambda _, workload, meshes: parity_benchmark.measure(workload, meshes),
  'rollout': lambda args, workload, meshes: (
    carry_benchmark.measure(workload, meshes)
    if args.carry
    else rollout_benchmark.measure(workload, meshes, _peaks(workload), args.scheduling)
  ),
  'update': lambda _, workload, meshes: update_benchmark.measure(
    workload, meshes.training, _peaks(workload)
  ),
  'loss': lambda _, workload, meshes: loss_benchmark.measure(workload, meshes.training),
  'attention': lambda args, workload, meshes: attention_benchmark.measure_causal(
    workload, meshes.training, args.backend, _peaks(workload)
  ),
  'decode_attention': lambda args, workload, meshes: attention_benchmark.measure_decoding(
    workload, meshes.decoding, args.backend, _peaks(workload)
  ),
}
BENCHMARKS = ('all', *_ON_MESHES, 'device', 'grading', 'host', 'report', 'smoke')
PERCENTS = (1, 10, 100)  # of the paper's scale, in host


def define_flags() -> None:
  """Of this command."""
  command_line.define_out('Of all: the page to write, in Markdown.')
  flags.DEFINE_float('minutes', 8.0, 'Of all: its parts are shrunk or skipped to keep within them.')
  command_line.define_path('json', 'A file to which all but all and host write their figures.')
  command_line.define_path('facts', 'A file to which device writes what it runs on, as JSON.')
  flags.DEFINE_enum(
    'shape',
    None,
    list(SHAPES),
    "The model's shape; its weights are random. By default reference, and in all on an accelerator "
    'qwen2_5_1_5b.',
  )
  flags.DEFINE_integer('layers', 0, "Layers of the model; 0 takes the shape's.", lower_bound=0)
  flags.DEFINE_enum(
    'backend',
    None,
    dict.fromkeys(attention.BACKENDS + kv_cache.DECODE_BACKENDS),  # some names are in both
    "Of attention and decode_attention: the implementation's name; by default the platform's.",
  )
  flags.DEFINE_bool(
    'scheduling',
    True,
    'Of rollout: also what refilled slots, shared prefill and the growing cache bring.',
  )
  flags.DEFINE_bool(
    'carry',
    False,
    'Of rollout: in place of its other figures, what responses that span steps bring to whole '
    'steps; lengths are lognormal, cut at 8 medians.',
  )
  flags.DEFINE_multi_string(
    'setting', [], "Of smoke: a setting of the run's config, such as num_steps=1."
  )
  _define_sizes()


def _define_sizes() -> None:
  flags.DEFINE_integer('slots', 32, 'Rows that decode together.', lower_bound=1)
  flags.DEFINE_integer('questions', 32, 'Prompts.', lower_bound=1)
  flags.DEFINE_integer('samples', 1, 'Responses to each prompt.', lower_bound=1)
  flags.DEFINE_integer('prompt', 64, 'Tokens of a prompt.', lower_bound=1)
  flags.DEFINE_integer(
    'response', 128, 'Tokens of a response; their median if lengths are lognormal.', lower_bound=1
  )
  flags.DEFINE_enum(
    'lengths',
    'equal',
    LENGTHS,
    'How the lengths of responses are distributed, in rollout, update and loss: all equal, or '
    'lognormal with a 99th percentile of 8 times the median.',
  )
  flags.DEFINE_integer(
    'repeats', 3, 'How often each measurement is made; medians are printed.', lower_bound=1
  )
  flags.DEFINE_integer('microbatch', 3072, 'Tokens of a forward and backward pass.', lower_bound=1)
  flags.DEFINE_enum(
    'remat', 'all_but_products', list(model.REMAT), 'What of a layer the backward pass recomputes.'
  )
  flags.DEFINE_integer('workers', 0, 'Grading processes; 0 is one per core.', lower_bound=0)
  flags.DEFINE_integer('chunk', 512, 'Tokens whose logits exist at once.', lower_bound=1)
  flags.DEFINE_integer(
    'percent',
    100,
    "Up to which share of the paper's scale host measures: 1, 10 and 100 per cent.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'steps',
    700,
    "Of report: steps of the run; the paper's by default, each of 128 questions.",
    lower_bound=1,
  )


def main(args: command_line.Args, benchmark: str) -> None:
  """Runs one of BENCHMARKS."""
  for flag in ('json', 'facts'):
    if path := args[flag].value:
      all_benchmark.check_out(path, flag)
  if benchmark == 'all':
    if not all_benchmark.run(all_benchmark.check_out(args.out), args.shape, args.minutes):
      sys.exit(1)
  elif benchmark == 'host':
    host_benchmark.run(tuple(percent for percent in PERCENTS if percent <= args.percent))
  else:
    try:
      measurements = _measure(args, benchmark)
    except subprocess.CalledProcessError as error:
      sys.exit(error.returncode)  # of smoke's run or report's, which has said why
    measurement.print_lines(measurements)
    if args.json:
      measurement.write(args.json, measurements)
    if failures := measurement.failures(measurements):
      sys.exit(f'error: {"; ".join(failures)}')


def _measure(args: command_line.Args, benchmark: str) -> list[Measurement]:
  """Runs one of BENCHMARKS other than all and host."""
  if benchmark == 'grading':
    return grading_benchmark.measure(args.workers, args.repeats)
  if benchmark == 'smoke':
    return smoke_benchmark.measure(args.setting)
  if benchmark == 'report':
    return report_benchmark.measure(Size(steps=args.steps))
  shape = SHAPES[args.shape or 'reference']
  if args.layers:
    shape = dataclasses.replace(shape, num_layers=args.layers)
  device = jax.devices()[0]
  if benchmark == 'device':
    facts = device_facts.describe()
    measurement.print_facts(facts)
    if args.facts:
      measurement.write_facts(args.facts, facts)
    return device_benchmark.measure(device.device_kind, shape.dtype)
  check_backend(args.backend, benchmark, device.platform, shape.dtype)
  workload = Workload(
    model=shape,
    slots=args.slots,
    questions=args.questions,
    samples=args.samples,
    prompt=args.prompt,
    response=args.response,
    lengths=args.lengths,
    microbatch=args.microbatch,
    remat=args.remat,
    chunk=args.chunk,
    repeats=args.repeats,
  )
  meshes = sharding.make_meshes(
    sharding.Config(
      training=sharding.TrainingConfig(data=1, fsdp=-1, tensor=1),
      decoding=sharding.DecodingConfig(data=-1, tensor=1),
    )
  )
  decodes = benchmark in ('rollout', 'decode_attention')
  with jax.set_mesh(meshes.decoding if decodes else meshes.training):
    return _ON_MESHES[benchmark](args, workload, meshes)


def check_backend(backend: str | None, benchmark: str, platform: str, dtype: str) -> None:
  """InputError where the benchmark has no such implementation here."""
  known = {
    'attention': attention.backends_on(platform, dtype),
    'decode_attention': kv_cache.backends_on(platform),
  }.get(benchmark)
  if backend and known and backend not in known:
    raise InputError(
      f'--backend={backend} must be one of {", ".join(known)}, with which {benchmark} runs on '
      f'{platform} in {dtype}.'
    )


def _peaks(workload: Workload) -> peaks.Peaks:
  return peaks.of_devices(workload.model.dtype)


if __name__ == '__main__':
  command_line.run(main, define_flags, choices=BENCHMARKS)
