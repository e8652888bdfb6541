"""What a config needs of a TPU slice or a GPU is said, and what does not fit."""

import os
import re
import subprocess
import sys

import pytest

from exgrpo_jax.capacity import examination
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.experiment.settings import parse_config


@pytest.mark.full
def test_a_small_config_compiles_for_a_slice():
  """In a process of its own, for libtpu's sake."""
  pytest.importorskip('libtpu')
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'exgrpo_jax', 'capacity'),
      *('--config=qwen2_5_math_1_5b', '--topology=v5e:2x2'),
      *('--lengths=lognormal:40', '--evaluated=20'),
      '--config.model.num_layers=2',
      '--config.model.width=256',
      '--config.model.mlp_width=512',
      '--config.model.vocab_size=512',
      '--config.rollout.max_response=1024',
      '--config.rollout.slots=8',
    ],
    env=os.environ | {'XLA_FLAGS': ''},  # libtpu ends a process for a flag it does not know
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  part = r'  {} +[0-9.]+ s  [0-9.,e+]+ x [0-9.e-]+ ms{}'
  for name, words in (('decode', ' of 8 x '), ('update', ' of .* tokens'), ('optimizer', '')):
    assert re.search(part.format(name, words), done.stdout)
  assert re.search(r'  sum +[0-9.]+ s  [0-9,]+ response tokens per second', done.stdout)
  assert 'with config.rollout.carry=True' in done.stdout
  assert 'median 40, 99th percentile 8 medians, cut at 1,024' in done.stdout
  assert done.stdout.splitlines()[-1] == 'fits'


def examined(capsys, device='l4', fit=False, **changes):
  """(whether the smallest model with these changes fits a GPU, what is printed)."""
  values = one_gpu.get_config()
  values.update_from_flattened_dict(changes)
  found = examination.examine_gpu(parse_config(values), device, fit)
  return found.fits, capsys.readouterr().out


@pytest.mark.parametrize('carry', [False, True])
def test_a_gpu_goes_by_formula_and_says_no_time(capsys, carry):
  fits, printed = examined(capsys, **{'rollout.carry': carry})
  assert fits and printed.splitlines()[-1] == 'fits'
  assert printed.startswith('l4: 20.12 GiB, 90% of its memory; 0.49 billion parameters')
  peak = r'^  {} [0-9,]+ x [0-9,]+ +[0-9.]+ GiB at its peak: .* fits, [0-9]+% to spare'
  assert re.search(peak.format('update'), printed, re.MULTILINE)
  assert bool(re.search(peak.format('resume'), printed, re.MULTILINE)) == carry
  assert ' s ' not in printed and 'hours' not in printed


def test_episodes_are_resumed_and_their_caches_kept(capsys):
  fits, printed = examined(capsys, **{'environment.name': 'attempts'})
  assert fits and '  resume ' in printed and 'half of it for episodes between' in printed
  many = {'environment.name': 'attempts', 'rollout.slots': 4096}
  assert 'config.environment.keep_caches=False' in examined(capsys, **many)[1]
  fits, printed = examined(capsys, **many, **{'environment.keep_caches': False})
  assert 'half of it' not in printed and 'keep_caches' not in printed


def test_what_does_not_fit_a_gpu_can_be_fitted(capsys):
  fits, printed = examined(capsys, **{'rollout.slots': 4096})
  assert not fits and printed.splitlines()[-1] == 'does not fit'
  assert '--fit: fewer than config.rollout.slots=4096' in printed
  fits, printed = examined(capsys, fit=True, **{'rollout.slots': 4096})
  assert fits and printed.startswith('--config.rollout.slots=256 ')


@pytest.mark.parametrize('fit', [False, True])
def test_advice_for_one_gpu_never_asks_for_more_chips(capsys, fit):
  fits, printed = examined(capsys, fit=fit, **{'model.num_layers': 300})
  assert not fits and 'chip' not in printed
  assert 'config.lora.rank=32' in printed and 'a GPU of more memory' in printed
  # Shorter responses do not help where the model alone is too large.
  assert ('gradient alone take' in printed, 'shorter responses' in printed) == (not fit, fit)
