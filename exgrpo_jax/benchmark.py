"""How fast this machine is, with random weights; compare figures within one run only.

python -m exgrpo_jax.benchmark rollout --slots=32 --questions=32 --samples=1
python -m exgrpo_jax.benchmark update --questions=8 --samples=8
python -m exgrpo_jax.benchmark loss --questions=8 --samples=8
python -m exgrpo_jax.benchmark grading --workers=2
python -m exgrpo_jax.benchmark host --percent=10
"""

import jax
from absl import flags

from exgrpo_jax import cli
from exgrpo_jax.performance import (
  grading_benchmark,
  host_benchmark,
  loss_benchmark,
  rollout_benchmark,
  update_benchmark,
)
from exgrpo_jax.performance.shapes import SHAPES
from exgrpo_jax.performance.workload import LENGTHS, Workload
from exgrpo_jax.policy import model, sharding

BENCHMARKS = ('rollout', 'update', 'loss', 'grading', 'host')
PERCENTS = (1, 10, 100)  # of the paper's scale, in host


def define_flags() -> None:
  """Of this command."""
  flags.DEFINE_enum(
    'shape', 'reference', list(SHAPES), "The model's shape; its weights are random."
  )
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
    'How the lengths of responses are distributed, in rollout; lognormal: the 99th percentile is 8 '
    'times the median.',
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


def main(args: cli.Args, benchmark: str) -> None:
  """Runs one of BENCHMARKS; all but grading and host on a mesh of all devices."""
  if benchmark == 'host':
    host_benchmark.run(tuple(percent for percent in PERCENTS if percent <= args.percent))
    return
  if benchmark == 'grading':
    grading_benchmark.run(args.workers, args.repeats)
    return
  workload = Workload(
    model=SHAPES[args.shape],
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
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))
  with jax.set_mesh(mesh):
    if benchmark == 'rollout':
      rollout_benchmark.run(workload, mesh, args.shape)
    elif benchmark == 'update':
      update_benchmark.run(workload, mesh)
    else:
      loss_benchmark.run(workload, mesh)


if __name__ == '__main__':
  cli.run(main, define_flags, choices=BENCHMARKS)
