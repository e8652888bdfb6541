"""What fits on which TPU slice, without a TPU: compiles the programs of a step for it.

python -m exgrpo_jax.capacity --config=qwen2_5_math_7b --topology=v5e:8x8

Needs libtpu (pip install -e '.[tpu]'). Exit status: 0 when everything fits, 1 when it does not,
2 for what cannot be run.
"""

import sys

import jax
from absl import flags

from exgrpo_jax import cli
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import model_config, parse_config, update_spec
from exgrpo_jax.performance import capacity_report, chips, roofline
from exgrpo_jax.policy import model, sharding


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  flags.DEFINE_string('topology', None, 'The TPU generation and slice, e.g. v5e:4x4.')


def main(args: cli.Args) -> None:
  """Prints what a config needs of each chip of a slice; exits with status 1 if it does not fit."""
  if not args.config or not args.topology:
    raise InputError(
      '--config and --topology are both needed, e.g. --config=qwen2_5_math_7b --topology=v5e:8x8.'
    )
  config = parse_config(args.config)
  shape, chip = model_config(config), chips.chip_of(args.topology)
  meshes = sharding.make_meshes(config.mesh, chips.slice_devices(args.topology))
  model.check_meshes(shape, meshes)
  print(
    f'{args.topology}: {meshes.training.size} chips of {chip.memory / chips.GIB:.2f} GiB, '
    f'training on {dict(meshes.training.shape)}, decoding on {dict(meshes.decoding.shape)}; '
    f'{roofline.parameter_count(shape) / 1e9:.2f} billion parameters',
    flush=True,
  )
  spec = update_spec(config, shape, meshes.training)
  with jax.set_mesh(meshes.training):
    fits = capacity_report.print_report(config.rollout, spec, meshes.decoding, chip)
  if not fits:
    sys.exit(1)


if __name__ == '__main__':
  cli.run(main, define_flags)
