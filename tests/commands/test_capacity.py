"""The flags of `capacity`."""

import types

import pytest

from exgrpo_jax.commands import capacity
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.errors import InputError


def arguments(**changes):
  """The command's flags, of the smallest model on the smallest GPU."""
  given = dict(config=one_gpu.get_config(), topology=None, device='l4', fit=False)
  return types.SimpleNamespace(**given | changes)


def test_what_does_not_fit_ends_with_status_1(capsys):
  capacity.main(arguments())
  assert capsys.readouterr().out.endswith('\nfits\n')
  with pytest.raises(SystemExit) as exit:
    capacity.main(arguments(device='4gb'))
  assert exit.value.code == 1


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(config=None), '^--config is needed'),
    (dict(device=None), '^--topology or --device is needed'),
    (dict(topology='v5e:8x8'), '--topology=v5e:8x8 and --device=l4'),
    (dict(topology='v5e:8x8', device=None, fit=True), '--fit needs --device'),
    (dict(device='l5'), '--device=l5'),
  ],
)
def test_flags_that_do_not_go_together_are_refused(changes, message):
  with pytest.raises(InputError, match=message):
    capacity.main(arguments(**changes))
