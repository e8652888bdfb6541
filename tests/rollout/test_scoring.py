"""Which stored trajectory a question replays, given scripted scores; and scoring in passes."""

import contextlib

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm.trajectory_rules import RULES, released_costs
from exgrpo_jax.datatypes import ReplayScores, Trajectory
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import scoring
from tests.helpers.tiny import SMALL

# Step of a trajectory -> its (entropy, log-probability) under the current policy.
SCORES = {1: (2.0, -1.0), 2: (0.5, -3.0), 3: (0.1, -2.0), 4: (0.9, -0.5)}
# Step -> the log-ratios of its two tokens. Of step 4, one token gained and one lost the most.
LOG_RATIO = {1: (0.0, 0.0), 2: (-0.2, 0.1), 3: (-0.3, 0.0), 4: (-4.0, 9.0)}


def trajectory(step):
  return Trajectory(np.int32([step]), np.float32([-1]), reward=1.0, step=step)


STORED = ([trajectory(1)], [], [trajectory(2), trajectory(3), trajectory(4)])


def pick(kind, stored=STORED, seed=0):
  """Return (the picked step of each group, their scores, the number of scored trajectories)."""
  asked = []

  def score(candidates):
    asked.extend(candidates)
    values = [SCORES[one.step] for _, one in candidates]
    changes = [np.float32(LOG_RATIO[one.step]) for _, one in candidates]
    return [
      ReplayScores(one, np.float32([p]), np.float32([h]), np.ones(1), change)
      for (_, one), (h, p), change in zip(candidates, values, changes)
    ]

  picked, scores = scoring.pick(kind, stored, score, np.random.default_rng(seed))
  return [one and one.step for one in picked], scores, len(asked)


@pytest.mark.parametrize(
  ('kind', 'step', 'scored'),
  [
    ('lowest_entropy', 3, 4),
    ('highest_entropy', 4, 4),
    ('lowest_perplexity', 4, 4),
    ('highest_perplexity', 2, 4),
    ('smallest_drop', 2, 4),
    ('newest', 4, 2),
  ],
)
def test_each_rule_picks_its_trajectory_and_scores_only_what_it_needs(kind, step, scored):
  picked, scores, asked = pick(kind)
  assert picked == [1, None, step] and asked == scored and scores[1] is None
  for index, one in ((0, 1), (2, step)):
    assert (scores[index].entropy[0], scores[index].logp[0]) == pytest.approx(SCORES[one])
  rivals = pytest.approx([0.5, 0.1, 0.9]) if scored == 4 else None
  assert scores[2].candidate_entropies == rivals


def test_trajectories_with_a_wrong_step_are_left_out_if_others_are_valid():
  """The groups: one valid trajectory, no valid one, no step checker, nothing stored."""
  steps = [[1, 2], [3, 4], [5], []]
  found = scoring.with_valid_steps(
    [[trajectory(step) for step in own] for own in steps],
    ['2'.__eq__, ''.__eq__, None, '5'.__eq__],
    lambda tokens: str(tokens[0]),
  )
  assert [[one.step for one in own] for own in found] == [[2], [3, 4], [5], []]


def test_costs_of_the_released_rule_match_hand_computed_costs():
  """A window of four entropies shows 0 9 1 2 of the first row and 8 .3 .5 .4 of the second."""
  first, second = [np.float32(own) for own in ([9, 1, 2], [7, 8, 0.3, 0.5, 0.4])]
  # Each mean starts at the row's own length, 2 or 3, because both are among the last eight.
  assert released_costs([first, second], [2, 3], 4) == pytest.approx([1.5, 0.4])
  # Of nine, only the last is. Its length, 4, also applies to the first; the others start at 0.
  costs = released_costs([first, second, *[first] * 7], [2, 3, *[2] * 6, 4], 4)
  assert costs == pytest.approx([-np.inf, 2.3, *[3.0] * 6, -np.inf])


def test_a_tie_goes_to_the_oldest():
  for kind in [kind for kind, cost in RULES.items() if cost]:
    first, second = trajectory(3), trajectory(3)
    assert scoring.pick(
      kind,
      [[first, second]],
      lambda some: [ReplayScores(one, *np.ones((4, 1))) for _, one in some],
      np.random.default_rng(0),
    )[0] == [first], kind


@pytest.mark.parametrize('entropy', [1.0, np.nan])
def test_a_rule_that_returns_nan_is_refused_unless_the_policy_is_broken(entropy, monkeypatch):
  monkeypatch.setitem(RULES, 'mine', lambda _: np.nan)
  scores = lambda some: [ReplayScores(one, *np.full((4, 1), entropy)) for _, one in some]  # noqa: E731
  refusal = pytest.raises(
    InputError, match=r"trajectory_selection: 'mine' .*returned nan at index \[0\]"
  )
  with contextlib.nullcontext() if np.isnan(entropy) else refusal:
    scoring.pick('mine', [[trajectory(3), trajectory(3)]], scores, np.random.default_rng(0))


def test_a_random_pick_is_uniform_and_determined_by_the_seed():
  picks = [pick('random', seed=seed)[0][2] for seed in range(300)]
  assert picks[:9] == [pick('random', seed=seed)[0][2] for seed in range(9)]
  assert ((np.bincount(picks)[2:] - 100) ** 2 / 100).sum() < 13.8  # chi-square, p = .001


# ---- Scores do not depend on which rows share a forward pass ----


LIMIT = 80
LENGTHS = [80, 79, 20, 33, 64, 3, 33, 80, 33, 64, 2, 79, 20]


@pytest.fixture(scope='module')
def params(mesh):
  return model.init(SMALL, jax.random.key(0), mesh)


@pytest.fixture
def score(params, mesh, monkeypatch):
  """Return a function from tokens per pass to (rows, scores, shapes of the passes)."""
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
      spec = scoring.ScoreSpec(SMALL, mesh, LIMIT, tokens_per_pass, 1.0, 64)
      scores = scoring.score(spec, params, rows)
    return rows, scores, shapes

  return call


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_scores_do_not_depend_on_the_size_of_passes(score, params, mesh):
  """Rows score the same alone. A pass stays within its token limit or holds one long row."""
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


def test_equal_rows_in_a_sequence_have_equal_scores(params, mesh):
  one = np.zeros(3, np.int32)
  spec = scoring.ScoreSpec(SMALL, mesh, LIMIT, 80, 1.0, 64)
  with jax.set_mesh(mesh):
    assert scoring.score(spec, params, []) == ([], [])
    logps, _ = scoring.score(spec, params, [(one, one)] * 3)
  np.testing.assert_array_equal(logps[0], logps[2])
