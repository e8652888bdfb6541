"""Scores of written responses do not depend on which rows share a forward pass."""

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import scoring
from tests.helpers.shapes import SMALL

LIMIT = 80
LENGTHS = [80, 79, 20, 33, 64, 3, 33, 80, 33, 64, 2, 79, 20]


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


@pytest.mark.usefixtures('large_passes')
def test_passes_of_any_size_give_the_same_scores_to_every_row(score, params, mesh):
  """Those of the row alone; a pass keeps to its tokens, or to one sequence of the longest row."""
  rows, expected = score(1)[0], []
  for prompt, response in rows:
    tokens_T = np.concatenate([prompt, response])
    with jax.set_mesh(mesh):
      scores = scoring.score_tokens(SMALL, params, tokens_T[None], None, 1.0, 64)
    expected.append([x_BT[0, len(prompt) :] for x_BT in jax.device_get(scores)])
  for budget, count in ((1, 1), (100, 1), (170, 2), (10**3, 12)):
    _, scores, shapes = score(budget)
    assert set(shapes) <= {(count, 80), (count, 20)}
    for found, alone in zip(zip(*scores), expected, strict=True):
      np.testing.assert_allclose(found, alone, atol=1e-5)


def test_equal_rows_of_a_sequence_have_equal_scores(params, mesh):
  """And no rows are none."""
  one = np.zeros(3, np.int32)
  arguments = dict(limit=LIMIT, tokens_per_pass=80, pad_id=0, temperature=1.0, logit_chunk=64)
  with jax.set_mesh(mesh):
    assert scoring.score(SMALL, params, mesh, [], **arguments) == ([], [])
    logps, _ = scoring.score(SMALL, params, mesh, [(one, one)] * 3, **arguments)
  np.testing.assert_array_equal(logps[0], logps[2])
