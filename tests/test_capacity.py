"""The command compiles a config for a TPU slice, and says what does not fit."""

import re
import subprocess
import sys

import pytest


def test_a_small_config_compiles_for_a_slice():
  """And one that is far too large is refused. In processes of their own, for libtpu's sake."""
  pytest.importorskip('libtpu')

  def run(*overrides):
    return subprocess.run(
      [
        sys.executable,
        '-m',
        'exgrpo_jax.capacity',
        '--config=qwen2_5_math_1_5b',
        '--topology=v5e:2x2',
        *overrides,
      ],
      capture_output=True,
      text=True,
      check=False,
    )

  small = run(
    '--config.model.num_layers=2',
    '--config.model.width=256',
    '--config.model.mlp_width=512',
    '--config.model.vocab_size=512',
    '--config.rollout.max_response=1024',
    '--config.rollout.slots=8',
    '--lengths=lognormal:40',
    '--evaluated=20',
  )
  assert small.returncode == 0, small.stderr
  assert small.stdout.splitlines()[-1] == 'fits'
  part = r'  {} +[0-9.]+ s  [0-9]+% of peak {}'
  for name, bound in (('decode', 'bandwidth'), ('update', 'FLOPs'), ('optimizer', 'bandwidth')):
    assert re.search(part.format(name, bound), small.stdout)
  assert re.search(r'  sum +[0-9.]+ s  [0-9,]+ response tokens per second', small.stdout)
  assert 'median 40, 99th percentile 8 medians, cut at 1,024' in small.stdout
  large = run(
    '--config.model.num_layers=200',
    '--config.model.width=3072',
    '--config.objective.kl_coefficient=.1',
  )
  assert large.returncode == 1
  assert 'parameters, moments, reference policy, gradient alone take' in large.stdout
  assert large.stdout.splitlines()[-1] == 'does not fit'
