"""Scores of written responses do not depend on which rows share a forward pass."""

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import scoring
from tests.performance.shapes import SMALL

LIMIT = 80  # buckets of 32, 48, 64 and 80 tokens
LENGTHS = [80, 79, 20, 33, 64, 3, 48, 80, 31, 32, 2, 70, 12]


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=-1, fsdp=1, tensor=1))


@pytest.fixture(scope='module')
def params(mesh):
  return model.init(SMALL, jax.random.key(0), mesh)


@pytest.fixture
def score(params, mesh, monkeypatch):
  """A function of a budget: the scores of rows of LENGTHS, and the shapes of the passes."""
  rng = np.random.default_rng(0)
  rows = [
    (tokens[: len(tokens) // 3 + 1], tokens[len(tokens) // 3 + 1 :])
    for tokens in (rng.integers(0, SMALL.vocab_size, length) for length in LENGTHS)
  ]
  score_tokens = scoring.score_tokens

  def call(tokens_per_pass):
    shapes = []

    def watched(config, params, tokens_BT, *rest):
      shapes.append(tokens_BT.shape)
      return score_tokens(config, params, tokens_BT, *rest)

    monkeypatch.setattr(scoring, 'score_tokens', watched)
    with jax.set_mesh(mesh):
      scores = scoring.score(
        SMALL,
        params,
        mesh,
        rows,
        limit=LIMIT,
        tokens_per_pass=tokens_per_pass,
        pad_id=0,
        temperature=1.0,
        logit_chunk=64,
      )
    return rows, scores, shapes

  return call


def test_passes_of_any_size_give_the_same_scores_to_every_row(score):
  """From a budget smaller than any row, which then has a pass of its own, to one for all rows."""
  rows, expected, shapes = score(10**4)
  assert len(shapes) == 4  # one of each length
  for budget, largest in ((1, 80), (100, 96), (170, 160)):
    _, scores, shapes = score(budget)
    assert max(num_rows * length for num_rows, length in shapes) == largest
    for found, one_pass in zip(scores, expected):
      assert [len(values) for values in found] == [len(response) for _, response in rows]
      np.testing.assert_allclose(np.concatenate(found), np.concatenate(one_pass), atol=1e-5)


def test_few_numbers_of_rows_are_compiled():
  """At most four for one length, and never fewer rows than there are."""
  for room in (1, 2, 3, 9, 18, 288):
    counts = [scoring._num_rows(room, needed) for needed in range(1, room + 1)]
    assert all(count >= needed for needed, count in enumerate(counts, 1))
    assert len(set(counts)) <= 4 and max(counts) == room
