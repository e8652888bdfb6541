"""The command says what a config needs of a TPU slice or a GPU, and what does not fit."""

import re
import subprocess
import sys
import types

import pytest

from exgrpo_jax.commands import capacity
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.errors import InputError


def test_a_small_config_compiles_for_a_slice():
  """And one that is far too large is refused. In processes of their own, for libtpu's sake."""
  pytest.importorskip('libtpu')

  def run(*overrides):
    return subprocess.run(
      [
        sys.executable,
        '-m',
        'exgrpo_jax.commands.capacity',
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


def arguments(**changes):
  """The command's flags, of the smallest model on the smallest GPU."""
  given = dict(
    config=one_gpu.get_config(),
    topology=None,
    device='l4',
    fit=False,
    lengths='lognormal:250',
    evaluated=1319,
  )
  return types.SimpleNamespace(**given | changes)


def test_a_gpu_goes_by_formula(capsys):
  capacity.main(arguments())
  printed = capsys.readouterr().out
  assert printed.startswith('l4: 20.12 GiB, 90% of its memory; 0.49 billion parameters')
  assert re.search(r'  update +[0-9.]+ GiB at its peak: .* fits, [0-9]+% to spare', printed)
  assert re.search(r'  decode +[0-9.]+ s .* decode steps of [0-9.]+ ms', printed)
  assert 'hours for config.num_steps=200' in printed and 'No GPU was measured' in printed
  assert printed.splitlines()[-1] == 'fits'


def test_what_carrying_takes_and_brings_is_said(capsys):
  capacity.main(arguments())
  printed = capsys.readouterr().out
  assert not re.search('^  resume', printed, re.MULTILINE)
  assert re.search(r'with config.rollout.carry=True: [0-9.]+ s; decode [0-9.]+ s instead', printed)
  config = one_gpu.get_config()
  config.rollout.carry = True
  capacity.main(arguments(config=config))
  printed = capsys.readouterr().out
  assert re.search(r'  resume +[0-9.]+ GiB at its peak: .* fits, [0-9]+% to spare', printed)
  assert re.search(r'  resume +[0-9.]+ s .* begun responses of [0-9]+ tokens', printed)
  assert re.search(r'responses up to [0-9] steps old as they are trained', printed)
  assert 'with config.rollout.carry=True' not in printed


def test_every_step_draws_as_many_groups_with_replay():
  config = capacity.parse_config(one_gpu.get_config())
  groups = capacity._groups(config, 'lognormal:250', replayed=5)
  questions, samples = config.rollout.questions, config.rollout.samples
  for start in range(0, 3 * questions, questions):
    sizes = [len(lengths) for lengths in groups[start : start + questions]]
    assert sorted(sizes) == [samples - 1] * 5 + [samples] * (questions - 5)


def test_a_faster_gpu_takes_less_time():
  seconds = {}
  for device in ('h100-pcie', 'h200'):
    config = capacity.parse_config(one_gpu.get_config())
    seconds[device] = capacity.examine_gpu(config, device, 'lognormal:250', 0).speed.seconds
  assert seconds['h100-pcie'] > seconds['h200']


def test_what_does_not_fit_a_gpu_ends_with_status_1_unless_it_can_be_fitted(capsys):
  config = one_gpu.get_config()
  config.rollout.slots = 4096
  with pytest.raises(SystemExit) as exit:
    capacity.main(arguments(config=config))
  printed = capsys.readouterr().out
  assert exit.value.code == 1 and printed.splitlines()[-1] == 'does not fit'
  assert '--fit: fewer than config.rollout.slots=4096 and shorter microbatches than' in printed
  capacity.main(arguments(config=config, fit=True))
  assert capsys.readouterr().out.startswith('--config.rollout.slots=256 ')
  config.model.num_layers = 100
  with pytest.raises(SystemExit) as exit:
    capacity.main(arguments(config=config, fit=True))
  assert exit.value.code == 1


def test_the_owner_of_one_gpu_is_not_told_to_take_more_chips(capsys):
  config = one_gpu.get_config()
  config.model.num_layers = 300
  printed = ''
  for fit in (False, True):
    with pytest.raises(SystemExit):
      capacity.main(arguments(config=config, fit=fit))
    printed += capsys.readouterr().out
  assert 'gradient alone take' in printed and 'chip' not in printed
  assert printed.count('config.lora.rank=32') == printed.count('a GPU of more memory') == 2
  assert printed.count('shorter responses than') == 1  # which do not help the model alone


def test_a_memory_alone_says_what_fits_but_not_how_fast(capsys):
  capacity.main(arguments(device='24 GB'))
  printed = capsys.readouterr().out
  assert printed.startswith('24 GB: 20.12 GiB, ') and printed.endswith('\nfits\n')
  assert 'how long a step takes depends on the GPU' in printed and 'hours for' not in printed


def test_a_gpu_without_bfloat16_needs_float32(capsys):
  config = one_gpu.get_config()
  with pytest.raises(
    InputError, match=r'--device=T4 has no bfloat16, .* --config\.model\.dtype=float32'
  ):
    capacity.main(arguments(config=config, device='T4'))
  config.model.dtype = 'float32'
  capacity.main(arguments(config=config, device='T4', fit=True))
  assert 'the peak is that of' not in capsys.readouterr().out
  capacity.main(arguments(config=config, device='A100-80GB'))
  assert 'the peak is that of bfloat16: float32 takes longer' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(device=None), '--topology or --device'),
    (dict(topology='v5e:8x8'), '--topology=v5e:8x8 and --device=l4 are both given'),
    (dict(topology='v5e:8x8', device=None, fit=True), '--fit needs --device'),
    (dict(device='l5'), r'--device=l5 must be one of: b200, .*; or a memory, such as 24gb'),
  ],
)
def test_flags_that_do_not_go_together_are_refused(changes, message):
  with pytest.raises(InputError, match=message):
    capacity.main(arguments(**changes))
