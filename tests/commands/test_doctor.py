"""`doctor` prints its findings, and ends with status 1 where training cannot start."""

import pytest

from exgrpo_jax.capacity.diagnosis import Finding
from exgrpo_jax.commands import doctor


def test_a_problem_is_marked_and_ends_with_status_1(capsys, monkeypatch):
  found = [Finding('host', 'is fine')]
  monkeypatch.setattr(doctor.diagnosis, 'findings', lambda: found)
  doctor.main(None)
  printed = capsys.readouterr().out
  assert printed.startswith('  host') and 'exgrpo train --config=' in printed
  found.append(Finding('devices', 'are not', is_problem=True))
  with pytest.raises(SystemExit) as exit:
    doctor.main(None)
  assert exit.value.code == 1 and '\n! devices' in capsys.readouterr().out
