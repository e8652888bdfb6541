"""Partial groups on disk are what they were, or refused."""

import numpy as np
import pytest
from etils import epath

from exgrpo_jax.datatypes import PartialGroup, Response, Span, Verdict
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.rollout.sampler import UNBEGUN
from tests.helpers import buffers


def response(length, **values):
  rng = np.random.default_rng(length)
  logp, entropy = rng.normal(size=(2, length)).astype(np.float32)
  return Response(
    tokens=np.arange(length, dtype=np.int32), logp=logp, entropy=entropy, truncated=False, **values
  )


WEIGHT = np.float32([0.5, 1.5])
ROUTES = np.arange(48, dtype=np.uint16).reshape(6, 2, 4) * 300
GROUPS = (
  PartialGroup(
    question_row=70_000,
    drawn=3,
    is_drawn=True,
    responses=(
      response(3, spans=(Span(3, 1), Span(5, 2))),
      response(4, is_complete=False, spans=(Span(4, 4),), routes=ROUTES),
      UNBEGUN,
    ),
    verdicts=(Verdict(0.1, 'correct', answer='½', valid_steps=True, components={'match': 0.1}),),
  ),
  PartialGroup(
    question_row=0,
    drawn=4,
    is_drawn=False,
    responses=(
      response(2, tis_weight=WEIGHT, is_complete=False, routes=ROUTES[:2].astype(np.uint8)),
      response(1),
    ),
    verdicts=(Verdict(0.0, 'timed out', reason='1 s'),),
  ),
)


@pytest.mark.parametrize('groups', [GROUPS, ()], ids=['some', 'none'])
def test_groups_are_read_as_they_were_written(groups, tmp_path):
  checkpoint.write_partial(epath.Path(tmp_path), groups)
  found = checkpoint.read_partial(epath.Path(tmp_path))
  assert isinstance(found, tuple) and buffers.described(found) == buffers.described(groups)
  for group in found:
    for one in group.responses:
      assert (one.tokens.dtype, one.logp.dtype, one.entropy.dtype) == (np.int32, *[np.float32] * 2)
      assert all(isinstance(span, Span) for span in one.spans)


@pytest.mark.parametrize('name', ['index.json', 'values.npz'])
def test_one_flipped_bit_is_noticed(name, tmp_path):
  checkpoint.write_partial(epath.Path(tmp_path), GROUPS)
  content = bytearray((tmp_path / name).read_bytes())
  content[len(content) // 2] ^= 1
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match='carried: not the bits that were saved'):
    checkpoint.read_partial(epath.Path(tmp_path))
