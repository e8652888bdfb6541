"""A single host, and where several meet; what several do is tested in tests/processes/."""

import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.hosts import Meeting


def test_a_single_host_has_all_shares_and_waits_for_nobody():
  assert hosts.is_first() and hosts.is_own_share(1)
  assert hosts.all_gather([1]) == [[1]] and hosts.broadcast_from_first('a') == 'a'
  assert hosts.merge_shares([1, 2]) == [1, 2]
  with hosts.first_host_first('x'):
    hosts.barrier('y')
  hosts.check_shared('/nowhere')


def test_one_process_alone_joins_nobody():
  with hosts.joined(Meeting(num_processes=1)):
    assert hosts.is_first()


@pytest.mark.parametrize(
  ('meeting', 'message'),
  [
    (Meeting(process_id=0), 'belong together'),
    (Meeting(coordinator_address='localhost:1'), 'belong together'),
    (Meeting('localhost:1', 2, 2), '--process_id=2 must be below --num_processes=2'),
    (Meeting('localhost', 2, 1), '--coordinator_address=localhost must be host:port'),
  ],
)
def test_a_meeting_that_is_incomplete_or_wrong_is_refused(meeting, message):
  with pytest.raises(InputError, match=re.escape(message)), hosts.joined(meeting):
    pass
