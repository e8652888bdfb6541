"""What the process says that it is doing."""

import threading

import pytest

from exgrpo_jax.runtime import activity
from exgrpo_jax.runtime.clock import Clock


def test_what_is_being_done_is_named_from_the_outside_in():
  finished = []
  assert activity.now() == ''
  with activity.doing(lambda: f'step {len(finished) + 1}/9'):
    assert activity.now() == 'step 1/9 (0:00:00)'
    finished.append('first')
    with Clock()('old_logprobs'), activity.doing('12 of 256 responses'):
      assert activity.now() == 'step 2/9: old logprobs, 12 of 256 responses (0:00:00)'
    assert activity.now() == 'step 2/9 (0:00:00)'
  with activity.doing(''):  # nothing to say yet
    assert activity.now() == ''
    with activity.doing('a'), activity.doing(''):
      assert activity.now() == 'a (0:00:00)'
  assert activity.now() == ''


def test_what_failed_is_no_longer_being_done():
  with pytest.raises(KeyError), activity.doing('a'), activity.doing('b'):
    raise KeyError
  assert activity.now() == ''


def test_the_program_that_is_compiled_is_named_until_its_block_ends():
  with activity.doing('step 1 of 60'):
    with activity.doing('learn'):
      activity.compiling('accumulate')
      assert activity.now() == 'step 1 of 60: learn, compiling accumulate (0:00:00)'
      thread = threading.Thread(target=activity.compiling, args=['another'])
      thread.start()
      thread.join()
      assert 'compiling accumulate' in activity.now()
      activity.compiling('')
      assert activity.now() == 'step 1 of 60: learn (0:00:00)'
      activity.compiling('fails')
    assert activity.now() == 'step 1 of 60 (0:00:00)'
  activity.compiling('when idle')
  assert activity.now() == ''
