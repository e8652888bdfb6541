"""Benchmarks of this machine, with random weights and data. Compare only figures from one run.

python -m benchmarks                        lists the benchmarks
python -m benchmarks all --size=tiny        checks that all of them run
python -m benchmarks update rollout.questions=8

Append settings of the config to change them, as in the last line. Exit status: 1 if a check failed
or, with `all`, a benchmark failed.
"""

import argparse
import importlib
import subprocess
import sys

# Name -> description. Each benchmark is a module with measure(bench) -> figures.
BENCHMARKS = {
  'parity': "the sampler's log-probabilities compared with the trainer's",
  'attention': 'every attention backend of this platform compared with the formula',
  'loss': 'the fused loss compared with the naive loss: time, memory, gradients',
  'update': 'one update: tokens per second, share of the FLOP/s of a plain matrix product',
  'rollout': 'generating responses: tokens per second, share of the bandwidth of a plain copy',
  'carry': 'whole steps with and without partial rollouts',
  'episodes': 'episodes of several turns with slow and with instant environments: busy slots',
  'grading': 'responses graded per second',
  'buffer': "the replay buffer at a fraction of the paper's scale: time and memory",
  'start': 'two starts with a large file of questions: the first prepares it, the second reuses it',
  'report': "a run's HTML page, for a fraction of the paper's steps: size, time and memory",
  'smoke': 'a complete run of train --config=smoke',
}
SIZES = ('tiny', 'small', 'large')


def main() -> None:
  """Run a benchmark, or all of them."""
  parser = argparse.ArgumentParser('python -m benchmarks', description='Measure this machine.')
  parser.add_argument('name', nargs='?', choices=['all', *BENCHMARKS])
  parser.add_argument('changes', nargs='*', metavar='KEY=VALUE', help='settings of the config')
  parser.add_argument('--size', choices=SIZES, help='default: small on a CPU, otherwise large')
  parser.add_argument(
    '--scale',
    type=float,
    help="fraction of the paper's questions, responses and steps (grading, buffer, start, report)",
  )
  args = parser.parse_intermixed_args()
  if not args.name:
    print('python -m benchmarks NAME [KEY=VALUE …] [--size=tiny|small|large] [--scale=S]\n')
    for name, does in [('all', 'all of them'), *BENCHMARKS.items()]:
      print(f'  {name:<10} {does}')
  elif args.name == 'all':
    sys.exit(_run_all([word for word in sys.argv[1:] if word != 'all']))
  else:
    sys.exit(_run(args.name, args.size, args.scale, args.changes))


def _run(name: str, size_name: str | None, scale: float | None, changes: list[str]) -> int:
  from exgrpo_jax.runtime import machine  # not needed to list the benchmarks

  machine.keep_pages()  # as every command does
  machine.take_share()
  import jax

  from benchmarks import frame

  size_name = size_name or ('small' if jax.default_backend() == 'cpu' else 'large')
  size = frame.SIZES[size_name]
  devices = f'{jax.device_count()} x {jax.devices()[0].device_kind}'
  print(f'{name}: {BENCHMARKS[name]}; {size_name}, on {devices}', flush=True)
  bench = frame.open_bench(size._replace(scale=scale or size.scale), changes)
  with jax.set_mesh(bench.meshes.training):
    try:
      found = importlib.import_module(f'benchmarks.{name}').measure(bench)
    except subprocess.CalledProcessError as error:
      return error.returncode  # the run has printed why
  print('\n'.join(map(str, found)), flush=True)
  return int(not all(figure.passes for figure in found))


def _run_all(flags: list[str]) -> int:
  """Run each benchmark in its own process, so that a failure does not end the others."""
  failed = []
  for name in BENCHMARKS:
    if subprocess.run([sys.executable, '-m', 'benchmarks', name, *flags]).returncode:
      failed.append(name)
    print(flush=True)
  print(f'failed: {", ".join(failed)}' if failed else 'all passed')
  return int(bool(failed))


if __name__ == '__main__':
  main()
