"""Runs what must hold on eight devices in one process.

Starting JAX takes longer than most of the checks, so test_eight_devices.py starts this once and
has a test for each check. To run some of them alone, or in a debugger:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.processes.eight_devices NAME...
"""

import sys

import jax

from tests.helpers import checks
from tests.processes import policy_checks, training_checks

CHECKS = {check.__name__: check for check in policy_checks.CHECKS + training_checks.CHECKS}


def main(names):
  assert jax.device_count() == 8, f'{jax.devices()} are not eight devices'
  if not names:
    checks.run(CHECKS.values())
  for name in names:
    CHECKS[name]()


if __name__ == '__main__':
  main(sys.argv[1:])
